"""Loss, schedule and optimiser of the Lightning module."""

import math

import pytest
import torch
from pytorch_lightning import Trainer

from kerple.model import Transformer
from kerple.positions import KerpleLog, KerplePower
from kerple.training.language_model import LanguageModel
from tests.toy import ToyData


def model(**options: object) -> LanguageModel:
    return LanguageModel(KerpleLog, 11, 8, layers=1, dim=16, heads=2, **options)


def fitted(steps: int, **options: object) -> tuple[LanguageModel, Trainer]:
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    module = model(**options)
    trainer.fit(module, datamodule=ToyData())
    return module, trainer


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_zero() -> None:
    rates: list[float] = []

    class Recorded(LanguageModel):
        def on_train_batch_start(self, batch: object, index: int) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    module = Recorded(KerpleLog, 11, 8, layers=1, dim=16, heads=2, lr=0.5, warmup=0.2)
    trainer = Trainer(
        max_steps=50, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=ToyData())

    warmup = [0.05 + 0.05 * t for t in range(10)]
    cosine = [0.25 * (1 + math.cos(math.pi * (t - 10) / 40)) for t in range(10, 50)]
    assert rates == pytest.approx(warmup + cosine, rel=1e-6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)  # after the last step


def test_training_learns_to_count() -> None:
    torch.manual_seed(0)
    module, _ = fitted(60, lr=0.02)
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3  # from log(11) = 2.4


def test_the_network_is_compiled_where_that_is_asked_for(monkeypatch) -> None:
    calls: list[Transformer] = []
    monkeypatch.setattr(Transformer, "compile", lambda self, **_: calls.append(self))
    fitted(1)
    assert calls == []
    module, _ = fitted(1, compile=True)
    assert calls == [module.network]


def test_decay_falls_on_matrices_only() -> None:
    module, trainer = fitted(1, weight_decay=0.1, betas=(0.8, 0.9), adam_eps=1e-6)
    groups = trainer.optimizers[0].param_groups
    assert all((tuple(g["betas"]), g["eps"]) == ((0.8, 0.9), 1e-6) for g in groups)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in module.parameters()}
    matrices, vectors = trainer.optimizers[0].param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert {id(module.network.positions[0].r1)} <= {id(p) for p in vectors["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_ends_within_the_ranges(optimizer: str) -> None:
    module = LanguageModel(KerplePower, 11, 8, layers=1, dim=16, heads=2, lr=100.0, optimizer=optimizer)
    module.trainer = Trainer(max_steps=9, accelerator="cpu", logger=False, enable_checkpointing=False)
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
    module, trainer = fitted(60, lr=0.02, optimizer="muon")
    groups = trainer.optimizers[0].param_groups
    block = module.network.blocks[0]
    assert [{id(p) for p in group["params"]} for group in groups if group["muon"] == 3] == [
        {id(block.attention.qkv.weight)}
    ]
    assert [{id(p) for p in group["params"]} for group in groups if group["muon"] == 1] == [
        {id(block.attention.out.weight), id(block.mlp[0].weight), id(block.mlp[2].weight)}
    ]
    everything = [p for group in groups for p in group["params"]]
    assert {id(p) for p in everything} == {id(p) for p in module.parameters()}
    assert len(everything) == len(list(module.parameters()))
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3  # from log(11) = 2.4


def test_muon_trains_grouped_heads() -> None:
    torch.manual_seed(0)
    module, trainer = fitted(60, lr=0.02, optimizer="muon", kv_heads=1, norm="rms", gated=True, activation="silu")
    assert [16, 8, 8] in [group["muon"] for group in trainer.optimizers[0].param_groups]
    with torch.no_grad():
        losses = module.network.losses(torch.arange(9)[None])
    assert losses[0, 2:].mean() < 0.3


def test_muon_is_refused_where_the_strategy_cuts_up_the_matrices() -> None:
    module = model(optimizer="muon")
    qkv = module.network.blocks[0].attention.qkv
    qkv.weight = torch.nn.Parameter(qkv.weight.detach().flatten())  # as FSDP leaves it
    with pytest.raises(ValueError, match=r"model\.optimizer: got muon"):
        module.configure_optimizers()


def test_a_model_for_other_data_is_refused() -> None:
    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="vocabulary: got 13 token ids, expected the 11 that the model was"):
        trainer.fit(model(), datamodule=ToyData(vocabulary=13))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"lr": 0.0}, "lr: got 0.0"), ({"warmup": 1.0}, "warmup: got 1.0"), ({"pad_vocabulary_to": 0}, "pad_vocab")],
)
def test_a_bad_number_is_named(option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**option)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert model(pad_vocabulary_to=8).network.head.out_features == 16


def test_matrices_decay_also_where_fsdp_has_made_them_flat() -> None:
    module = model(weight_decay=0.1)
    module.trainer = Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False)
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
