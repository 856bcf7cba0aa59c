"""The commands of the pages own-figure, own-analysis and own-task with fewer steps, and programs of other pages."""

import csv
import importlib
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kerple.cli.main import main
from kerple.measure import results_table
from kerple.tasks.vocabulary import characters_to_ids
from kerple.training.trained_model import load_trained
from tests.cli.tiny import complaint
from tests.pages import blocks, commands, put


def test_every_link_leads_to_a_file_of_the_checkout() -> None:
    """On a code host, links lead to files of the repository. `make docs` checks only the links of the site."""
    root = Path(__file__).parents[2]
    pages = [*root.glob("*.md"), *root.glob("results/*.md"), *root.glob("docs/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text())]
    assert len(links) > 200
    assert not [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_figure_shows_what_both_tests_have_written_and_the_analysis_its_mean(tmp_path, monkeypatch, capsys):
    (config,) = blocks("own-figure.md", "yaml")
    smaller = config.replace("max_steps: 200", "max_steps: 20").replace("blocks: 64", "blocks: 8")
    (tmp_path / "first.yaml").write_text(smaller)
    put("own-figure.md", tmp_path / "my_figure.py", monkeypatch)
    put("own-analysis.md", tmp_path / "my_analysis.py", monkeypatch)
    for command in commands("own-figure.md"):
        main([*command, *(["--trainer.accelerator=cpu"] if command[0] == "fit" else [])])

    capsys.readouterr()
    runpy.run_path("my_figure.py")
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert set(printed) == {"KerpleLog", "RoPE"}
    for strategy, text in printed.items():
        table, _ = results_table.read(Path(f"logs/first/{strategy}/seed-1235/test"))
        perplexity = results_table.totals(table).query("metric == 'ppl'").set_index(["protocol", "length"])["value"]
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
    model, data = load_trained("logs/first/KerpleLog/seed-1235/checkpoints/last.ckpt")
    means = torch.zeros(2, 8, dtype=torch.float64)
    for i in range(8):
        tokens = data.text("test").blocks(32)[i][None, :-1]
        model.network.visit_attention(tokens, lambda layer, p, i=i: means[layer].__setitem__(i, p[..., 0].mean()))
    assert found == pytest.approx(means.mean(1).tolist(), rel=1e-4)
    assert written.with_suffix(".png").is_file()


@pytest.fixture
def my_task(tmp_path, monkeypatch):
    return importlib.import_module(put("own-task.md", tmp_path / "my_task.py", monkeypatch).stem)


def test_problems_and_places_of_the_task_are_what_the_page_says(my_task):
    task, rng = my_task.Rotate(), np.random.default_rng(0)
    for n in range(1, 20):
        example = task.example(n, rng)
        assert list(example.answer) == [example.prompt[(i + 1) % n] for i in range(n)]
        tokens = torch.tensor([characters_to_ids(example.text)])
        whole = task.places(tokens)
        for end in range(1, tokens.shape[1]):
            assert torch.equal(task.places(tokens[:, :end]), whole[:, :end])
        read, written = whole[0, 1 : n + 1], whole[0, n + 2 : 2 * n + 2]
        assert torch.equal(written[:-1], read[1:])  # all letters but the one that moved
    assert task.places(torch.tensor([characters_to_ids("«cab=abc··")]))[0].tolist() == [0, 2, 3, 4, 2, 3, 4, 5, 0, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_commands_of_the_task_run(my_task, capsys):
    fit, test, predict = commands("own-task.md")
    fit += ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    fit += ["--data.batch_size=4", "--data.validation_examples=8", "--data.test_examples=4"]
    assert "expected 14 or more" in complaint(capsys, *fit, "--data.length=13")  # too small, as the page says
    main(fit)  # into the folder that the page names, though the first attempt had chosen it too
    main(test)
    assert len(list(Path("logs/tasks/Coupled/seed-1235").glob("**/results.csv.gz"))) == 1
    capsys.readouterr()
    main([*predict, "--length", "5"])
    assert capsys.readouterr().out.startswith("cab=")


@pytest.mark.slow
def test_the_block_of_x_transformers_has_the_bias_of_the_strategy(monkeypatch):
    """The oracle is the attention of x-transformers, to which the bias is given as a matrix."""
    attention = pytest.importorskip("x_transformers.attend")
    names: dict[str, Any] = {}
    for program in blocks("plain-block.md", "python")[:2]:
        exec(program, names)
    model, tokens = names["model"].eval(), torch.randint(256, (2, 40))
    original = attention.Attend(heads=4, causal=True)

    def forward(self, q, k, v, **options):
        distance = (torch.arange(40)[:, None] - torch.arange(40)).clamp(min=0).float()
        bias = self.position.bias(distance.flatten()).unflatten(1, distance.shape)
        return original(q, k, v, **options | {"attn_bias": bias})

    found = model(tokens)
    monkeypatch.setattr(names["Attend"], "forward", forward)
    torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(names["Attend"], "forward", lambda self, *args, **options: original(*args, **options))
    assert float((found - model(tokens)).detach().abs().max()) > 1e-3  # without a bias
