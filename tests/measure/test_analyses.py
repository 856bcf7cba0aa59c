"""Measurements on a text: numbers against a second computation, and files of figures."""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.evaluation_text import Text
from kerple.measure.attention import AttentionMaps, AttentionStatistics
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.four_terms import TERMS, FourTerms, four_terms, spread
from kerple.measure.kernel_curves import KernelCurves
from kerple.measure.measure import Measure
from kerple.measure.protocols import full, windowed
from kerple.measure.receptive_field import ReceptiveField
from kerple.measure.shift import ShiftTest
from kerple.model import Transformer
from kerple.positions import Abacus, Learned, RandomizedPositions, Shape, Sinusoidal, SSMax, strategies
from kerple.positions.position_coupling import PlaceEmbedding
from kerple.positions.visibility import Visibility
from kerple.training import kernel_records
from kerple.training.kernel_records import Kernels
from kerple.training.language_model import LanguageModel
from tests.toy import RandomText, small_model, trainer


def model_of(name: str, parts: Any = None, **options: Any) -> LanguageModel:
    """Return a model of two layers with large weights. With initial weights, all tokens are almost equally likely."""
    position = partial(strategies()[name], **({} if parts is None else {"parts": parts}))
    model = small_model(position, vocabulary=23, layers=2, lr=0.01, **options)
    with torch.no_grad():
        for module in model.network.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(std=0.3)
    return model


def table_of(folder: Path, measure: Measure, model: LanguageModel) -> pd.DataFrame | None:
    """Measure a model in evaluation mode, and return the table, or None if the measurement has none."""
    result = measure.run(model.eval().network, RandomText(tokens=400).text("test"))
    assert result.skipped is None, result.skipped
    result.write(folder)
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in result.figures)
    assert set(result.figures) == {measure.name}
    table = folder / f"{measure.name}.csv"
    return pd.read_csv(table) if table.exists() else None


def blocks_of(length: int, count: int) -> Tensor:
    """Return the first blocks of the test split, (count, length + 1) int64."""
    blocks = RandomText(tokens=400).blocks("test", length)
    return torch.stack([blocks[i] for i in range(count)])


@torch.no_grad()
@pytest.mark.parametrize(("name", "changes"), [("Sinusoidal", True), ("KerpleLog", False)])
def test_shift_scores_the_same_blocks_at_shifted_positions(name: str, changes: bool, tmp_path: Path) -> None:
    model = model_of(name)
    table = table_of(tmp_path, ShiftTest(shifts=[100, 0, 7], blocks=6), model)
    assert table["shift"].tolist() == [0, 7, 100]
    tokens = blocks_of(8, 6)
    for row in table.itertuples():
        loss = model.network.losses(tokens, offset=row.shift).double()
        assert row.nll_sum == pytest.approx(float(loss.sum()), rel=1e-6)
        assert row.ppl == pytest.approx(math.exp(float(loss.mean())), rel=1e-6)
        assert row.targets == 48
    assert (abs(table["ppl"][2] / table["ppl"][0] - 1) > 1e-3) == changes


def test_shifts_beyond_the_last_position_are_left_out() -> None:
    measure = ShiftTest(shifts=[0, 4, 5], length=4, blocks=6)
    result = measure.run(model_of("Learned").eval().network, RandomText(tokens=400).text("test"))
    assert "shifts left out: [5]; Learned has only 8 positions" in result.report
    assert [row["shift"] for row in result.tables["shift"]] == [0, 4]


