"""Loss, schedule and optimiser of the Lightning module."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import FSDPStrategy

from kerple.training import language_model
from kerple.training.language_model import LanguageModel, lr_multiplier
from tests.toy import ToyData, small_model, trainer


def fit_toy(folder: Path, steps: int, **options: object) -> tuple[LanguageModel, Trainer]:
    module = small_model(**options)
    run = trainer(folder, max_steps=steps, enable_checkpointing=False, limit_val_batches=0)
    run.fit(module, datamodule=ToyData())
    return module, run


@pytest.mark.parametrize(
    ("name", "fall"),
    [
        ("cosine", [0.5 + 0.25 * (1 + math.cos(math.pi * step / 40)) for step in range(41)]),
        ("linear", [1 - 0.5 * step / 40 for step in range(41)]),
        ("wsd", [1.0] * 31 + [1 - 0.5 * step / 10 for step in range(1, 11)]),  # falls in the last fifth of 50 steps
        ("constant", [1.0] * 41),
    ],
)
def test_the_learning_rate_rises_linearly_then_falls_to_its_final_fraction(name: str, fall: list[float]) -> None:
    rates = [lr_multiplier(step, name, warmup=10, end=50, final=0.5, decay=0.2) for step in range(51)]
    assert rates == pytest.approx([0.1 * (1 + step) for step in range(10)] + fall, rel=1e-6)


def test_an_optimiser_and_a_schedule_by_class_get_our_groups_and_rate(tmp_path: Path, monkeypatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(language_model, "rank_zero_info", printed.append)
    sgd, steps = partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    _, run = fit_toy(tmp_path, 4, optimizer=sgd, schedule=steps, lr=0.5, weight_decay=0.1)
    assert isinstance(run.optimizers[0], torch.optim.SGD)
    matrices, vectors = run.optimizers[0].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"], matrices["momentum"]) == (0.1, 0.0, 0.9)
    assert [matrices["lr"], vectors["lr"]] == pytest.approx([0.005, 0.005])  # a tenth after every second step
    assert printed == ["model.optimizer: SGD with lr 0.5 (model.lr) and weight_decay 0.1 (model.weight_decay)"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss_and_groups_contain_all_parameters(optimizer: str, tmp_path: Path) -> None:
    options = {"weight_decay": 0.01, "betas": (0.9, 0.99), "adam_eps": 1e-7}
    module, run = fit_toy(tmp_path, 40, lr=0.03, optimizer=optimizer, **options)
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3  # from log(11) = 2.4
    groups, block = run.optimizers[0].param_groups, module.network.blocks[0]
    assert all((tuple(group["betas"]), group["eps"]) == ((0.9, 0.99), 1e-7) for group in groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    assert {id(p) for p in parameters} == {id(p) for p in module.parameters()}
    assert len(parameters) == len(list(module.parameters()))
    assert groups[-1]["weight_decay"] == 0
    for group in groups[:-1]:
        assert group["weight_decay"] == 0.01
        assert all(p.ndim >= 2 for p in group["params"])
    assert any(p is module.network.positions[0].r1 for p in groups[-1]["params"])
    by_muon = [[id(p) for p in group["params"]] for group in groups if group.get("muon") is not None]
    linear = [id(block.attention.out.weight), id(block.mlp[0].weight), id(block.mlp[2].weight)]
    expected = [[id(block.attention.qkv.weight)], linear] if optimizer == "muon" else []
    assert list(map(sorted, by_muon)) == list(map(sorted, expected))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_are_within_their_ranges_after_a_step(optimizer: str, tmp_path: Path) -> None:
    module = small_model("KerplePower", lr=100.0, optimizer=optimizer)
    module.trainer = trainer(tmp_path, max_steps=9)
    optimiser, position = module.configure_optimizers()["optimizer"], module.network.positions[0]
    for sign, ends in ((1.0, (0.01, 0.01)), (-1.0, (None, 2.0))):
        for _ in range(6):
            for p in module.parameters():
                p.grad = torch.full_like(p, sign)
            optimiser.step()
        for value, end in zip((position.r1, position.r2), ends, strict=True):
            assert end is None or value.tolist() == pytest.approx([end] * 2)


def test_other_data_and_unsupported_training_are_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="vocabulary: got 13, expected the 11 tokens of the model"):
        trainer(tmp_path, max_steps=1).fit(small_model(), datamodule=ToyData(vocabulary=13))
    with pytest.raises(ValueError, match=r"max_steps: got -1, .*; max_epochs 2 is 6 steps of this data"):
        trainer(tmp_path, max_epochs=2, limit_train_batches=3).fit(small_model(), datamodule=ToyData())
    data = ToyData()
    loader = data.val_dataloader()
    monkeypatch.setattr(data, "val_dataloader", lambda: [loader, loader])  # their losses would be added to one mean
    with pytest.raises(ValueError, match=r"^data: got several loaders for validation, expected one; "):
        trainer(tmp_path, max_steps=1).validate(small_model(), datamodule=data)
    module = small_model()
    module.trainer = trainer(tmp_path, max_steps=1)
    monkeypatch.setattr(Trainer, "strategy", FSDPStrategy())  # which would round strategies to bf16
    with pytest.raises(ValueError, match=r"trainer\.strategy: got FSDPStrategy, expected ShardedBlocks"):
        module.configure_model()
    module.build_optimiser = partial(torch.optim.SGD, fused=True)
    monkeypatch.setattr(Trainer, "precision", "16-mixed")  # whose loss scaler a CPU does not have
    module.trainer.gradient_clip_val = 1.0
    with pytest.raises(ValueError, match="got a fused one, whose"):
        module.configure_optimizers()
