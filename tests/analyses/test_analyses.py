"""Each analysis inside a real Trainer: its numbers against a second computation, its figure in TensorBoard."""

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kerple.analyses import kernels as kernels_file
from kerple.analyses.attention_maps import AttentionMaps, AttentionStatistics, visit_probabilities
from kerple.analyses.four_terms import FourTerms, four_terms, spread
from kerple.analyses.kernels import Kernels
from kerple.analyses.receptive_field import ReceptiveField
from kerple.analyses.shift import ShiftTest
from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis
from kerple.evaluation.protocols import full, windowed
from kerple.positions import Sinusoidal, SSMax, strategies
from kerple.training.language_model import LanguageModel
from tests.analyses.random_text import RandomText

Rows = list[dict[str, str]]


def model_of(
    name: str, layers: int = 2, per_layer: bool | None = None, qk_norm: bool = False, **options: Any
) -> LanguageModel:
    seed_everything(0, verbose=False)
    position = partial(strategies()[name], **options)
    model = LanguageModel(
        position,
        vocabulary=23,
        length=8,
        layers=layers,
        dim=16,
        heads=2,
        lr=0.01,
        per_layer=per_layer,
        qk_norm=qk_norm,
    )
    with torch.no_grad():
        for module in model.network.modules():  # at their real start all tokens are equally likely
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(std=0.3)
    return model


def trainer_of(directory: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def analysed(directory: Path, callback: Callback, model: LanguageModel) -> Rows:
    trainer_of(directory, callback).test(model, RandomText(tokens=400), verbose=False)
    model.eval()
    return table(directory, callback.name)


def table(directory: Path, name: str) -> Rows:
    with (directory / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def images(directory: Path) -> list[str]:
    return EventAccumulator(str(directory)).Reload().Tags()["images"]


def blocks_of(length: int, count: int) -> torch.Tensor:
    blocks = RandomText(tokens=400).blocks("test", length)
    return torch.stack([blocks[i]["tokens"] for i in range(count)])


@torch.no_grad()
@pytest.mark.parametrize(("name", "moves"), [("Sinusoidal", True), ("KerpleLog", False)])
def test_shift_scores_the_same_segments_at_other_positions(name: str, moves: bool, tmp_path: Path) -> None:
    model = model_of(name)
    rows = analysed(tmp_path, ShiftTest(shifts=[100, 0, 7], blocks=6), model)
    assert [int(r["shift"]) for r in rows] == [0, 7, 100]
    tokens = blocks_of(8, 6)
    for row in rows:
        loss = model.network.losses(tokens, offset=int(row["shift"])).double()
        assert float(row["nll_sum"]) == pytest.approx(float(loss.sum()), rel=1e-6)
        assert float(row["ppl"]) == pytest.approx(math.exp(float(loss.mean())), rel=1e-6)
        assert int(row["targets"]) == 48
    ratio = float(rows[2]["ppl"]) / float(rows[0]["ppl"])
    assert (abs(ratio - 1) > 1e-3) == moves
    assert images(tmp_path) == ["analyses/shift"]


def test_shifts_a_strategy_has_no_position_for_are_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"left out \[5\]: Learned has only 8 positions"):
        rows = analysed(tmp_path, ShiftTest(shifts=[0, 4, 5], length=4, blocks=6), model_of("Learned"))
    assert [int(r["shift"]) for r in rows] == [0, 4]


def test_kernels_are_the_strategys_table(tmp_path: Path) -> None:
    model = model_of("KerpleLog")
    rows = analysed(tmp_path, Kernels(length=100), model)
    bias = model.network.positions[0].bias(torch.arange(100.0)).detach()
    assert {int(r["distance"]) for r in rows} >= {0, 1, 2, 3, 99}
    for row in rows:
        assert float(row["bias"]) == pytest.approx(float(bias[int(row["head"]), int(row["distance"])]), rel=1e-6)
        assert row["layer"] == "all"
    assert images(tmp_path) == ["analyses/kernels"]


def test_kernels_have_a_trajectory_of_bounded_length_that_survives_a_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_file, "MAX_RECORDS", 4)
    data = RandomText(tokens=2000)
    first = trainer_of(tmp_path / "a", Kernels(every=2, distances=(1, 50)), max_steps=4, limit_val_batches=0)
    first.fit(model_of("KerpleLog"), data)
    first.save_checkpoint(tmp_path / "middle.ckpt")
    model = model_of("KerpleLog")
    second = trainer_of(tmp_path / "b", Kernels(every=2, distances=(1, 50)), max_steps=12, limit_val_batches=0)
    second.fit(model, data, ckpt_path=tmp_path / "middle.ckpt", weights_only=False)
    rows = table(tmp_path / "b", "kernels_trajectory")
    assert list(dict.fromkeys(int(r["step"]) for r in rows)) == [0, 4, 8, 12]
    at_end = {(r["name"], int(r["head"])): float(r["value"]) for r in rows if r["step"] == "12"}
    position = model.network.positions[0]
    bias = position.bias(torch.arange(51.0))
    for head in range(2):
        assert at_end["bias at 50", head] == pytest.approx(bias[head, 50].item(), rel=1e-6)
        assert at_end["r1", head] == pytest.approx(position.r1[head].item(), rel=1e-6)
    assert {name for name, _ in at_end} == {"r1", "r2", "bias at 1", "bias at 50"}
    first_values = [float(r["value"]) for r in rows if r["step"] == "0"]
    assert first_values != pytest.approx([float(r["value"]) for r in rows if r["step"] == "12"], rel=1e-3)
    assert images(tmp_path / "b") == ["analyses/kernels_trajectory"]
    assert len(second.callbacks[0].state_dict()["records"]) == 4


