"""Loss, schedule and optimiser of the Lightning module."""

import math
from dataclasses import fields

import pytest
import torch
from jsonargparse import ArgumentError
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningArgumentParser
from torch.optim.lr_scheduler import LRScheduler

from kerple.model.architecture import Architecture
from kerple.positions import KerpleLog, KerplePower
from kerple.training.language_model import LanguageModel
from kerple.training.schedule import WarmupCosine
from tests.toy import ToyData


def model(**options: object) -> LanguageModel:
    return LanguageModel(KerpleLog, 11, 8, layers=1, dim=16, heads=2, **options)


def trainer(steps: int) -> Trainer:
    return Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip


def fitted(steps: int, **options: object) -> tuple[LanguageModel, Trainer]:
    module, its_trainer = model(**options), trainer(steps)
    its_trainer.fit(module, datamodule=ToyData())
    return module, its_trainer


def rates_of(schedule: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=8e-3)


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_zero() -> None:
    rise = [8e-4 * (1 + step) for step in range(10)]
    fall = [4e-3 * (1 + math.cos(math.pi * step / 40)) for step in range(41)]
    assert rates_of(WarmupCosine(optimizer(), 10, 50), 51) == pytest.approx(rise + fall, rel=1e-6, abs=1e-12)


def test_every_option_is_a_hyper_parameter_where_the_command_line_builds_the_model() -> None:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(LanguageModel, "model")
    needed = ["--model.position=NoPE", "--model.vocabulary=9", "--model.length=8"]
    config = parser.parse_args([*needed, "--model.tied=true"])
    assert {field.name for field in fields(Architecture)} < set(config.model.keys())
    assert config.model.tied is True
    with pytest.raises(ArgumentError, match="tide"):
        parser.parse_args([*needed, "--model.tide=true"])


def test_training_learns_to_count() -> None:
    torch.manual_seed(0)
    module, _ = fitted(60, lr=0.02)
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3  # from log(11) = 2.4


def test_decay_falls_on_matrices_only() -> None:
    module, its_trainer = fitted(1, weight_decay=0.1, betas=(0.8, 0.9), adam_eps=1e-6)
    groups = its_trainer.optimizers[0].param_groups
    assert all((tuple(g["betas"]), g["eps"]) == ((0.8, 0.9), 1e-6) for g in groups)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in module.parameters()}
    matrices, vectors = its_trainer.optimizers[0].param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert {id(module.network.positions[0].r1)} <= {id(p) for p in vectors["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_ends_within_the_ranges(optimizer: str) -> None:
    module = LanguageModel(KerplePower, 11, 8, layers=1, dim=16, heads=2, lr=100.0, optimizer=optimizer)
    module.trainer = trainer(9)
    optimiser, position = module.configure_optimizers()["optimizer"], module.network.positions[0]
    for sign, ends in ((1.0, (0.01, 0.01)), (-1.0, (None, 2.0))):
        for _ in range(6):
            for p in module.parameters():
                p.grad = torch.full_like(p, sign)
            optimiser.step()
        for value, end in zip((position.r1, position.r2), ends, strict=True):
            assert end is None or value.tolist() == pytest.approx([end] * 2)


def test_muon_moves_the_matrices_of_the_blocks_and_nothing_else() -> None:
    torch.manual_seed(0)
    module, its_trainer = fitted(60, lr=0.02, optimizer="muon")
    groups = its_trainer.optimizers[0].param_groups
    block = module.network.blocks[0]
    assert [{id(p) for p in group["params"]} for group in groups if group["muon"]] == [{id(block.attention.qkv.weight)}]
    assert [{id(p) for p in group["params"]} for group in groups if group["muon"] == []] == [
        {id(block.attention.out.weight), id(block.mlp[0].weight), id(block.mlp[2].weight)}
    ]
    everything = [p for group in groups for p in group["params"]]
    assert {id(p) for p in everything} == {id(p) for p in module.parameters()}
    assert len(everything) == len(list(module.parameters()))
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3  # from log(11) = 2.4


def test_muon_is_refused_where_the_strategy_cuts_up_the_matrices() -> None:
    module = model(optimizer="muon")
    qkv = module.network.blocks[0].attention.qkv
    qkv.weight = torch.nn.Parameter(qkv.weight.detach().flatten())  # as FSDP leaves it
    with pytest.raises(ValueError, match=r"model\.optimizer: got muon"):
        module.configure_optimizers()


def test_a_model_for_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary: got 13 token ids, expected the 11 that the model was"):
        trainer(1).fit(model(), datamodule=ToyData(vocabulary=13))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"lr": 0.0}, "lr: got 0.0"), ({"warmup": 1.0}, "warmup: got 1.0"), ({"pad_vocabulary_to": 0}, "pad_vocab")],
)
def test_a_bad_number_is_named(option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**option)


def test_matrices_decay_also_where_fsdp_has_made_them_flat() -> None:
    module = model(weight_decay=0.1)
    module.trainer = trainer(4)
    expected = [[p.numel() for p in g["params"]] for g in module.configure_optimizers()["optimizer"].param_groups]
    assert [len(sizes) > 0 for sizes in expected] == [True, True]

    wrapper = torch.nn.Module()  # as FSDP wraps a block
    wrapper.add_module("_fsdp_wrapped_module", module.network.blocks[0])
    module.network.blocks[0] = wrapper
    for part in module.network.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(parameter.detach().flatten()))
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [[p.numel() for p in group["params"]] for group in groups] == expected