@torch.no_grad()
@pytest.mark.parametrize("per_layer", [False, True])
def test_kernel_curves_equal_the_hooks_of_the_strategy(per_layer: bool, tmp_path: Path) -> None:
    model = model_of("KerpleBiasWeight" if per_layer else "KerpleLog", per_layer=per_layer)
    positions = model.network.positions
    for parameter in positions[-1].parameters():  # so that the layers differ
        parameter.mul_(2)
    table = table_of(tmp_path, KernelCurves(length=100), model)
    assert set(table["distance"]) >= {0, 1, 2, 3, 99}
    assert set(table["layer"]) == ({0, 1} if per_layer else {"all"})
    for row in table.itertuples():
        position = positions[row.layer if per_layer else 0]
        hooks = {"bias": position.bias} | ({"weight": position.score_scale} if per_layer else {})
        for kind, hook in hooks.items():
            expected = hook(torch.tensor([float(row.distance)]))[row.head, 0]
            assert getattr(row, kind) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_the_trajectory_of_kernels_is_bounded_and_continues_after_a_resumption(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_records, "MAX_RECORDS", 4)
    for name, steps, checkpoint in (("a", 4, None), ("b", 12, tmp_path / "middle.ckpt")):
        kernels, model = Kernels(every=2, distances=(1, 50)), model_of("KerpleLog")
        run = trainer(tmp_path / name, kernels, events=True, max_steps=steps, limit_val_batches=0)
        run.fit(model, RandomText(tokens=2000), ckpt_path=checkpoint, weights_only=False if checkpoint else None)
        run.save_checkpoint(tmp_path / "middle.ckpt")
    table = pd.read_csv(tmp_path / "b" / "kernels_trajectory.csv")
    assert table["step"].unique().tolist() == [0, 4, 8, 12]
    at_end, position = table[table["step"] == 12].set_index(["name", "head"])["value"], model.network.positions[0]
    bias = position.bias(torch.arange(51.0))
    for head in range(2):
        assert at_end["bias at 50", head] == pytest.approx(bias[head, 50].item(), rel=1e-6)
        assert at_end["r1", head] == pytest.approx(position.r1[head].item(), rel=1e-6)
    assert set(table["name"]) == {"r1", "r2", "bias at 1", "bias at 50"}
    assert table[table["step"] == 0]["value"].tolist() != pytest.approx(at_end.tolist(), rel=1e-3)
    assert EventAccumulator(str(tmp_path / "b")).Reload().Tags()["images"] == ["analyses/kernels_trajectory"]
    assert len(kernels.state_dict()["records"]) == 4
    other = Kernels(distances=(1,))
    other.load_state_dict(kernels.state_dict())
    assert not other.records  # they are of two distances
    for option, interval in ((2, 4), (3, 3)):  # doubled since the start of the fit, unless the option has changed
        other = Kernels(every=option, distances=(1, 50))
        other.load_state_dict(kernels.state_dict())
        assert (other.every, len(other.records)) == (interval, 4)
    earlier = kernels.state_dict()
    del earlier["every_at_start"]  # in checkpoints of earlier versions
    other.load_state_dict(earlier)
    assert other.every == 4


@torch.no_grad()
def test_receptive_field_windows_are_windowed_perplexities(tmp_path: Path) -> None:
    model = model_of("KerpleLog")
    fractions, tokens = table_of(tmp_path, ReceptiveField(length=16, blocks=6), model), blocks_of(16, 6)
    assert fractions["distance"].tolist() == list(range(16))
    assert fractions["cumulative"].iloc[-1] == pytest.approx(1, abs=1e-9)
    table = pd.read_csv(tmp_path / "receptive_window.csv")
    assert table["window"].tolist() == [1, 2, 4, 8, 16]
    whole = math.exp(float(full(model.network, tokens, 16).double().mean()))
    for row in table.itertuples():
        ppl = math.exp(float(windowed(model.network, tokens, 16, Visibility(row.window)).double().mean()))
        assert row.ppl == pytest.approx(ppl, rel=1e-6)
        assert row.ratio_to_full == pytest.approx(ppl / whole, rel=1e-6)
    assert table["smallest_sufficient"].sum() == 1


@pytest.mark.parametrize("name", ["KerpleLog", "StickBreaking"])  # the first query of the latter attends to nothing
@torch.no_grad()
def test_attention_statistics_equal_a_loop_over_layers_and_heads(name: str, tmp_path: Path) -> None:
    model, probabilities = model_of(name), {}
    model.network.bos = 1
    table = table_of(tmp_path, AttentionStatistics(length=8, blocks=3), model)
    model.network.visit_attention(blocks_of(8, 3)[:, :-1], lambda layer, p: probabilities.update({layer: p}))
    for row in table.itertuples():
        p = probabilities[row.layer][:, row.head].double()  # (3, T, T), without BOS
        p, distance = (p / p.sum(-1, keepdim=True)).nan_to_num(), torch.arange(8)[:, None] - torch.arange(8)
        assert row.entropy == pytest.approx(float(-torch.xlogy(p, p).sum(-1).mean()), rel=1e-5)
        assert row.distance == pytest.approx(float((p * distance).sum(-1).mean()), rel=1e-5)
    assert table["entropy"].nunique() == len(table) == 4


