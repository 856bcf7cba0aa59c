"""Extrapolation in a Trainer: sums against loops, logs, and errors."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.strategies import ModelParallelStrategy
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from kerple.base.errors import UserError
from kerple.measure import loss_metrics, results_table
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.far_context import FarContext
from kerple.measure.measure import Measure
from kerple.measure.task_accuracy import TaskAccuracy
from kerple.positions import NoPE
from kerple.positions.visibility import Visibility
from kerple.training.language_model import LanguageModel
from kerple.training.measure_callback import MeasureCallback
from tests.toy import RandomText, small_model, trainer

PROTOCOLS = ["full", "windowed", "sliding", "last", "per_position"]


class Short(NoPE):
    """NoPE with a limit of 16 positions."""

    max_length = 16


def model_of(position: Any = "KerpleLog") -> LanguageModel:
    return small_model(position, vocabulary=23)


def run(
    folder: Path, *measures: Measure, data: RandomText | None = None, position: Any = "KerpleLog", **options: Any
) -> dict[tuple[str, int], pd.DataFrame]:
    """Test an untrained model. Return the written sums by protocol, without its option, and length."""
    options = {"events": True} | options
    trainer(folder, *measures, **options).test(model_of(position), data or RandomText(), verbose=False)
    groups = results_table.read(folder)[0].groupby(["protocol", "length"], sort=False)
    return {(re.sub(r"\d+$", "", protocol), length): rows for (protocol, length), rows in groups}


def entries(rows: pd.DataFrame, column: str = "sum", metric: str = "ppl") -> list[Any]:
    """Return the entries of a column for a metric, by default the sum of losses of each block."""
    return rows.loc[rows["metric"] == metric, column].tolist()


@torch.no_grad()
def segment_losses(data: RandomText, start: int, length: int, window: int | None = None) -> Tensor:
    """Return the losses of the untrained model in a segment of the test split, (length,), by a softmax in fp64."""
    tokens = data.streams["test"][start : start + length + 1]
    logits = model_of().eval().network(tokens[None, :-1], Visibility(window))[0].double()
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


def test_sums_equal_a_loop_over_segments(tmp_path: Path) -> None:
    data = RandomText(tokens=200)
    measured = run(tmp_path, Extrapolation([8, 16, 32], ["full", "windowed"], window=4), data=data)
    assert list(measured) == [(name, n) for name in ("full", "windowed") for n in (8, 16, 32)]
    stream, blocks = data.streams["test"], (200 - 1) // 32
    for (name, length), rows in measured.items():
        total, text_bytes = [0.0] * blocks, 0
        for start in range(0, blocks * 32, length):
            total[start // 32] += float(segment_losses(data, start, length, 4 if name == "windowed" else None).sum())
            targets = stream[start + 1 : start + length + 1]
            text_bytes += sum(int(target) % 5 for target in targets)  # as `RandomText.token_bytes`
        assert entries(rows) == pytest.approx(total, rel=1e-6)
        assert entries(rows, "count") == [32] * blocks
        assert entries(rows, "block") == list(range(blocks))
        assert entries(rows, "count", "bits_per_byte") == [text_bytes]
        assert rows["sum"].iloc[-1] == pytest.approx(sum(total) / math.log(2), rel=1e-6)
        assert rows["position"].isna().all()


def test_context_gain_equals_a_loop_over_segments_with_standard_errors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loss_metrics, "BINS", 16)  # of two positions
    data = RandomText(tokens=300)  # 2 blocks of 128
    run(tmp_path, Extrapolation([8, 32], ["full", "windowed"], window=8, block_length=128), data=data)
    table = pd.read_csv(tmp_path / "context_gain.csv")
    losses = [[segment_losses(data, start, 32, window) for start in range(0, 256, 32)] for window in (None, 8)]
    full, windowed = (torch.stack(rows).numpy() for rows in losses)  # (8 segments, 32 positions)
    assert table["first"].tolist() == list(range(0, 32, 2))
    assert set(table["segments"]) == set(table["window"]) == {8}
    for name, by_position in (("loss", full), ("gain", windowed - full)):
        values = by_position.reshape(8, 16, 2).mean(2)
        assert table[name].to_numpy() == pytest.approx(values.mean(0), abs=1e-6)
        assert table[f"{name}_error"].to_numpy() == pytest.approx(stats.sem(values, axis=0), abs=1e-6)
    assert table["gain"][:4].tolist() == [0] * 4  # no key is outside the window at positions 0 to 7


def test_every_protocol_reaches_tensorboard_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = RandomText(tokens=200)  # 3 blocks of 64
    measured = run(tmp_path, Extrapolation([8, 32], PROTOCOLS, stride=4, k=2, block_length=64, skip=28), data=data)
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if tag.startswith("test/")}
    labels = ["full", "windowed8", "sliding4", "last2"]  # the default window is the training length
    assert scalars == {f"test/{kind}/{p}/{n}" for kind in ("ppl", "bits_per_byte") for p in labels for n in (8, 32)}
    for label, name in zip(labels, PROTOCOLS, strict=False):
        rows = measured[name, 32]
        ppl = math.exp(sum(entries(rows)) / sum(entries(rows, "count")))
        assert events.Scalars(f"test/ppl/{label}/32")[0].value == pytest.approx(ppl, rel=1e-6)
    assert "analyses/extrapolation" in events.Tags()["images"]
    by_position = measured["per_position", 32]
    assert by_position["position"].tolist() == list(range(32))
    assert by_position["block"].isna().all()
    assert math.fsum(by_position["sum"]) == pytest.approx(math.fsum(entries(measured["full", 32])), rel=1e-12)
    assert "sliding4" in capsys.readouterr().out
    text_bytes = [int(token) % 5 for token in data.streams["test"]]
    for length in (8, 32):
        for name, skipped, k in (("full", 0, length), ("sliding", 28, length), ("last", 0, 2)):
            scored = [i for i in range(1, 193) if (i - 1) % 64 >= skipped and (i - 1) % length >= length - k]
            rows = measured[name, length]
            assert entries(rows, "count", "bits_per_byte") == [sum(text_bytes[i] for i in scored)]
            assert sum(entries(rows, "count")) == len(scored)


def test_two_processes_give_the_sums_of_one(tmp_path: Path) -> None:
    for name, options in (("one", {}), ("two", {"strategy": "ddp_fork", "devices": 2})):
        run(tmp_path / name, Extrapolation([8, 16], block_length=32, blocks=5), position=Short, **options)
    gains = [pd.read_csv(tmp_path / name / "context_gain.csv") for name in ("one", "two")]
    pd.testing.assert_frame_equal(*gains, rtol=1e-9)
    one, two = (EventAccumulator(str(tmp_path / name)).Reload() for name in ("one", "two"))
    for tag in (tag for tag in one.Tags()["scalars"] if tag.startswith("test/")):
        assert one.Scalars(tag)[0].value == two.Scalars(tag)[0].value


def test_lengths_beyond_the_last_position_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = run(tmp_path, Extrapolation([8, 16, 32]), position=Short, events=False)
    assert list(measured) == [(name, length) for name in ("full", "windowed") for length in (8, 16)]
    assert "full at 32: skipped, Short has only 16 positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    "measure",
    [FarContext([32]), Extrapolation([32], documents=True), Extrapolation([8], ["per_position"], documents=True)],
)
def test_results_with_groups_but_without_blocks_can_be_read(measure: Measure, tmp_path: Path) -> None:
    data = RandomText(tokens=200)
    data.begins, data.table = [0, 100], pd.DataFrame({"group": ["x", "y"], "overlap": 0.0})
    assert set(run(tmp_path, measure, data=data, position=Short, events=False)) <= {("per_position", 8)}
    assert results_table.read(tmp_path)[1]["evaluations"][measure.name]["groups"] == ["x", "y"]


def test_sampling_of_the_paper_scores_different_segments_at_each_length(tmp_path: Path) -> None:
    data = RandomText(tokens=400)
    measured = run(tmp_path, Extrapolation([8, 32], sampling="paper", segments=9, seed=3), data=data)
    for (name, length), rows in measured.items():
        order = torch.randperm((400 - 1) // length, generator=torch.Generator().manual_seed(3))[:9].tolist()
        window = 8 if name == "windowed" else None  # the training length
        expected = [float(segment_losses(data, i * length, length, window).sum()) for i in order]
        assert entries(rows) == pytest.approx(expected, rel=1e-6)
    assert len(measured) == 4
    about = results_table.read(tmp_path)[1]["evaluations"]["extrapolation"]
    assert (about["seed"], about["window"]) == (3, 8)


@pytest.mark.parametrize(
    ("overlap", "starts", "groups", "document_numbers"),
    [(0.5, [[54, 86]], ["y"], [3]), (1.0, [[20], [54, 86], [119, 151]], ["y", "y", "z"], [1, 3, 4])],
)
def test_blocks_lie_inside_documents_that_overlap_little_with_the_training_text(
    overlap: float, starts: list[list[int]], groups: list[str], document_numbers: list[int], tmp_path: Path
) -> None:
    data = RandomText(tokens=200)
    data.begins = [0, 20, 53, 54, 119, 187]  # sizes 20, 33, 1, 65, 68, 13: blocks of 32 targets need 33 tokens
    overlaps = [0.9, 0.7, 1.0, 0.5, 0.95, 0.0]
    data.table = pd.DataFrame({"document": list("abcdef"), "group": list("xyxyzz"), "overlap": overlaps})
    measured = run(tmp_path, Extrapolation([8, 32], documents=True, overlap=overlap), data=data)
    expected = [sum(float(segment_losses(data, start, 32).sum()) for start in block_starts) for block_starts in starts]
    assert entries(measured["full", 32]) == pytest.approx(expected, rel=1e-6)
    assert {sum(entries(rows, "count")) for rows in measured.values()} == {sum(map(len, starts)) * 32}
    about = results_table.read(tmp_path)[1]["evaluations"]["extrapolation"]
    assert (about["groups"], about["document_numbers"]) == (groups, document_numbers)
    assert about["overlapping"] == 3 - len(starts)


@pytest.mark.parametrize("averaging", [[], [EMAWeightAveraging(decay=0.9)]], ids=["last weights", "averaged weights"])
def test_after_each_validation_of_a_fit_full_is_measured_on_its_first_blocks(
    averaging: list[Callback], tmp_path: Path
) -> None:
    model, data = model_of(), RandomText(tokens=200)
    steps = {"max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None}
    callbacks = [*averaging, Extrapolation([8, 32], validation_blocks=3)]
    trainer(tmp_path, *callbacks, events=True, **steps).fit(model, data)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {t for t in events.Tags()["scalars"] if t.startswith("val/ppl")} == {"val/ppl/full/8", "val/ppl/full/32"}
    points = events.Scalars("val/ppl/full/32")
    assert len(points) == 2  # of two validations, and not of the sanity check before them
    model.eval()
    tokens = torch.stack([data.blocks("validation", 32)[i] for i in range(3)])
    with torch.no_grad():
        ppl = model.network.losses(tokens).mean().exp()
    assert points[-1].value == pytest.approx(float(ppl), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [8, 12]}, r"lengths: got \[8, 12\]"),
        ({"protocols": ["sliding"], "stride": 9}, "stride: got 9, expected 1 to 8"),
        ({"protocols": ["full"], "window": 4}, "window: got 4"),
        (
            {"protocols": ["sliding"], "stride": 4, "skip": 27, "block_length": 64},
            "skip: got 27, expected 0, or 28 to 63",
        ),
        ({"blocks_per_group": 1}, "documents: got false, expected true, because blocks_per_group"),
        ({"documents": True, "overlap": math.nan}, "overlap: got nan, expected a fraction from 0 to 1"),
        ({"overlap": 0.2}, "overlap: got 0.2, expected 0.5 .the default. without documents: true; add"),
        ({"block_length": 16}, "block_length: got 16, expected a multiple of 32"),
        ({"lengths": [8, 256]}, "got 0 blocks of 256 targets in the test split"),
        ({"sampling": "paper"}, "segments: got 320, expected at most 6"),
        ({"sampling": "paper", "segments": -5}, "segments: got -5, expected a positive number"),
        ({"sampling": "paper", "block_length": 64}, "sampling: got paper, expected blocks, because paper excludes"),
        ({"segments": 2}, r"segments: got 2, expected 320 \(the default\), because only sampling: paper uses it"),
        ({"blocks": 7}, "blocks: got 6 blocks of 32 targets in the test split, expected at least 7"),
    ],
)
def test_options_out_of_range_are_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, Extrapolation(**({"lengths": [8, 32]} | options)), events=False)


def test_unsuitable_trainers_and_texts_are_an_error_before_the_run(tmp_path: Path) -> None:
    callback, second = Extrapolation([8, 32]), Extrapolation([8], sampling="paper", segments=2)
    with pytest.raises(UserError, match=r"limit_test_batches: got .*, which has no effect on Extrapolation"):
        run(tmp_path, callback, limit_test_batches=1)
    with pytest.raises(UserError, match=r"more than one"):
        run(tmp_path, callback, second)
    fit = trainer(tmp_path, Extrapolation([8, 256]), max_steps=1)
    with pytest.raises(UserError, match="got 256 targets, expected less than 200, the number of tokens in the val"):
        fit.fit(model_of(), RandomText())
    assert fit.global_step == 0
    sharded: Any = SimpleNamespace(strategy=ModelParallelStrategy(), datamodule=RandomText(), callbacks=[])
    for measure in (Extrapolation([8]), TaskAccuracy()):
        with pytest.raises(UserError, match=f"got {type(measure).__name__}, which does not support sharded parameters"):
            MeasureCallback(measure).setup(sharded, model_of(), "fit")
