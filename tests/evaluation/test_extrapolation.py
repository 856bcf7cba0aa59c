"""The callback inside a real Trainer: what it writes, logs and refuses, and that its sums depend on the text alone."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from kerple.analyses.heads import AttentionStatistics
from kerple.analyses.receptive_field import ReceptiveField
from kerple.analyses.shift import ShiftTest
from kerple.base.errors import UserError
from kerple.evaluation.context_gain import ContextGain
from kerple.evaluation.extrapolation import Extrapolation
from kerple.positions import Position, Shape, build
from kerple.training.language_model import LanguageModel
from tests.analyses.random_text import RandomText


class Short(Position):
    """NoPE that claims to have no position past 15."""

    max_length = 16

    def __init__(self, shape: Shape) -> None:
        super().__init__()


def strategy(name: str):
    return lambda s: build(name, dim=s.dim, heads=s.heads, length=s.length)


def model_of(position: Any = None, length: int = 8) -> LanguageModel:
    seed_everything(0, verbose=False)
    return LanguageModel(position or strategy("KerpleLog"), vocabulary=23, length=length, layers=1, dim=16, heads=2)


def run(
    directory: Path,
    callback: Extrapolation,
    data: RandomText | None = None,
    position: Any = None,
    also: Sequence[Callback] = (),
    **trainer: Any,
) -> dict[str, Any]:
    """Test an untrained model and read extrapolation.json."""
    Trainer(
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=[callback, *also],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    ).test(model_of(position), data or RandomText(), verbose=False)
    return json.loads((directory / "extrapolation.json").read_text(), parse_constant=pytest.fail)


def sums(result: dict[str, Any]) -> dict[tuple[str, int], float]:
    return {(r["protocol"], r["length"]): r["nll_sum"] for r in result["rows"]}


def test_rows_are_the_sums_of_a_loop(tmp_path: Path) -> None:
    data = RandomText(tokens=200)
    result = run(tmp_path, Extrapolation([8, 16, 32], ["full", "windowed"], window=4), data)

    network, stream = model_of().eval().network, data.streams["test"]
    blocks = (200 - 1) // 32
    for row in result["rows"]:
        length, total, text = row["length"], 0.0, 0
        for start in range(0, blocks * 32, length):
            inputs, targets = stream[start : start + length], stream[start + 1 : start + length + 1]
            with torch.no_grad():
                logits = network(inputs[None], window=row["window"])[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            text += sum(int(target) % 5 for target in targets)  # as RandomText spells its tokens
        assert row["nll_sum"] == pytest.approx(total, rel=1e-6)
        assert row["targets"] == blocks * 32
        assert row["ppl"] == pytest.approx(math.exp(total / (blocks * 32)), rel=1e-6)
        assert row["bytes"] == text
        assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / text, rel=1e-6)
        assert math.fsum(row["block_nll"]) == pytest.approx(row["nll_sum"], rel=1e-14)
        assert row["block_targets"] == [32] * blocks
    assert [(r["protocol"], r["length"], r["window"]) for r in result["rows"]] == [
        *(("full", n, None) for n in (8, 16, 32)),
        *(("windowed", n, 4) for n in (8, 16, 32)),
    ]
    assert (result["training_length"], result["skipped"], result["version"]) == (8, [], 2)


def test_bits_per_byte_count_the_bytes_of_the_targets_that_are_scored(tmp_path: Path) -> None:
    data = RandomText(tokens=200)  # 3 blocks of 64
    callback = Extrapolation([8, 32], ["full", "sliding", "last"], stride=4, k=2, block_length=64, skip=28, blocks=2)
    rows = run(tmp_path, callback, data)["rows"]
    text = [int(token) % 5 for token in data.streams["test"]]
    scored = {
        "full": {n: range(1, 129) for n in (8, 32)},
        "sliding": {n: [*range(29, 65), *range(64 + 29, 129)] for n in (8, 32)},
        "last": {n: [i for i in range(1, 129) if (i - 1) % n >= n - 2] for n in (8, 32)},
    }
    for row in rows:
        counted = sum(text[i] for i in scored[row["protocol"]][row["length"]])
        assert row["bytes"] == counted
        assert row["bits_per_byte"] == pytest.approx(row["nll_sum"] / math.log(2) / counted, rel=1e-12)
    assert len(rows) == 6


def test_context_gain_is_a_loop_over_segments_with_their_standard_error(tmp_path: Path) -> None:
    data = RandomText(tokens=300)  # 2 blocks of 128
    rows = run(tmp_path, Extrapolation([8, 32], ["full", "windowed"], window=8, block_length=128), data)["rows"]
    table = pd.read_csv(tmp_path / "context_gain.csv")
    network, stream = model_of().eval().network, data.streams["test"]
    losses = []
    for start in range(0, 256, 32):
        inputs, targets = stream[start : start + 32], stream[start + 1 : start + 33]
        with torch.no_grad():
            logits = [network(inputs[None], window=window)[0].double() for window in (None, 8)]
        losses.append([torch.nn.functional.cross_entropy(each, targets, reduction="none") for each in logits])
    full, windowed = (torch.stack(side).numpy() for side in zip(*losses, strict=True))  # (8 segments, 32 positions)
    assert table["first"].tolist() == list(range(32))
    assert set(table["segments"]) == {8}
    assert set(table["window"]) == {8}
    for name, values in (("loss", full), ("gain", windowed - full)):
        assert table[name].to_numpy() == pytest.approx(values.mean(0), abs=1e-6)
        assert table[f"{name}_error"].to_numpy() == pytest.approx(stats.sem(values, axis=0), abs=1e-6)
    assert table["gain"][:8].tolist() == [0] * 8  # nothing is outside the window yet
    assert {r["nll_sum"] for r in rows if r["length"] == 8} == {rows[0]["nll_sum"]}  # nor at the window's own length


def test_bins_of_a_long_segment_are_means() -> None:
    gain, losses = ContextGain(256, 16), torch.rand(2, 5, 256, generator=torch.Generator().manual_seed(0))
    for full, windowed in zip(*losses, strict=True):
        gain.update(full[None], windowed[None])
    rows = pd.DataFrame(gain.compute())
    assert rows["first"].tolist() == list(range(0, 256, 4))
    binned = (losses[1] - losses[0]).double().numpy().reshape(5, 64, 4).mean(2)
    assert rows["gain"].to_numpy() == pytest.approx(binned.mean(0), rel=1e-9)
    assert rows["gain_error"].to_numpy() == pytest.approx(stats.sem(binned), rel=1e-9)


class Opaque(RandomText):
    """Does not say what its tokens spell."""

    token_bytes = property()


def test_data_that_does_not_know_the_bytes_has_perplexities_alone(tmp_path: Path) -> None:
    result = run(tmp_path, Extrapolation([8, 32]), Opaque())
    assert all(row["bits_per_byte"] is None and row["ppl"] > 1 for row in result["rows"])
    scalars = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert not [tag for tag in scalars if "bits_per_byte" in tag]


def test_every_protocol_reaches_tensorboard_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    protocols = ["full", "windowed", "sliding", "last", "per_position"]
    result = run(tmp_path, Extrapolation([8, 32], protocols, stride=4, k=2, block_length=64, skip=28))
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if tag.startswith("test/")}
    labels = ["full", "windowed8", "sliding4", "last2"]  # without a window given, windowed's is the training length
    assert scalars == {f"test/{kind}/{p}/{n}" for kind in ("ppl", "bits_per_byte") for p in labels for n in (8, 32)}
    ppl = {(r["protocol"], r["length"]): r["ppl"] for r in result["rows"]}
    for label, name in zip(labels, protocols, strict=False):
        assert events.Scalars(f"test/ppl/{label}/32")[0].value == pytest.approx(ppl[name, 32], rel=1e-6)
    assert "test/extrapolation" in events.Tags()["images"]
    assert (tmp_path / "extrapolation.png").stat().st_size > 10_000
    assert [(p["length"], len(p["nll_sum"])) for p in result["by_position"]] == [(8, 8), (32, 32)]
    assert math.fsum(result["by_position"][1]["nll_sum"]) == pytest.approx(sums(result)["full", 32], rel=1e-12)
    assert "sliding4" in capsys.readouterr().out


def test_two_processes_give_the_sums_of_one_on_the_blocks_that_are_asked_for(tmp_path: Path) -> None:
    data = lambda: RandomText(tokens=200)  # noqa: E731  # 6 blocks; 5 are asked for, so the second process gets a filler
    callback = lambda: Extrapolation([8, 16], block_length=32, blocks=5)  # noqa: E731
    analyses = lambda: [ShiftTest(blocks=5), ReceptiveField(blocks=5), AttentionStatistics(blocks=5)]  # noqa: E731
    one = run(tmp_path / "one", callback(), data(), Short, also=analyses())
    two = run(
        tmp_path / "two",
        callback(),
        data(),
        Short,
        also=analyses(),
        strategy="ddp_fork",
        devices=2,
        use_distributed_sampler=False,
    )
    assert sums(two) == pytest.approx(sums(one), rel=1e-12)
    assert [r["block_targets"] for r in (*one["rows"], *two["rows"])] == [[32] * 5] * 8
    for name in ("shift", "receptive_field", "receptive_window", "attention_statistics", "context_gain"):
        ours, theirs = (pd.read_csv(tmp_path / run / f"{name}.csv") for run in ("one", "two"))
        assert len(ours)
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-9)
    whole = run(tmp_path / "whole", Extrapolation([8, 16, 32]), data(), Short)
    first = {(r["protocol"], r["length"]): math.fsum(r["block_nll"][:5]) for r in whole["rows"]}
    assert sums(one) == pytest.approx({key: first[key] for key in sums(one)}, rel=1e-12)


class Repeats(RandomText):
    """Gives the first block twice and the second never."""

    def test_dataloader(self) -> DataLoader:
        blocks = self.blocks("test", self.evaluation_length)
        return DataLoader([blocks[0], blocks[0], *(blocks[i] for i in range(2, len(blocks)))], 1)


def test_a_loader_that_repeats_or_drops_a_block_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"blocks \[0, 1\] that were not scored exactly once"):
        run(tmp_path, Extrapolation([8, 32]), Repeats())


@pytest.mark.parametrize("limit", [1, 2])  # 1 is one batch, 1.0 is all of them
def test_a_limit_on_test_batches_shows_in_the_counts(tmp_path: Path, limit: int) -> None:
    result = run(tmp_path, Extrapolation([8, 32]), limit_test_batches=limit)
    scored = [32] * limit + [0] * (3 - limit)
    assert all(row["targets"] == 32 * limit and row["block_targets"][:3] == scored for row in result["rows"])


def test_a_limit_for_each_of_several_devices_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(
        devices=2, strategy="ddp_spawn", accelerator="cpu", limit_test_batches=2, default_root_dir=tmp_path
    )
    callback = Extrapolation([8, 32])
    trainer.datamodule = RandomText()
    with pytest.raises(ValueError, match=r"limit_test_batches: got 2 for each of 2 devices.*option blocks"):
        callback.setup(trainer, model_of(), "test")


def test_two_of_them_would_write_one_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"more than one.*--run_dir"):
        run(tmp_path, Extrapolation([8, 32]), also=[Extrapolation([8, 32], sampling="paper", segments=2)])


def test_lengths_out_of_reach_are_skipped_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, Extrapolation([8, 16, 32]), position=Short)
    assert [(r["protocol"], r["length"]) for r in result["rows"]] == [
        ("full", 8), ("full", 16), ("windowed", 8), ("windowed", 16),
    ]  # fmt: skip
    assert [(s["protocol"], s["length"]) for s in result["skipped"]] == [("full", 32), ("windowed8", 32)]
    assert all("max_length is 16" in s["reason"] for s in result["skipped"])
    assert "max_length is 16" in capsys.readouterr().out


def test_papers_sampling_scores_its_own_segments_at_each_length(tmp_path: Path) -> None:
    data = RandomText(tokens=400)
    result = run(tmp_path, Extrapolation([8, 32], sampling="paper", segments=9, seed=3), data)
    network = model_of().eval().network
    for row in result["rows"]:
        length = row["length"]
        found = (400 - 1) // length
        order = torch.randperm(found, generator=torch.Generator().manual_seed(3))[:9].tolist()
        starts = [i * length for i in order]
        tokens = torch.stack([data.streams["test"][s : s + length + 1] for s in starts])
        with torch.no_grad():
            losses = network.losses(tokens, window=row["window"]).double()
        assert row["block_nll"] == pytest.approx(losses.sum(1).tolist(), rel=1e-6)
        assert row["targets"] == 9 * length
    assert len(result["rows"]) == 4


def test_documents_are_never_left_within_a_block(tmp_path: Path) -> None:
    data = RandomText(tokens=200)
    data.begins = [0, 20, 53, 54, 119, 187]  # sizes 20, 33, 1, 65, 68, 13: blocks of 32 targets need 33 tokens
    result = run(tmp_path, Extrapolation([8, 32], documents=True), data)
    stream, network = data.streams["test"], model_of().eval().network
    tokens = torch.stack([stream[s : s + 33] for s in (20, 54, 86, 119, 151)])
    with torch.no_grad():
        losses = network.losses(tokens).double()
    at_32 = next(r for r in result["rows"] if r["protocol"] == "full" and r["length"] == 32)
    assert at_32["block_nll"] == pytest.approx(losses.sum(1).tolist(), rel=1e-6)
    assert {r["targets"] for r in result["rows"]} == {5 * 32}
    assert result["block_document"] == [1, 3, 3, 4, 4]
    few = run(tmp_path / "few", Extrapolation([8, 32], documents=True, blocks=2), data)
    assert few["block_document"] == [1, 3]
    data.begins = list(range(0, 200, 32))
    with pytest.raises(ValueError, match="no document has the 33 tokens of a block, the longest has 32"):
        run(tmp_path, Extrapolation([8, 32], documents=True), data)


@pytest.mark.parametrize(("options", "instead"), [({"documents": True}, "blocks"), ({"sampling": "paper"}, "segments")])
def test_a_limit_of_batches_that_are_not_read_is_refused(tmp_path: Path, options: dict[str, Any], instead: str) -> None:
    with pytest.raises(ValueError, match=f"limit_test_batches: got 2, .* use its option {instead}"):
        run(tmp_path, Extrapolation([8, 32], **options), limit_test_batches=2)


class NoDocuments(RandomText):
    documents = None


def test_data_that_knows_no_documents_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="documents: got true, but NoDocuments does not know where documents begin"):
        run(tmp_path, Extrapolation([8, 32], documents=True), NoDocuments())


def test_the_curve_is_logged_after_each_validation_of_a_fit(tmp_path: Path) -> None:
    data, model = RandomText(tokens=400), model_of()
    callback = Extrapolation([8, 32], validation_blocks=3)
    trainer = Trainer(
        logger=TensorBoardLogger(tmp_path, name="", version=""),
        callbacks=[callback],
        accelerator="cpu",
        max_steps=6,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {t for t in events.Tags()["scalars"] if t.startswith("val/ppl")} == {"val/ppl/full/8", "val/ppl/full/32"}
    points = events.Scalars("val/ppl/full/32")
    assert len(points) == 2  # two validations; the sanity check before them is none
    model.eval()
    tokens = torch.stack([data.blocks("validation", 32)[i]["tokens"] for i in range(3)])
    with torch.no_grad():
        ppl = model.network.losses(tokens).mean().exp()
    assert points[-1].value == pytest.approx(float(ppl), rel=1e-5)
    assert float(trainer.callback_metrics["val/ppl/full/32"]) == pytest.approx(float(ppl), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [0, 8]}, "lengths"),
        ({"lengths": [8, 12]}, r"got \[8\], which do not divide the longest, 12"),
        ({"protocols": []}, "protocols"),
        ({"protocols": ["half"]}, "protocol: got 'half'"),
        ({"protocols": ["sliding"]}, "stride"),
        ({"protocols": ["sliding"], "stride": 9}, "stride: got 9, expected at most 8"),
        ({"protocols": ["last"], "k": 9}, "k: got 9, expected at most 8"),
        ({"protocols": ["last"]}, "k"),
        ({"protocols": ["full"], "window": 4}, "window: got 4"),
        ({"window": 0}, "window: got 0"),
        ({"skip": 4}, "skip: got 4"),
        ({"protocols": ["sliding"], "stride": 4, "skip": 32}, "skip: got 32"),
        ({"protocols": ["sliding"], "stride": 4, "skip": 27, "block_length": 64}, "skip: got 27, .* at least 28"),
        ({"block_length": 16}, "block_length: got 16, expected a multiple of 32"),
        ({"blocks": 0}, "blocks: got 0"),
        ({"blocks": 2, "sampling": "paper"}, "blocks: .* use segments"),
        ({"protocols": ["sliding"], "stride": 4, "sampling": "paper"}, "sliding"),
        ({"documents": True, "sampling": "paper"}, "sampling: got 'paper'"),
        ({"sampling": "random"}, "sampling: got 'random'"),
        ({"segments": 0}, "segments: got 0"),
        ({"validation_blocks": -1}, "validation_blocks"),
        ({"tokens_per_forward": 0}, "tokens_per_forward"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Extrapolation(**({"lengths": [8, 32]} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [8, 256]}, "lengths: got 256, but the test split has no block"),
        ({"lengths": [8, 32], "sampling": "paper"}, "segments: got 320, but there are only 24"),
        ({"lengths": [8, 32], "blocks": 7}, "blocks: got 7, but the test split has only 6 of 32 targets"),
    ],
)
def test_more_than_the_data_holds_is_an_error(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, Extrapolation(**options))


def test_too_few_validation_blocks_are_told_before_the_first_step(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[Extrapolation([8, 256])], accelerator="cpu", max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="the validation split has no block of that many targets"):
        trainer.fit(model_of(), RandomText())
    assert trainer.global_step == 0
