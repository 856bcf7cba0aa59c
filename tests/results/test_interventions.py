"""Factors and biases against formulas, and answers of the page by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from kerple.data.evaluation_text import Text
from kerple.positions import KerpleLog, Shape
from kerple.positions.token_positions import TokenPositions
from results.judge.copying import MODELS
from results.judge.interventions import BIASES, RULES, WITH_FACTOR, flattest_head, measure, page, temperature


@pytest.mark.parametrize(
    ("rule", "number", "expected"),
    [
        ("Llama 4", 0.2, lambda n: 1 + 0.2 * math.log(1 + n // 128)),
        ("log n", 1 / math.log(128), lambda n: max(math.log(n) / math.log(128), 1)),
        ("SWAN", 32, lambda n: math.log(32 + n - 1) / math.log(32)),
    ],
)
def test_factors_are_those_of_the_page(rule, number, expected) -> None:
    factor = temperature(Shape(8, 2, 128), rule, number).eval()
    q = torch.ones(1, 1, 2048, 4, dtype=torch.float64)
    changed, _ = factor.transform_qk(q, q, None, TokenPositions.arange(2048))
    np.testing.assert_allclose(changed[0, 0, :, 0], [expected(n) for n in range(1, 2049)], rtol=1e-12)


def test_only_the_flattest_head_gets_the_bias_until_the_context_ends() -> None:
    position = KerpleLog(Shape(8, 2, 128), r1=[0.5, 2.0], r2=[0.1, 0.2]).double()
    distance = torch.tensor([5.0, 2047.0], dtype=torch.float64)
    before = position.bias(distance).detach()
    for bias in BIASES:
        with flattest_head(position, bias):
            changed = position.bias(distance).detach()
        assert changed[0, 1] == pytest.approx(bias)
        # both distances are scaled, because only r1 changes
        assert changed[0, 0] == pytest.approx(bias * math.log1p(0.5) / math.log1p(204.7))
        assert changed[1].equal(before[1])
    assert position.bias(distance).equal(before)


class DistantTokens:
    """Its loss is the mean of the tokens before the last 129, and 0 without such tokens."""

    def losses(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        distant = tokens[0, :-129].double()
        return torch.full((1, last), float(distant.mean()) if len(distant) else 0.0)


def test_foreign_text_is_that_of_the_next_package() -> None:
    documents = [np.full(2049, document) for document in (1, 2, 4) for _ in range(12)]
    text = Text(np.concatenate(documents), np.arange(36) * 2049)
    text.table = pd.DataFrame({"group": np.repeat(["a", "b", "c"], 12), "overlap": 0.0})
    table = measure(DistantTokens(), text, ["none", "own", "foreign"])  # type: ignore[arg-type]
    assert table["package"].tolist() == ["a", "b", "c"]
    assert table["targets"].tolist() == [12 * 64] * 3
    means = table[["none", "own", "foreign"]].div(table["targets"], axis=0)
    np.testing.assert_allclose(means, [[0, 1, 2], [0, 2, 4], [0, 4, 1]], atol=1e-6)


def test_answers_are_those_of_the_contrasts() -> None:
    """The own loss of RNoPE-SWA falls by 0.1, 0.1 or 0.3, that of the others by 0; flatter biases disturb more."""
    rows = []
    for package in range(10):
        noise = 0.01 * package
        for model in WITH_FACTOR:
            none, foreign = (2.2, 2.3) if model == "KERPLE-log" else (math.nan, math.nan)
            rows.append([model, "trained", math.nan, package, 10, 10 * none, 20, 10 * foreign])
            for rule, numbers in RULES.items():
                fall = (0.3 if rule == "SWAN" else 0.1) + noise if model == "RNoPE-SWA" else 0.0
                rows.append([model, rule, numbers[0], package, 10, math.nan, 10 * (2 - fall), math.nan])
        for bias in BIASES:
            # the gain is 0.2 at the trained bias and falls to both sides; the trained disturbance is 0.1
            own, disturbance = 2.2 - (0.2 - 0.02 * abs(bias + 4) + noise * (bias == 0)), 0.2 + bias / 40
            rows.append(["KERPLE-log", "bias", bias, package, 10, 22, 10 * own, 10 * (2.2 + disturbance)])
    columns = ["model", "change", "number", "package", "targets", "none", "own", "foreign"]
    repeated = pd.DataFrame(
        [
            [distance, 8.0, 8.0 - i * distance / 1024, name]
            for distance in (64, 1024)
            for i, name in enumerate(MODELS.values())
        ],
        columns=["distance", "first", "repeated", "model"],
    )
    copied = pd.DataFrame(
        [
            [name, package, "distant", 10, 20.0, 20.0 - i]
            for i, name in enumerate(MODELS.values())
            for package in range(10)
        ],
        columns=["model", "package", "category", "targets", "none", "own"],
    )
    text = page(pd.DataFrame(rows, columns=columns), repeated, copied)
    # by hand: the mean of the noise over packages is 0.045
    assert "lower the own loss of RNoPE-SWA?** **Yes**, −0.145 [" in text
    assert "log n: **Inconclusive**, +0.000 [+0.000, +0.000]; SWAN: **Yes**, −0.200 [−0.200, −0.200]" in text
    assert "KERPLE-log: **Inconclusive**, +0.000 [+0.000, +0.000]; RoPE: **Inconclusive**" in text
    assert "lower in RNoPE-SWA than in KERPLE-log?** **Yes**, −0.145 [" in text
    # gains: 0.2 trained, 0.17 at -2.5, and 0.12 with noise at 0, whose deviation over packages is 0.0303
    assert "−2.5 to 0: **Inconclusive**, −0.030 [−0.030, −0.030]; −0.005 [−0.027, +0.017]" in text.replace("\n   ", " ")
    assert "and 0: **Yes**, +0.050 [+0.050, +0.050]; +0.055 [" in text
    assert "| −8.2 | 2.200 | 2.084 | +0.116 [+0.116, +0.116] | −0.005 [−0.005, −0.005] |" in text
    assert (
        "1,024:\n   RoPE, RNoPE-SWA, ALiBi, KERPLE-log; by part *distant*: RoPE, RNoPE-SWA, ALiBi, KERPLE-log." in text
    )
    assert "| RoPE | +0.188 | +3.000 | +0.300 [+0.300, +0.300] |" in text
