"""Throughput in a real fit: what is logged, what is written, what a resumed run keeps."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

import kerple.training.throughput as throughput
from kerple.attention import attend
from kerple.positions import build
from kerple.training.throughput import Throughput


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.position = build("KerpleLog", dim=8, heads=2, length=4)
        self.again = self.position  # shared by another layer
        self.linear = torch.nn.Linear(3, 1)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.linear(torch.ones(3)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Clock:
    """Seconds that pass only where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def trainer(folder: Path, callbacks: list[Any], steps: int = 8, **options: Any) -> Trainer:
    return Trainer(
        logger=TensorBoardLogger(folder, name="", version=""), callbacks=callbacks, max_steps=steps, accelerator="cpu",
        log_every_n_steps=2, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def loader() -> DataLoader:
    return DataLoader([{"tokens": torch.zeros(5, dtype=torch.int64)}] * 64, batch_size=4)


class SlowSteps(Model):
    """Each step takes 1 s but the first, which takes 50; a validation takes 1,000."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.clock.now += 50 if self.global_step == 0 else 1
        return super().training_step(batch, index)

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.clock.now += 1000


def test_rate_counts_targets_and_leaves_out_validation_and_the_start(tmp_path: Path, clock: Clock) -> None:
    callback = Throughput()
    run = trainer(tmp_path, [callback], val_check_interval=3, limit_val_batches=2)
    run.fit(SlowSteps(clock), loader(), loader())

    # 4 sequences of 4 targets in 1 s; the interval with the first step and validations between steps leave no trace
    assert callback.rates == [16.0, 16.0, 16.0]
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert cost["tokens_per_second"] == 16.0
    assert cost["steps"] == 8
    assert cost["position_parameters"] == 4  # r1 and r2 of 2 heads, once
    assert cost["parameters"] == 4 + 4
    assert cost["peak_memory_bytes"] > 50 * 2**20  # a process with torch in it
    assert cost["environment"]["torch"] == version("torch")
    assert run.progress_bar_metrics["train/tokens_per_second"] == 16.0
    assert run.callback_metrics["train/peak_memory_mib"] > 50


def test_a_step_of_several_batches_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    callback = Throughput()
    trainer(tmp_path, [callback], steps=4, accumulate_grad_batches=4).fit(SlowSteps(clock), loader())
    assert callback.rates == [16.0]  # for 2 steps of 4 batches, of 1 s each


def test_a_resumed_run_keeps_the_rates_from_before(tmp_path: Path, clock: Clock) -> None:
    first = Throughput()
    run = trainer(tmp_path / "a", [first], limit_val_batches=0)
    run.fit(SlowSteps(clock), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    second = Throughput()
    trainer(tmp_path / "b", [second], steps=12, limit_val_batches=0).fit(
        SlowSteps(clock), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )
    assert second.rates[: len(first.rates)] == first.rates
    assert len(second.rates) == len(first.rates) + 1  # 2 intervals more, the first of them left out


def fit(folder: Path, steps: int, resume: Path | None = None) -> int:
    """Peak memory that cost.json gives for a fit up to so many steps."""
    run = trainer(folder, [Throughput()], steps=steps, limit_val_batches=0)
    run.fit(Model(), loader(), ckpt_path=resume, weights_only=False if resume else None)
    run.save_checkpoint(folder / "last.ckpt")
    return json.loads((folder / "cost.json").read_text())["peak_memory_bytes"]


def test_a_resumed_run_keeps_the_peak_memory_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 1000)
    assert fit(tmp_path / "a", steps=4) == 1000
    checkpoint = tmp_path / "a" / "last.ckpt"
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 400)
    assert fit(tmp_path / "b", 4, checkpoint) == 1000  # nothing left to train, and cost.json not yet written
    assert fit(tmp_path / "c", 8, checkpoint) == 1000
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 3000)
    assert fit(tmp_path / "d", 8, checkpoint) == 3000


def test_the_backend_of_attention_is_written_with_its_reason(tmp_path: Path) -> None:
    class Attending(Model):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            q = self.linear.weight.expand(1, 1, 20, 3)
            attend(q, q, q, option="reference" if index else "auto")
            return super().training_step(batch, index)

    attend(*torch.zeros(3, 1, 1, 4, 8), option="blocks")  # before the run
    trainer(tmp_path, [Throughput()], 4).fit(Attending(), loader())
    assert json.loads((tmp_path / "cost.json").read_text())["attention"] == [
        {"name": "sdpa", "reason": "torch's fused kernel does causal attention without a table"},
        {"name": "reference", "reason": "model.attention says so"},
    ]
