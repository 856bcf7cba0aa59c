"""The trend over sizes and tokens: on made-up runs whose losses follow a known law."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from kerple.evaluation import results
from kerple.evaluation.results import Row
from results.trend import PAPER_PARAMETERS, PAPER_TOKENS, line, main, settings, table
from tests.results.made_up import write

SIZES, STEPS, SEEDS = (400_000, 1_300_000, 5_000_000), (1_000, 3_000), (1, 2, 3)


def law(parameters: float, tokens: float) -> float:
    """By how many nats ALiBi is behind."""
    return 0.3 - 0.02 * math.log10(6 * parameters * tokens)


def gain(strategy: str, seed: int) -> float:
    return {"KerpleLog": 0.03, "ALiBi": 0.01}[strategy] + 0.001 * (seed - 2)


def write_runs(root: Path, sizes: tuple[int, ...] = SIZES, spread: float = 0.0) -> None:
    generator = np.random.default_rng(0)
    for size in sizes:
        for steps in STEPS:
            for strategy, own in (("KerpleLog", 8), ("ALiBi", 0)):
                for seed in SEEDS:
                    behind = law(size, steps * 1024) if strategy == "ALiBi" else 0
                    full = generator.normal(3 + behind, spread, 6) * 1024
                    read = {"full": full, "windowed128": full + gain(strategy, seed) * 1024}
                    rows = [
                        Row("ppl", name, 1024, None, block, nll, 1024)
                        for name, losses in read.items()
                        for block, nll in enumerate(losses)
                    ]
                    folder = root / f"scaling/runs/{size} {steps}/{strategy}/seed-{seed}"
                    cost = {"parameters": size + own, "position_parameters": own}
                    write(folder, rows, cost, [0, 0, 1, 1, 2, 2], length=128, batch_size=8, max_steps=steps)


def test_the_law_is_found_and_carried(tmp_path: Path) -> None:
    write_runs(tmp_path)
    found = settings(tmp_path)
    assert [(s.parameters, s.tokens) for s in found] == [(size, steps * 1024) for size in SIZES for steps in STEPS]
    for setting in found:
        assert setting.advantage.mean == pytest.approx(law(setting.parameters, setting.tokens))
        assert (setting.advantage.seeds, setting.advantage.blocks) == (3, 3)  # documents
        assert {name: gain.mean for name, gain in setting.gains.items()} == pytest.approx(
            {"KerpleLog": 0.03, "ALiBi": 0.01}
        )
    last = table(found).body["ALiBi above KerpleLog (%)"].iloc[-1].text
    assert last.startswith(f"{100 * math.expm1(law(PAPER_PARAMETERS, PAPER_TOKENS)):+.1f} [")


def test_the_line_and_its_interval_are_polyfits() -> None:
    generator = np.random.default_rng(1)
    x, at = generator.normal(13, 1, 9), np.array([12.0, 17.9])
    y = 0.1 * x + generator.normal(0, 0.3, 9)
    coefficients, covariance = np.polyfit(x, y, 1, cov=True)
    powers = np.stack([at, np.ones(2)])
    middle = coefficients @ powers
    half = 2.3646243 * np.sqrt(np.einsum("in,ij,jn->n", powers, covariance, powers))  # Student's t of 7 at 97.5%
    assert line(x, y, at) == pytest.approx(np.stack([middle, middle - half, middle + half]), rel=1e-6)


def test_it_is_written_as_far_as_there_are_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without runs of KerpleLog and ALiBi"):
        main([str(tmp_path)])
    write_runs(tmp_path, SIZES[:1], spread=0.2)
    main([str(tmp_path)])
    text = (tmp_path / "scaling/trend.md").read_text()
    assert text.count("tokens |") == 2  # two settings are no trend
    assert "extrapolated" not in text
    assert (tmp_path / "scaling/trend.png").stat().st_size > 10_000


def test_the_committed_trend_is_that_of_the_committed_runs() -> None:
    root = Path(__file__).parents[2] / "results"
    assert (root / "scaling/trend.md").read_text() == table(settings(root)).markdown()


def test_runs_on_other_text_are_no_difference(tmp_path: Path) -> None:
    write_runs(tmp_path, SIZES[:1])
    folder = next((tmp_path / "scaling/runs").glob("*/KerpleLog/seed-2"))
    table, _ = results.read(folder)
    results.write_table(folder, table[table["block"] != 1])
    with pytest.raises(ValueError, match="got other blocks of text"):
        settings(tmp_path)


def test_a_seed_that_only_one_strategy_has_is_left_out(tmp_path: Path) -> None:
    write_runs(tmp_path, SIZES[:1])
    for path in (tmp_path / "scaling/runs").glob("*/ALiBi/seed-3"):
        shutil.rmtree(path)
    assert [(s.advantage.seeds, s.gains["KerpleLog"].seeds, s.gains["ALiBi"].seeds) for s in settings(tmp_path)] == [
        (2, 3, 2)
    ] * len(STEPS)