def test_attention_maps_are_drawn(tmp_path: Path) -> None:
    assert table_of(tmp_path, AttentionMaps(heads=[(1, 0), (0, 1)], length=6), model_of("T5")) is None


@torch.no_grad()
def test_the_table_of_four_terms_has_means_over_blocks(tmp_path: Path) -> None:
    model = model_of("Sinusoidal")
    table = table_of(tmp_path, FourTerms(blocks=4), model)
    assert len(table) == 2 * 5
    expected = [four_terms(model.network, block[None]) for block in blocks_of(8, 4)[:, :-1]]
    visible = torch.ones(1, 1, 8, 8).tril().bool()
    for row in table.itertuples():
        variances = [float(spread(terms[row.term], visible)[row.head]) ** 2 for terms in expected]
        assert row.standard_deviation == pytest.approx(math.sqrt(sum(variances) / 4), rel=1e-4, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("restart", [True, False])
def test_four_terms_of_masked_documents_are_those_of_each_document(tmp_path: Path, restart: bool) -> None:
    network = model_of("Learned").eval().network
    network.restart_positions = restart
    tokens = torch.randint(23, (1, 17))
    text = Text(tokens[0], [0, 4, 10], mask_documents=True)  # the last token of a document is an input of the next
    FourTerms(blocks=2).run(network, text).write(tmp_path)
    table = pd.read_csv(tmp_path / "four_terms.csv").set_index(["head", "term"])["standard_deviation"]
    squares = dict.fromkeys(table.index, 0.0)
    for start, parts in ((0, [(0, 3), (3, 8)]), (8, [(8, 9), (9, 16)])):  # blocks, and the inputs of their documents
        pairs = sum((end - first) * (end - first + 1) / 2 for first, end in parts)
        for first, end in parts:
            terms = four_terms(network, tokens[:, first if restart else start : end])
            for (head, term), m in product(table.index, range(first - end, 0)):
                scores = terms[term][0, head, m, first - end :].double()[: m + 1 or None]
                squares[head, term] += float((scores - scores.mean()).square().sum()) / pairs / 2
    assert table.tolist() == pytest.approx([math.sqrt(squares[key]) for key in table.index], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("measure", "model", "reason"),
    [
        (FourTerms(), {"name": "KerpleLog"}, "adds nothing to the embeddings"),
        (FourTerms(), {"name": "Combined", "parts": [SSMax, Sinusoidal]}, "Combined also overrides transform_qk"),
        (FourTerms(), {"name": "Sinusoidal", "qk_norm": True}, "qk_norm normalises queries and keys"),
        (FourTerms(), {"name": "Sinusoidal", "norm_placement": "post"}, "norm_placement is post"),
        (KernelCurves(), {"name": "RoPE"}, "no bias by distance"),
        (AttentionStatistics(length=16, blocks=2), {"name": "Learned"}, "only 8 positions"),
    ],
)
def test_a_measurement_that_does_not_apply_is_skipped_with_a_reason(measure, model, reason, tmp_path, capsys):
    network, text = model_of(**model).eval().network, RandomText(tokens=400).text("test")
    result = measure.run(network, text)
    assert reason in (result.skipped or "")
    assert not result.tables
    trainer(tmp_path, measure).test(model_of(**model), RandomText(tokens=400), verbose=False)
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (ShiftTest(blocks=1000), "got 49 blocks of 8 targets in the test split"),
        (AttentionMaps(heads=[(2, 0)]), r"got \[\(2, 0\)\], expected pairs of a layer in 0..1"),
        (FourTerms(length=513), "length: got 513, expected at most 512"),
    ],
)
def test_options_out_of_range_are_an_error_before_the_measurement(measure: Measure, message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure.check(model_of("Sinusoidal").network, RandomText(tokens=400).text("test"))


@pytest.mark.parametrize("measure", [ShiftTest(length=4), ReceptiveField(8, 4), Extrapolation([8, 32])], ids=type)
def test_losses_that_are_not_finite_are_an_error(tmp_path: Path, measure: Measure) -> None:
    model = model_of("KerpleLog")
    torch.nn.init.constant_(model.network.embedding.weight, math.nan)
    with pytest.raises(UserError, match="not finite; check the weights for NaN"):
        table_of(tmp_path, measure, model)


# The sum of the four terms equals the scores of the model

LLAMA = {"norm": "rms", "bias": False, "kv_heads": 2, "embedding_norm": True}
WITH_TERMS = [
    (Learned, {"embedding_scale": 3.0}),
    (Sinusoidal, LLAMA),
    (partial(RandomizedPositions, position=Sinusoidal), {}),
    (partial(RandomizedPositions, position=Learned), {}),
    (Abacus, {}),
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("documents", "bos"), [(None, None), (None, 3), (torch.tensor([[0] * 12, [1] * 5 + [2] * 7]), None)]
)
@pytest.mark.parametrize(("position", "options"), WITH_TERMS)
def test_four_terms_and_the_rest_add_up_to_the_scores_of_the_model(position, options, documents, bos) -> None:
    network = Transformer(Shape(32, 4, 32), 2, 50, position, init=0.2, **options).eval()
    network.bos = bos
    tokens = torch.randint(50, (2, 12))
    if isinstance(network.positions[0], PlaceEmbedding):
        network.places = lambda tokens: tokens % 5
    # random norms, biases and positions, because their initial values are 1, 0 and close to 0
    for parameter in (*network.positions.parameters(), *(p for p in network.parameters() if p.ndim == 1)):
        parameter.normal_()
    outputs: list[Tensor] = []
    hook = network.blocks[0].attention.qkv.register_forward_hook(lambda m, i, output: outputs.append(output))
    network(tokens, documents=documents)
    hook.remove()
    output = outputs[0][:, -12:]  # without BOS
    q, k, _ = network.blocks[0].attention.split(output)  # (B, heads, T, δ), (B, key heads, T, δ)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    expected, terms = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, four_terms(network, tokens, documents)
    assert set(terms) == {*TERMS, "rest"}
    torch.testing.assert_close(sum(terms.values()), expected, rtol=1e-4, atol=1e-4)
    biased = network.blocks[0].attention.qkv.bias is not None
    assert all(float(term.abs().max()) > 1e-3 for name, term in terms.items() if biased or name != "rest")
    assert biased or float(terms["rest"].abs().max()) < 1e-4  # without biases, the four terms are the whole


@torch.no_grad()
def test_terms_are_zero_without_their_words_or_positions(tiny_network) -> None:
    network, tokens = tiny_network("Learned"), torch.full((1, 12), 7)
    assert four_terms(network, tokens)["position-position"].std() > 0
    network.positions[0].table.zero_()
    words = four_terms(network, tokens)
    assert not any(words[term].any() for term in TERMS[1:])
    torch.testing.assert_close(words["word-word"], words["word-word"][..., :1, :1].expand(-1, -1, 12, 12))
    network.positions[0].table.normal_()
    network.embedding.weight.zero_()
    positions = four_terms(network, tokens)
    assert not any(positions[term].any() for term in TERMS[:3])
    assert positions["position-position"].any()


def test_terms_of_scaled_words_equal_terms_of_scaled_embeddings(tiny_network) -> None:
    scaled, plain = tiny_network("Sinusoidal", scaled=True), tiny_network("Sinusoidal")
    plain.load_state_dict(scaled.state_dict())
    plain.embedding.weight.data *= 32**0.5  # the same model
    tokens = torch.randint(50, (2, 12))
    torch.testing.assert_close(four_terms(scaled, tokens), four_terms(plain, tokens), rtol=1e-4, atol=1e-5)


def test_spread_ignores_future_keys_and_the_mean_of_each_query() -> None:
    term = torch.zeros(1, 1, 3, 3)
    visible = torch.ones_like(term).tril().bool()
    term[0, 0] = torch.tensor([[5.0, 99.0, 99.0], [1.0, 3.0, 99.0], [0.0, 0.0, 3.0]])
    # differences from the row means: 0; -1, 1; -1, -1, 2. Their squares add up to 8 in 6 entries.
    assert float(spread(term, visible)) == pytest.approx((8 / 6) ** 0.5)
    assert float(spread(term + torch.tensor([[1.0], [20.0], [300.0]]), visible)) == pytest.approx((8 / 6) ** 0.5)
