"""Measurements without a Trainer: texts of strings, capabilities of networks, and several processes."""

import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from tokenizers import Tokenizer, models
from torch.multiprocessing import start_processes

from kerple.base.errors import UserError
from kerple.data.evaluation_text import Text
from kerple.data.tokenizer import train_tokenizer
from kerple.measure import results_table
from kerple.measure.attention import AttentionStatistics
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.needle import Needle
from kerple.measure.receptive_field import ReceptiveField
from kerple.measure.runner import Runner
from kerple.measure.shift import ShiftTest
from kerple.model.network import HasLengthLimit
from tests.toy import RandomText, small_model

STRINGS = ["a first text, which is short", "and a second one, which is a little longer: it has two parts"]


class Plain:
    """A network with only the three required members."""

    name, training_length = "plain", 8

    def losses(self, tokens, last=None):
        losses = (tokens[:, 1:] % 7 + 1).float()
        return losses if last is None else losses[:, -last:]


def test_a_text_of_strings_is_measured() -> None:
    text = Text.of_strings(STRINGS, train_tokenizer(STRINGS, 270))
    assert text.begins.tolist()[0] == 0
    assert text.decode(text.stream[:].tolist()) == "".join(f"{t}<|endoftext|>" for t in STRINGS)
    result, targets = Extrapolation([8, 16], ["full"], blocks=2).run(Plain(), text), text.stream[1:33]
    assert sum(row.sum for row in result.sums if row.length == 8 and row.metric == "ppl") == (targets % 7 + 1).sum()
    target_text = text.decode(targets.tolist()).replace("<|endoftext|>", "")
    (bits,) = [row for row in result.sums if row.length == 16 and row.metric == "bits_per_byte"]
    assert bits.count == len(target_text.encode())


@pytest.mark.parametrize("begins", [[], [5, 2], [-1, 2], [0, 9]])
def test_documents_that_do_not_begin_in_the_text_are_refused(begins: list[int]) -> None:
    with pytest.raises(UserError, match=r"begins: got .*, expected ascending indices of the 9 tokens"):
        Text(torch.arange(9), begins)


def test_losses_in_bf16_are_refused() -> None:
    network = Plain()
    network.losses = lambda tokens, last=None: (tokens[:, 1:] % 7).bfloat16()
    with pytest.raises(UserError, match=r"losses: got torch\.bfloat16, expected fp32 or fp64"):
        Extrapolation([8], ["full"]).run(network, torch.arange(200))


def test_a_report_without_a_length_that_the_network_reads_names_the_lengths() -> None:
    class Limited(Plain, HasLengthLimit):
        max_length = 8

    report = Extrapolation([16, 32], ["full"]).run(Limited(), torch.arange(200)).report
    assert report.splitlines() == [f"full at {n}: skipped, plain has only 8 positions" for n in (16, 32)]


def test_an_end_of_text_token_that_is_an_ordinary_entry_has_no_bytes() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "?": 2}, unk_token="?"))
    assert Text.of_strings(["a"], tokenizer).token_bytes.tolist()[0] == 0


@pytest.mark.parametrize(
    ("measure", "capability"),
    [
        (Extrapolation([8], ["full", "windowed"], window=4), "SupportsWindows"),
        (ShiftTest(), "SupportsOffset"),
        (Needle(lengths=[100]), "SupportsGeneration"),
        (ReceptiveField(), "HasEmbedding, SupportsWindows"),
        (AttentionStatistics(), "SupportsAttentionProbabilities"),
    ],
)
def test_the_error_for_a_network_names_its_missing_capabilities(measure, capability) -> None:
    with pytest.raises(UserError, match=f"got a network Plain, expected one with {capability}"):
        measure.run(Plain(), torch.arange(200))


def measure(rank: int, folder: Path, port: int, processes: int = 2) -> None:
    """Write the results of two measurements, in one of the processes that torchrun starts."""
    variables = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    network, text = small_model("KerpleLog", vocabulary=23).eval().network, RandomText(tokens=200).text("test")
    runner, perplexity = Runner.detect("cpu"), Extrapolation([8, 16], block_length=32, blocks=5)
    # a process without a block, and a measurement that is repeated
    for measurement in (perplexity, ReceptiveField(blocks=5), AttentionStatistics(length=8, blocks=1), perplexity):
        result = measurement.run(network, text, runner)
        if rank == 0:
            result.write(folder)
    perplexity.run(network, text).write(folder / f"alone-{rank}")  # without a runner, each process measures all blocks


@pytest.mark.slow
def test_two_processes_without_a_trainer_give_the_sums_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    measure(0, tmp_path / "one", 0, processes=1)
    port = find_free_network_port()
    start_processes(measure, (tmp_path / "two", port), nprocs=2, start_method="fork")
    one, two = (results_table.read(tmp_path / name)[0] for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two, rtol=1e-12)
    assert not one.duplicated(["metric", "protocol", "length", "block"]).any()
    for name in ("receptive_field", "receptive_window", "context_gain", "attention_statistics"):
        tables = [pd.read_csv(tmp_path / folder / f"{name}.csv") for folder in ("one", "two")]
        pd.testing.assert_frame_equal(*tables, rtol=1e-9)
    for folder in ("two/alone-0", "two/alone-1"):
        alone, whole = (results_table.read(tmp_path / name)[0] for name in (folder, "one/alone-0"))
        pd.testing.assert_frame_equal(alone, whole, rtol=1e-12)
        tables = [pd.read_csv(tmp_path / name / "context_gain.csv") for name in (folder, "one/alone-0")]
        pd.testing.assert_frame_equal(*tables, rtol=1e-9)
