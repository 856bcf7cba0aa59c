"""The pages on a figure and an analysis of one's own, run as a reader runs them, in fewer steps."""

import csv
import math
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from kerple.analyses.attention_maps import visit_probabilities
from kerple.cli.main import main
from kerple.cli.trained import load
from kerple.evaluation import results

PAGES = Path(__file__).parents[2] / "docs/how-to"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = (PAGES / page).read_text().splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("    python run.py ")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_figure_shows_what_both_tests_have_written_and_the_analysis_its_mean(tmp_path, monkeypatch, capsys):
    (config,) = blocks("own-figure.md", "yaml")
    smaller = config.replace("max_steps: 200", "max_steps: 20").replace("blocks: 64", "blocks: 8")
    (tmp_path / "first.yaml").write_text(smaller)
    (tmp_path / "my_figure.py").write_text(blocks("own-figure.md", "python")[0])
    (tmp_path / "my_analysis.py").write_text(blocks("own-analysis.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for command in commands("own-figure.md"):
        main([*command, *(["--trainer.accelerator=cpu"] if command[0] == "fit" else [])])

    capsys.readouterr()
    runpy.run_path("my_figure.py")
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert set(printed) == {"KerpleLog", "RoPE"}
    for strategy, text in printed.items():
        table, _ = results.read(Path(f"logs/first/{strategy}/seed-1235/test"))
        perplexity = results.totals(table).query("metric == 'ppl'").set_index(["protocol", "length"])["value"]
        gains = {int(n): float(nats) for n, nats in re.findall(r"(\d+): ([+-][\d.]+)", text)}
        assert list(gains) == [32, 64, 128, 256]
        assert abs(gains[32]) < 1e-4  # both protocols see the same there
        for n, gain in gains.items():
            assert gain == pytest.approx(math.log(perplexity["windowed32", n] / perplexity["full", n]), abs=1e-4)
    assert Path("my_figure.png").read_bytes().startswith(b"\x89PNG")

    (command,) = commands("own-analysis.md")
    main(command)
    (written,) = Path("logs/first/KerpleLog/seed-1235").glob("test*/first_token.csv")
    found = [float(row["probability"]) for row in csv.DictReader(written.open())]
    model, data = load("logs/first/KerpleLog/seed-1235/checkpoints/last.ckpt")
    means = torch.zeros(2, 8, dtype=torch.float64)
    for i in range(8):
        tokens = data.blocks("test", 32)[i]["tokens"][None, :-1]
        visit_probabilities(model.network, tokens, lambda layer, p, i=i: means[layer].__setitem__(i, p[..., 0].mean()))
    assert found == pytest.approx(means.mean(1).tolist(), rel=1e-4)
    assert written.with_suffix(".png").is_file()
