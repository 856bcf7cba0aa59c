"""`plan` computes the cost of a fit from its configuration."""

import re

import numpy as np
import pytest
import yaml

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.data.shards import Folder
from kerple.training.fit_cost import NETWORK, device_count
from kerple.training.stored_options import insert_stored_config
from tests.data.conftest import small_build, write_lines


def plan_rows(capsys, *arguments):
    """The cells of each row, by its first cell."""
    main(["plan", "--config", "configs/paper.yaml", *arguments])
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines() if line]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_plan_of_the_papers_configuration(capsys):
    rows = plan_rows(capsys, "--devices", "1,8,32")
    assert rows["parameters"] == ["162,322,968"]
    assert rows["tokens"] == ["819,200,000"]
    assert rows["weights"] == ["0.60 GiB"]
    assert rows["optimiser"] == ["1.21 GiB"]
    assert plan_rows(capsys, "--model.optimizer=SGD")["optimiser"] == ["1.21 GiB, if it has two moments per parameter"]
    assert plan_rows(capsys, "--trainer.precision=bf16-true")["weights"] == ["0.30 GiB"]
    assert plan_rows(capsys, "--trainer.precision=64-true")["weights"] == ["1.21 GiB"]
    assert plan_rows(capsys, "--trainer.precision=bf16")["activations"] == rows["activations"]
    # 6 × (162.3M less the embedding's 38.6M and the vectors) and 6 × 12 layers × 768 × 512 / 2 pairs × 2
    per_token = int(rows["FLOPs a token"][0].split()[0].replace(",", ""))
    assert per_token == pytest.approx(0.77e9, rel=0.01)
    hours = {chip: [float(x) for x in rows[chip][1:]] for chip in ("A100", "H100")}
    assert hours["A100"][0] == pytest.approx(per_token * 819.2e6 / (312e12 * 0.34) / 3600, abs=0.01)
    assert hours["A100"][0] == pytest.approx(hours["H100"][0] * 989 / 312, rel=0.01)
    compute, exchange = per_token * 16_384 / 32 / (312e12 * 0.34), 2 * 4 * 162_322_968 * 31 / 32 / NETWORK
    # DDP sends the parameters that layers share first, but their gradients are ready last: no overlap
    assert hours["A100"][2] == pytest.approx(50_000 * (compute + exchange) / 3600, abs=0.01)
    without = plan_rows(capsys, "--devices", "1,8,32", "--model.position", "RoPE")["A100"]
    assert float(without[2]) == pytest.approx(float(without[1]) / 8, abs=0.01)  # the exchange overlaps
    assert float(without[3]) == pytest.approx(50_000 * (compute / 3 + exchange) / 3600, abs=0.01)  # exchange > compute


def test_devices_per_node_are_counted_in_every_form_of_the_option():
    counts = {"auto": 1, 1: 1, 8: 8, "8": 8, "0,2": 2, "3,": 1}
    assert {devices: device_count(devices) for devices in counts} == counts
    assert device_count([0, 2, 3]) == 3
    for all_devices in (-1, "-1"):
        with pytest.raises(UserError, match=r"trainer.devices: got -1, expected the number of devices of a node"):
            device_count(all_devices)


