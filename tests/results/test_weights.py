"""Measures of the plan "dilution" against networks that were built with the factor, and against a loop."""

import shutil
from pathlib import Path

import pytest
import torch

from kerple.compare.run_discovery import recorded_runs
from kerple.data.evaluation_text import Text
from kerple.model import Transformer
from kerple.positions import KerpleLog, LayerPattern, NoPE, RoPE, Shape, StrategyBuilder, Temperature
from results.judge.dilution import answers
from results.judge.weights import RepeatedTokens, temperature_in_global_layers

VOCABULARY = 20


def network(position: StrategyBuilder, state: dict[str, torch.Tensor] | None = None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(Shape(16, 2, 8), 2, VOCABULARY, position, init=0.5).double().eval()
    if state is not None:
        model.load_state_dict(state)
    return model


def pattern(shared: StrategyBuilder) -> StrategyBuilder:
    return lambda shape: LayerPattern(shape, {"local": RoPE, "global": shared}, windows={"local": 4})


def test_factor_at_test_time_equals_a_network_built_with_temperature() -> None:
    tokens = torch.randint(VOCABULARY, (2, 41))
    trained = network(pattern(NoPE))
    built = network(pattern(lambda shape: Temperature(shape, scale=0.3)), trained.state_dict())
    before = trained.losses(tokens)
    with temperature_in_global_layers(trained, Temperature(trained.shape, scale=0.3)):
        with_factor = trained.losses(tokens)
    torch.testing.assert_close(with_factor, built.losses(tokens), rtol=0, atol=1e-12)
    assert (with_factor[:, :7] == before[:, :7]).all()  # the factor is 1 for fewer keys than the training length
    assert (with_factor[:, 7:] != before[:, 7:]).any()
    assert (trained.losses(tokens) == before).all()


def test_a_bias_stays_in_the_network_with_a_factor() -> None:
    trained = network(KerpleLog)
    tokens = torch.randint(VOCABULARY, (1, 9))
    with temperature_in_global_layers(trained, Temperature(trained.shape, scale=0.3)):
        changed = trained.losses(tokens)
    torch.testing.assert_close(changed[:, :7], trained.losses(tokens)[:, :7], rtol=0, atol=1e-12)


@torch.no_grad()
def test_repeated_tokens_are_scored_after_their_first_occurrence() -> None:
    model, text = network(NoPE), Text(torch.zeros(9, dtype=torch.int64))
    (row,) = RepeatedTokens(distances=[6], k=3, inputs=2).run(model, text).tables["repeated_tokens"]
    generator = torch.Generator().manual_seed(0)
    random, other = (torch.randint(VOCABULARY, (2, 6), generator=generator) for _ in range(2))
    for name, start in (("repeated", random[:, :3]), ("first", other[:, :3])):
        tokens = torch.cat([start, random[:, 3:], random[:, :3]], 1)
        logits = model(tokens[:, :-1]).log_softmax(-1)
        losses = [-logits[i, t - 1, tokens[i, t]] for i in range(2) for t in (7, 8)]
        assert row[name] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-12)


def test_a_question_with_missing_runs_is_not_answered(tmp_path: Path) -> None:
    committed = recorded_runs(Path(__file__).parents[2] / "results/dilution-heads")
    (folder,) = [run.folder for run in committed if run.seed == 1400]
    for name in ("dilution-ratio", "dilution-heads"):
        shutil.copytree(folder, tmp_path / name / "runs/KerpleLog 128/seed-1400")
    lines = answers(tmp_path).splitlines()
    assert [line.rpartition("** ")[2] for line in lines] == [
        "Not tested: of the runs of dilution-ratio, 16 are missing.",
        "Not tested: of the runs of dilution-heads, 11 are missing.",
        "Not tested: of the runs of dilution-ratio, 16 are missing.",
    ]
