"""Categories against a loop, and parts of the gain of a network with known losses."""

import numpy as np
import pandas as pd
import torch

from kerple.data.evaluation_text import Text
from results.judge.copying import CATEGORIES, CONTEXTS, MODELS, categories, contexts, measure, page, parts


def test_categories_equal_those_of_a_loop_over_all_earlier_pairs() -> None:
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        tokens, near, targets = generator.integers(6, size=60), 12, 5
        expected = []
        for i in range(56, 61):  # the last five targets are tokens 55 to 59, counted from 0
            pair = tuple(tokens[i - 3 : i - 1])
            starts = [j for j in range(i - 3) if tuple(tokens[j : j + 2]) == pair]
            # the last 12 inputs are tokens 47 to 58
            expected.append("near" if any(j >= 47 for j in starts) else "distant" if starts else "new")
        assert categories(tokens, near, targets) == expected
        seen.update(expected)
    assert seen == set(CATEGORIES)


def test_shuffled_text_has_the_same_tokens_before_the_same_near_text() -> None:
    block = torch.randperm(2049)
    texts = contexts(block, torch.Generator().manual_seed(0))
    assert list(texts) == list(CONTEXTS)
    assert texts["own"].equal(block)
    assert texts["none"].equal(block[-129:])
    assert texts["shuffled"][-129:].equal(block[-129:])
    assert texts["shuffled"].sort().values.equal(block.sort().values)
    assert not texts["shuffled"].equal(block)


class Copier:
    """Its loss is 1 if a target has occurred before after the same pair, else 2, or 3 in a text of 2,048 tokens."""

    def losses(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        ids = tokens[0].tolist()
        triples = [tuple(ids[j - 2 : j + 1]) for j in range(2, len(ids))]
        losses = [1.0 if triple in triples[:j] else 2 + len(ids) // 2048 for j, triple in enumerate(triples)]
        return torch.tensor([losses[-last:]])


def test_parts_add_up_to_the_gain_and_only_copied_targets_gain() -> None:
    generator = np.random.default_rng(0)
    documents = [generator.permutation(9000)[:2060] for _ in range(4)]
    for document in documents:
        document[2009:2049] = document[100:140]  # the last 40 targets of the block; the first two have new pairs
    text = Text(np.concatenate(documents), np.cumsum([0, *map(len, documents)])[:-1])
    table = measure(Copier(), text, None)  # type: ignore[arg-type]
    assert table.groupby("category")["targets"].sum().to_dict() == {"new": 4 * 26, "distant": 4 * 38}
    np.testing.assert_allclose(parts(table, "own")[list(CATEGORIES)], [[0, 38 / 64, -26 / 64]] * 4, atol=1e-12)
    np.testing.assert_allclose(parts(table, "shuffled")[list(CATEGORIES)], [[0, -38 / 64, -26 / 64]] * 4, atol=1e-12)


def test_answers_are_those_of_the_intervals() -> None:
    """KERPLE-log gains by copying, RNoPE-SWA by copying less than it pays; shuffled text gives no gain."""
    rows = []
    for model in MODELS.values():
        for package in range(10):
            for category, gain in {"near": -0.2, "distant": 0.3, "new": 0.1}.items():
                own = 2 - gain * (0.5 if model == "RoPE" else 1) + 0.01 * package
                rows.append([model, package, category, 10, 20.0, 10 * own, 20.5])
    table = pd.DataFrame(rows, columns=["model", "package", "category", "targets", *CONTEXTS])
    text = page(table)
    # by hand: the mean over packages of 0.3 - 0.01 p is 0.255, and a third of the targets are in each category
    assert "Is its part *distant* above 0? **Yes**, +0.085 [" in text
    assert "KERPLE-log: **No**, −0.017 [" in text
    assert "below 0? **Yes**, −0.063 [" in text
    assert "paired by package? **Inconclusive**, +0.000 [+0.000, +0.000]" in text
    assert "| RoPE | all | 100% |" in text
