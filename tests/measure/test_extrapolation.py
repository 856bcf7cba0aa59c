"""Extrapolation in a Trainer: sums against loops, logs, and errors."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kerple.base.errors import UserError
from kerple.measure import metrics, results
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.measure import Measure
from kerple.measure.task_accuracy import TaskAccuracy
from kerple.positions import NoPE
from kerple.positions.visibility import EVERYTHING, Visibility
from kerple.training.language_model import LanguageModel
from kerple.training.measure_callback import MeasureCallback
from tests.toy import RandomText, small_model, trainer

PROTOCOLS = ["full", "windowed", "sliding", "last", "per_position"]


class Short(NoPE):
    """NoPE that claims to have no position past 15."""

    max_length = 16


def model_of(position: Any = "KerpleLog") -> LanguageModel:
    return small_model(position, vocabulary=23)


def run(
    folder: Path,
    *measures: Measure,
    data: RandomText | None = None,
    model: LanguageModel | None = None,
    **options: Any,
) -> dict[tuple[str, int], pd.DataFrame]:
    """Test a model, by default an untrained one. Return the written sums by protocol and length."""
    options = {"events": True} | options
    trainer(folder, *measures, **options).test(model or model_of(), data or RandomText(), verbose=False)
    if not (folder / results.ABOUT).exists():
        return {}
    table = results.read(folder)[0]
    groups = table.groupby(["protocol", "length"], sort=False)
    return {(re.sub(r"\d+$", "", protocol), length): rows for (protocol, length), rows in groups}


def sums(rows: pd.DataFrame) -> list[float]:
    """Sums of losses of each block."""
    return rows[rows["metric"] == "ppl"]["sum"].tolist()


def counts(rows: pd.DataFrame) -> list[int]:
    """Targets of each block."""
    return rows[rows["metric"] == "ppl"]["count"].tolist()


def text_bytes(rows: pd.DataFrame) -> int:
    """Bytes of the text of all targets."""
    return int(rows[rows["metric"] == "bits_per_byte"]["count"].sum())


@torch.no_grad()
def sums_of_segments(data: RandomText, length: int, starts: list[int], window: int | None = None) -> list[float]:
    """Losses of the untrained model, summed over segments of the test split."""
    tokens = torch.stack([data.streams["test"][start : start + length + 1] for start in starts])
    return model_of().eval().network.losses(tokens, visibility=Visibility(window)).double().sum(1).tolist()


def test_sums_are_those_of_a_loop(tmp_path: Path) -> None:
    data = RandomText(tokens=200)
    measured = run(tmp_path, Extrapolation([8, 16, 32], ["full", "windowed"], window=4), data=data)
    assert list(measured) == [(name, n) for name in ("full", "windowed") for n in (8, 16, 32)]
    network, stream = model_of().eval().network, data.streams["test"]
    blocks = (200 - 1) // 32
    for (name, length), rows in measured.items():
        total, text = [0.0] * blocks, 0
        for start in range(0, blocks * 32, length):
            inputs, targets = stream[start : start + length], stream[start + 1 : start + length + 1]
            with torch.no_grad():
                logits = network(inputs[None], Visibility(4 if name == "windowed" else None))[0].double()
            total[start // 32] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            text += sum(int(target) % 5 for target in targets)  # as RandomText spells its tokens
        assert sums(rows) == pytest.approx(total, rel=1e-6)
        assert counts(rows) == [32] * blocks
        assert rows["block"].tolist()[:-1] == list(range(blocks))
        assert text_bytes(rows) == text
        assert rows["sum"].iloc[-1] == pytest.approx(sum(total) / math.log(2), rel=1e-6)
        assert rows["position"].isna().all()


def test_context_gain_is_a_loop_over_segments_with_their_standard_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "BINS", 16)  # of two positions
    data = RandomText(tokens=300)  # 2 blocks of 128
    run(tmp_path, Extrapolation([8, 32], ["full", "windowed"], window=8, block_length=128), data=data)
    table = pd.read_csv(tmp_path / "context_gain.csv")
    network, stream = model_of().eval().network, data.streams["test"]
    losses = []
    for start in range(0, 256, 32):
        inputs, targets = stream[start : start + 32], stream[start + 1 : start + 33]
        with torch.no_grad():
            logits = [network(inputs[None], seen)[0].double() for seen in (EVERYTHING, Visibility(8))]
        losses.append([torch.nn.functional.cross_entropy(each, targets, reduction="none") for each in logits])
    full, windowed = (torch.stack(side).numpy() for side in zip(*losses, strict=True))  # (8 segments, 32 positions)
    assert table["first"].tolist() == list(range(0, 32, 2))
    assert set(table["segments"]) == set(table["window"]) == {8}
    for name, each in (("loss", full), ("gain", windowed - full)):
        values = each.reshape(8, 16, 2).mean(2)
        assert table[name].to_numpy() == pytest.approx(values.mean(0), abs=1e-6)
        assert table[f"{name}_error"].to_numpy() == pytest.approx(stats.sem(values, axis=0), abs=1e-6)
    assert table["gain"][:4].tolist() == [0] * 4  # nothing is outside the window yet


def test_every_protocol_reaches_tensorboard_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = RandomText(tokens=200)  # 3 blocks of 64
    measured = run(tmp_path, Extrapolation([8, 32], PROTOCOLS, stride=4, k=2, block_length=64, skip=28), data=data)
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if tag.startswith("test/")}
    labels = ["full", "windowed8", "sliding4", "last2"]  # without a window given, windowed's is the training length
    assert scalars == {f"test/{kind}/{p}/{n}" for kind in ("ppl", "bits_per_byte") for p in labels for n in (8, 32)}
    for label, name in zip(labels, PROTOCOLS, strict=False):
        ppl = math.exp(sum(sums(measured[name, 32])) / sum(counts(measured[name, 32])))
        assert events.Scalars(f"test/ppl/{label}/32")[0].value == pytest.approx(ppl, rel=1e-6)
    assert "analyses/extrapolation" in events.Tags()["images"]
    by_position = measured["per_position", 32]
    assert by_position["position"].tolist() == list(range(32))
    assert by_position["block"].isna().all()
    assert math.fsum(by_position["sum"]) == pytest.approx(math.fsum(sums(measured["full", 32])), rel=1e-12)
    assert "sliding4" in capsys.readouterr().out
    text = [int(token) % 5 for token in data.streams["test"]]
    for length in (8, 32):
        for name, skipped, k in (("full", 0, length), ("sliding", 28, length), ("last", 0, 2)):
            scored = [i for i in range(1, 193) if (i - 1) % 64 >= skipped and (i - 1) % length >= length - k]
            assert text_bytes(measured[name, length]) == sum(text[i] for i in scored)
            assert sum(counts(measured[name, length])) == len(scored)


def test_two_processes_give_the_sums_of_one(tmp_path: Path) -> None:
    for name, options in (("one", {}), ("two", {"strategy": "ddp_fork", "devices": 2})):
        run(tmp_path / name, Extrapolation([8, 16], block_length=32, blocks=5), model=model_of(Short), **options)
    ours, theirs = (pd.read_csv(tmp_path / run / "context_gain.csv") for run in ("one", "two"))
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-9)
    one, two = (EventAccumulator(str(tmp_path / name)).Reload() for name in ("one", "two"))
    for tag in (tag for tag in one.Tags()["scalars"] if tag.startswith("test/")):
        assert one.Scalars(tag)[0].value == two.Scalars(tag)[0].value


def test_lengths_out_of_reach_are_skipped_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path, Extrapolation([8, 16, 32]), model=model_of(Short), events=False)
    assert list(whole) == [(name, length) for name in ("full", "windowed") for length in (8, 16)]
    assert "full at 32: skipped, the strategy has only 16 positions" in capsys.readouterr().out


def test_papers_sampling_scores_its_own_segments_at_each_length(tmp_path: Path) -> None:
    data = RandomText(tokens=400)
    measured = run(tmp_path, Extrapolation([8, 32], sampling="paper", segments=9, seed=3), data=data)
    for (name, length), rows in measured.items():
        order = torch.randperm((400 - 1) // length, generator=torch.Generator().manual_seed(3))[:9].tolist()
        window = 8 if name == "windowed" else None  # the training length
        expected = sums_of_segments(data, length, [i * length for i in order], window)
        assert sums(rows) == pytest.approx(expected, rel=1e-6)
    assert len(measured) == 4


@pytest.mark.parametrize("largest", [0.5, 1.0])
def test_no_block_leaves_its_document_and_documents_that_training_has_too_are_left_out(
    largest: float, tmp_path: Path
) -> None:
    data = RandomText(tokens=200)
    data.documents = [0, 20, 53, 54, 119, 187]  # sizes 20, 33, 1, 65, 68, 13: blocks of 32 targets need 33 tokens
    overlaps = [0.9, 0.7, 1.0, 0.5, 0.95, 0.0]
    table = pd.DataFrame({"document": list("abcdef"), "group": list("xyxyzz"), "overlap": overlaps})
    data.table = table
    measured = run(tmp_path, Extrapolation([8, 32], documents=True, overlap=largest), data=data)
    starts = {0.5: [[54, 86]], 1.0: [[20], [54, 86], [119, 151]]}[largest]  # of each document
    expected = [sum(sums_of_segments(data, 32, of_document)) for of_document in starts]
    assert sums(measured["full", 32]) == pytest.approx(expected, rel=1e-6)
    assert {sum(counts(rows)) for rows in measured.values()} == {sum(map(len, starts)) * 32}
    about = json.loads((tmp_path / "results.json").read_text())["evaluations"]["extrapolation"]
    assert about["overlapping"] == {0.5: 2, 1.0: 0}[largest]
    assert about["groups"] == {0.5: ["y"], 1.0: ["y", "y", "z"]}[largest]
    assert about["document_numbers"] == {0.5: [3], 1.0: [1, 3, 4]}[largest]


def test_after_each_validation_of_a_fit_full_is_measured_on_its_first_blocks(tmp_path: Path) -> None:
    model, data = model_of(), RandomText(tokens=200)
    steps = {"max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None}
    trainer(tmp_path, Extrapolation([8, 32], validation_blocks=3), events=True, **steps).fit(model, data)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {t for t in events.Tags()["scalars"] if t.startswith("val/ppl")} == {"val/ppl/full/8", "val/ppl/full/32"}
    points = events.Scalars("val/ppl/full/32")
    assert len(points) == 2  # two validations; the sanity check before them is none
    model.eval()
    tokens = torch.stack([data.blocks("validation", 32)[i] for i in range(3)])
    with torch.no_grad():
        ppl = model.network.losses(tokens).mean().exp()
    assert points[-1].value == pytest.approx(float(ppl), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [8, 12]}, r"lengths: got \[8, 12\]"),
        ({"protocols": ["sliding"], "stride": 9}, "stride: got 9, .* at most 8"),
        ({"protocols": ["full"], "window": 4}, "window: got 4"),
        ({"protocols": ["sliding"], "stride": 4, "skip": 27, "block_length": 64}, "skip: got 27, .* a number from 28"),
        ({"block_length": 16}, "block_length: got 16, expected a multiple of 32"),
        ({"lengths": [8, 256]}, "of 256 targets, but the test split has only 0"),
        ({"sampling": "paper"}, "segments: got 320, but there are only 6"),
        ({"blocks": 7}, "blocks: expected at least 7 of 32 targets, but the test split has only 6"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, Extrapolation(**({"lengths": [8, 32]} | options)), events=False)


def test_what_an_evaluation_cannot_honour_is_refused_before_it_begins(tmp_path: Path) -> None:
    callback, second = Extrapolation([8, 32]), Extrapolation([8], sampling="paper", segments=2)
    with pytest.raises(UserError, match=r"limit_test_batches: got .*, which has no effect on Extrapolation"):
        run(tmp_path, callback, limit_test_batches=2)
    with pytest.raises(UserError, match=r"more than one"):
        run(tmp_path, callback, second)
    fit = trainer(tmp_path, Extrapolation([8, 256]), max_steps=1)
    with pytest.raises(UserError, match="got 256, expected less than 200, the number of tokens in the validation"):
        fit.fit(model_of(), RandomText())
    assert fit.global_step == 0
    sharded: Any = SimpleNamespace(strategy=ModelParallelStrategy(), datamodule=RandomText(), callbacks=[])
    with pytest.raises(UserError, match=r"got Extrapolation, which does not support sharded parameters"):
        MeasureCallback(Extrapolation([8])).setup(sharded, model_of(), "fit")
    with pytest.raises(UserError, match=r"got TaskAccuracy, which does not support sharded parameters"):
        MeasureCallback(TaskAccuracy()).setup(sharded, model_of(), "fit")
