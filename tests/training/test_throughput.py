"""Throughput in a fit: logs, cost.json and resumption."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

import kerple.training.throughput as throughput
from kerple.attention import attend
from kerple.positions import build
from kerple.training.throughput import Throughput
from tests.toy import trainer


class Model(LightningModule):
    """Model with a simulated clock: the first step takes 50 s, other steps 1 s, a validation 1,000 s."""

    seconds = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.position = build("KerpleLog", dim=8, heads=2, length=4)
        self.again = self.position  # shared by another layer
        self.linear = torch.nn.Linear(3, 1)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        Model.seconds += 50 if self.global_step == 0 else 1
        return self.linear(torch.ones(3)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        Model.seconds += 1000

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: Model.seconds))


def fit(
    folder: Path, callback: Throughput, steps: int = 8, model: Any = None, resume: Path | None = None, **more: Any
) -> Trainer:
    """Fit with batches of 4 sequences of 4 targets, and write last.ckpt into the same folder."""
    text = DataLoader([{"tokens": torch.zeros(5, dtype=torch.int64)}] * 64, batch_size=4)
    options = {"limit_val_batches": 0, "log_every_n_steps": 2, "num_sanity_val_steps": 0} | more
    run = trainer(folder, callback, events=True, max_steps=steps, **options)
    run.fit(model or Model(), text, text, ckpt_path=resume, weights_only=False if resume else None)
    run.save_checkpoint(folder / "last.ckpt")
    return run


def cost(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cost.json").read_text())


def test_the_rate_excludes_validation_and_the_first_step(tmp_path: Path) -> None:
    callback = Throughput()
    run = fit(tmp_path, callback, accumulate_grad_batches=2, val_check_interval=6, limit_val_batches=2)
    # 4 sequences of 4 targets in 1 s, without the first interval and without validations
    assert callback.rates == [16.0, 16.0, 16.0]
    written = cost(tmp_path)
    assert written["tokens_per_second"] == 16.0
    assert written["steps"] == 8
    assert written["position_parameters"] == 4  # r1 and r2 of 2 heads, once
    assert written["parameters"] == 4 + 4
    assert written["peak_memory_bytes"] > 50 * 2**20  # memory of a process that has imported torch
    assert written["environment"]["torch"] == version("torch")
    assert run.progress_bar_metrics["train/tokens_per_second"] == 16.0
    assert run.callback_metrics["train/peak_memory_mib"] > 50


def test_a_resumed_run_keeps_earlier_rates_and_peak_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 1000)
    first = Throughput()
    fit(tmp_path / "a", first)
    assert cost(tmp_path / "a")["peak_memory_bytes"] == 1000
    checkpoint = tmp_path / "a" / "last.ckpt"
    for folder, steps, peak in (("b", 8, 400), ("c", 12, 400), ("d", 12, 3000)):
        monkeypatch.setattr(throughput, "peak_memory", lambda device, peak=peak: peak)
        fit(tmp_path / folder, second := Throughput(), steps, resume=checkpoint)
        # in b, no step is left, and cost.json is not yet written
        assert cost(tmp_path / folder)["peak_memory_bytes"] == max(1000, peak)
    assert second.rates[: len(first.rates)] == first.rates
    assert len(second.rates) == len(first.rates) + 1  # of 2 more intervals, the first is left out


def test_cost_json_contains_the_backends_of_attention(tmp_path: Path) -> None:
    class Attending(Model):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            q = self.linear.weight.expand(1, 1, 20, 3)
            attend(q, q, q, option="reference" if index else "auto")
            return super().training_step(batch, index)

    attend(*torch.zeros(3, 1, 1, 4, 8), option="blocks")  # before the run
    fit(tmp_path, Throughput(), 4, Attending())
    assert [backend["name"] for backend in cost(tmp_path)["attention"]] == ["sdpa", "reference"]