def test_kernels_of_weights_and_of_layers_are_drawn_too(tmp_path: Path) -> None:
    model = model_of("KerpleBiasWeight", per_layer=True)
    for parameter in model.network.positions[1].parameters():  # or both layers would have the same kernel
        parameter.data.mul_(2)
    rows = analysed(tmp_path, Kernels(length=40), model)
    assert {r["layer"] for r in rows} == {"0", "1"}
    for row in rows:
        position, distance = model.network.positions[int(row["layer"])], torch.tensor([float(row["distance"])])
        for kind in ("bias", "weight"):
            expected = float(getattr(position, kind)(distance)[int(row["head"]), 0])
            assert float(row[kind]) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_receptive_field_windows_are_windowed_perplexities(tmp_path: Path) -> None:
    model = model_of("KerpleLog")
    shares = analysed(tmp_path, ReceptiveField(length=16, blocks=6), model)
    tokens = blocks_of(16, 6)
    assert [int(r["distance"]) for r in shares] == list(range(16))
    assert float(shares[-1]["cumulative"]) == pytest.approx(1, abs=1e-9)
    rows = table(tmp_path, "receptive_window")
    assert [int(r["window"]) for r in rows] == [1, 2, 4, 8, 16]
    whole = math.exp(float(full(model.network, tokens, 16).double().mean()))
    for row in rows:
        ppl = math.exp(float(windowed(model.network, tokens, 16, window=int(row["window"])).double().mean()))
        assert float(row["ppl"]) == pytest.approx(ppl, rel=1e-6)
        assert float(row["ratio_to_full"]) == pytest.approx(ppl / whole, rel=1e-6)
    assert sum(r["smallest_sufficient"] == "True" for r in rows) == 1
    assert images(tmp_path) == ["analyses/receptive_field"]