@pytest.mark.slow
def test_plan_counts_the_pairs_inside_documents(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = ["--data.length", "50", "--data.vocabulary", "300", "--data.tokenizer", "bpe", "--devices", "1"]
    data += ["--model.layers", "1"]
    corpus = write_lines(tmp_path / "text.jsonl", ["word " * 20] * 50)
    small_build(tmp_path / "shards", corpus, split_fractions=(1.0, 0.0, 0.0))
    data += ["--data.corpus", "null", "--data.directory", str(tmp_path / "shards")]

    def attention(*arguments: str) -> int:
        return int(plan_rows(capsys, *data, *arguments)["FLOPs a token"][0].split()[-1].strip(")").replace(",", ""))

    (length,) = set(np.diff(Folder(tmp_path / "shards").documents("train")))
    assert length < 50
    inside = length * (length + 1) / 2 / length
    packed = attention("--data.mask_documents", "true", "--data.packing", "best_fit")
    assert packed == pytest.approx(attention() * inside / 25.5, rel=1e-4)
    unprepared = ["--data.mask_documents", "true", "--data.directory", str(tmp_path / "missing")]
    assert attention(*unprepared) == attention()


def test_plan_adds_up_the_tokens_of_epochs_with_different_accumulation(capsys):
    scheduler = "{class_path: GradientAccumulationScheduler, init_args: {scheduling: {0: 1, 1: 2, 2: 4}}}"
    sizes = ["--model.layers=1", "--data.length=32", "--data.vocabulary=300", "--data.tokenizer=bpe"]
    steps = ["--trainer.accumulate_grad_batches=1", f"--trainer.callbacks={scheduler}", "--trainer.max_steps=18"]
    epochs = plan_rows(capsys, *sizes, *steps, "--data.batch_size=4", "--data.samples=40", "--devices=1")
    # batches of steps: 10 × 1 in the first epoch, 5 × 2 in the second, and 4 + 4 + 2 in the third
    assert epochs["tokens"] == [f"{30 * 4 * 32:,}"]
    # two epochs of 5 batches have 5 and 3 steps
    steps += ["--trainer.max_epochs=2", "--trainer.limit_train_batches=0.5"]
    shorter = plan_rows(capsys, *sizes, *steps, "--data.batch_size=4", "--data.samples=40", "--devices=1")
    assert (shorter["steps"], shorter["tokens"]) == (["8"], [f"{10 * 4 * 32:,}"])
    steps[-1] = "--trainer.limit_train_batches=3"  # 3 and 2 steps
    assert plan_rows(capsys, *sizes, *steps, "--data.batch_size=4", "--devices=1")["tokens"] == [f"{6 * 4 * 32:,}"]
    steps[-1] = "--trainer.limit_train_batches=0.5"  # of the 18 batches that 18 steps of the first epoch read
    half = plan_rows(capsys, *sizes, *steps, "--data.batch_size=4", "--devices=1")
    assert (half["steps"], half["tokens"]) == (["14"], [f"{18 * 4 * 32:,}"])  # 9 and 5 steps of 9 batches


@pytest.mark.parametrize("in_file", [False, True])
def test_plan_takes_the_architecture_of_weights(in_file, capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = transformers.LlamaConfig(vocab_size=40, intermediate_size=48, **shape)
    transformers.LlamaForCausalLM(sizes).save_pretrained(tmp_path)
    (tmp_path / "norms.yaml").write_text("model: {qk_norm: true}")  # as in configs/demo.yaml; a Llama has no such norms
    files = ["--config", str(tmp_path / "norms.yaml")]
    scheduler = "{class_path: GradientAccumulationScheduler, init_args: {scheduling: {0: 4, 2: 8}}}"
    files += ["--trainer.callbacks", scheduler, "--trainer.accumulate_grad_batches", "1"]
    (tmp_path / "weights.yaml").write_text(f"weights: {tmp_path}")
    weights = ["--config", str(tmp_path / "weights.yaml")] if in_file else ["--weights", str(tmp_path)]
    rows = plan_rows(capsys, *files, *weights, "--model.position", "NoPE")
    assert "× 4 accumulated" in rows["tokens a step"][0]
    vocabulary = 2 * 32 * 50304  # embedding and output matrix, whose size is the vocabulary of the data
    layers = 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert rows["parameters"] == [f"{vocabulary + layers + 32:,}"]
    if in_file:  # the configuration that a run has written contains the architecture
        resolved = yaml.safe_dump({"weights": str(tmp_path), "trainer": {"default_root_dir": None}})
        for config in (["--config", resolved], [*weights, "--config=weights: null"]):
            assert insert_stored_config(["fit", *config]) == ["fit", *config]