@torch.no_grad()
def test_attention_statistics_are_those_of_each_layer_and_head(tmp_path: Path) -> None:
    model, found = model_of("KerpleLog"), {}
    rows = analysed(tmp_path, AttentionStatistics(length=8, blocks=3), model)
    visit_probabilities(model.network, blocks_of(8, 3)[:, :-1], lambda layer, p: found.update({layer: p}))
    for row in rows:
        p = found[int(row["layer"])][:, int(row["head"])].double()  # (3, T, T)
        back = torch.arange(8)[:, None] - torch.arange(8)
        assert float(row["entropy"]) == pytest.approx(float(-torch.xlogy(p, p).sum(-1).mean()), rel=1e-5)
        assert float(row["distance"]) == pytest.approx(float((p * back).sum(-1).mean()), rel=1e-5)
    assert len({row["entropy"] for row in rows}) == len(rows) == 4


def test_attention_maps_are_drawn(tmp_path: Path) -> None:
    trainer_of(tmp_path, AttentionMaps(heads=[(1, 0), (0, 1)], length=6)).test(
        model_of("T5"), RandomText(tokens=400), verbose=False
    )
    assert images(tmp_path) == ["analyses/attention_maps"]
    assert not (tmp_path / "attention_maps.csv").exists()  # T² rows for each head would help nobody


def test_four_terms_are_written_for_an_absolute_encoding(tmp_path: Path) -> None:
    model = model_of("Sinusoidal")
    rows = analysed(tmp_path, FourTerms(blocks=4), model)
    assert len(rows) == 2 * 5
    with torch.no_grad():
        texts = [four_terms(model.network, blocks_of(8, 4)[i : i + 1, :-1]) for i in range(4)]
    for r in rows:
        variances = [float(spread(terms[r["term"]])[int(r["head"])]) ** 2 for terms in texts]
        assert float(r["standard_deviation"]) == pytest.approx(math.sqrt(sum(variances) / 4), rel=1e-4, abs=1e-6)
    assert images(tmp_path) == ["analyses/four_terms"]


@pytest.mark.parametrize(
    ("callback", "strategy", "reason"),
    [
        (FourTerms(), "KerpleLog", "adds nothing to the embeddings"),
        (FourTerms(), {"name": "Together", "parts": [SSMax, Sinusoidal]}, "Together also has transform_qk"),
        (FourTerms(), {"name": "Sinusoidal", "qk_norm": True}, "qk_norm normalises queries and keys"),
        (Kernels(), "RoPE", "no bias by distance"),
        (AttentionStatistics(length=16, blocks=2), "Learned", "only 8 positions"),
    ],
)
def test_what_a_strategy_cannot_show_is_skipped_with_a_reason(
    callback: Callback, strategy: str | dict, reason: str, tmp_path: Path
) -> None:
    name, model = callback.name, model_of(**({"name": strategy} if isinstance(strategy, str) else strategy))
    with pytest.warns(UserWarning, match=reason):
        trainer_of(tmp_path, callback).test(model, RandomText(tokens=400), verbose=False)
    assert not (tmp_path / f"{name}.csv").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShiftTest(shifts=[1, 2]), "0 among them"),
        (lambda: ShiftTest(blocks=0), "blocks: got 0"),
        (lambda: Kernels(every=0), "every 0"),
    ],
)
def test_bad_options_are_errors(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (ShiftTest(blocks=1000), "the test split has only 49 of 8 targets"),
        (AttentionMaps(heads=[(2, 0)]), r"got \[\(2, 0\)\], expected layers 0..1"),
        (AttentionMaps(length=513), "AttentionMaps: length: got 513, expected at most 512"),
        (AttentionStatistics(length=513), "length: got 513, expected at most 512"),
        (FourTerms(length=513), "length: got 513, expected at most 512"),
    ],
)
def test_what_the_model_or_the_data_lacks_is_an_error(callback: Analysis, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        analysed(tmp_path, callback, model_of("Sinusoidal"))


@pytest.mark.parametrize("callback", [ShiftTest(length=4), ReceptiveField(8, 4)], ids=type)
def test_a_model_whose_losses_are_no_numbers_is_an_error(tmp_path: Path, callback: Analysis) -> None:
    model = model_of("KerpleLog")
    torch.nn.init.constant_(model.network.embedding.weight, math.nan)
    with pytest.raises(UserError, match="no finite number"):
        analysed(tmp_path, callback, model)
