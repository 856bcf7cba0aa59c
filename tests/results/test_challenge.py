"""The challenge accepts records of the recipe of main, and refuses each change of them with its reason."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kerple.base.errors import UserError
from kerple.compare.comparison_file import read_comparison
from kerple.compare.run_discovery import recorded_runs
from kerple.measure import results_table
from results.judge.challenge import FAR, page

RESULTS = Path(__file__).parents[2] / "results"
SEEDS = (1300, 1301, 1302)
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of results with main and an entry, which has the records of main's ALiBi."""
    monkeypatch.chdir(RESULTS.parent)  # paths in comparison files are relative to the current folder
    (tmp_path / "main").symlink_to(RESULTS / "main")
    for run in recorded_runs(RESULTS / "main"):
        if run.strategy == "ALiBi" and run.seed in SEEDS:
            shutil.copytree(run.folder, tmp_path / f"challenge/Mine/runs/Mine/seed-{run.seed}")
    return tmp_path


def test_a_report_without_the_folder_of_an_entry_is_not_among_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RESULTS.parent)
    assert not read_comparison("configs/compare/challenge.yaml").report_folder.is_relative_to("results")


def place(text: str, strategy: str) -> list[str]:
    """Return the cells after the place in the row of a strategy."""
    return next(line.split(" | ")[2:] for line in text.splitlines() if f" | {strategy} | " in line)


@pytest.mark.slow
def test_an_entry_with_the_recipe_of_main_stands_where_its_losses_put_it(root: Path) -> None:
    text = page(root)
    assert "Refused" not in text
    mine, alibi = place(text, "Mine"), place(text, "ALiBi")
    assert (mine[0], alibi[0]) == ("3", "8")
    # the standings are those of three seeds; ALiBi's own loss is 2.431 with eight
    losses = [results_table.read(run.folder)[0] for run in recorded_runs(root / "challenge/Mine")]
    far = [table[table["protocol"].str.startswith("far_own") & (table["length"] == 2048)] for table in losses]
    mean = sum(float(table["sum"].sum() / table["count"].sum()) for table in far) / 3
    assert mine[1].startswith(f"{mean:.3f} (")


@pytest.mark.slow
def test_an_entry_of_the_first_seed_is_listed_without_a_place(root: Path) -> None:
    shutil.copytree(root / "challenge/Mine/runs/Mine/seed-1301", root / "challenge/Other/runs/Other/seed-1301")
    for seed in SEEDS[1:]:
        shutil.rmtree(root / f"challenge/Mine/runs/Mine/seed-{seed}")
    text = page(root)
    assert "- Other: seeds 1301, expected 1300, 1301, 1302, or 1300 alone" in text
    (losses, _), mine = results_table.read(root / "challenge/Mine/runs/Mine/seed-1300"), place(text, "Mine")
    far = [losses[losses["protocol"].str.startswith(name) & (losses["length"] == 2048)] for name in FAR]
    own, none = (float(of["sum"].sum() / of["count"].sum()) for of in far)
    reference = float(place(text, "KerpleLog")[1].split()[0])
    assert mine[:3] == ["1", f"{own:.3f}", f"{none - own:+.3f}"]
    assert float(mine[3].removesuffix(" (one seed)").replace("−", "-")) == pytest.approx(own - reference, abs=1e-3)
    assert mine[4].endswith(" (one seed)")
    assert mine[5] == "1,317,888 |"  # ALiBi has no parameters
    rows = [line for line in text.splitlines() if re.match(r"\| (\d+|–) \| ", line)]
    assert rows[-1].startswith("| – | Mine | 1 | ")
    ranks = [[int(rank) for rank in re.findall(r" \((\d+)\)", row)] for row in rows[:-1]]
    assert [sorted(of) for of in zip(*ranks, strict=True)] == [[*range(1, 9)]] * 2  # of main's strategies alone


def of_fit(key: str, value: object) -> Change:
    return lambda about: about["run"]["config"].update({key: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_fit("trainer.max_steps", 12000), "seed 1301: trainer.max_steps: 12000 -> 9766"),
        (of_fit("model.dim", 256), "seed 1301: model.dim: 256 -> 128"),
        (of_fit("data.init_args.mask_documents", True), "seed 1301: data.init_args.mask_documents: True -> False"),
        (of_fit("seed_everything", 7), "seed 1301: seed_everything: 7 -> 1301"),
        (lambda about: about["run"].update({"data": "0" * 64}), "seed 1301: its data has another checksum"),
        (
            lambda about: about["run"]["test"].update({"trainer.callbacks.Extrapolation.init_args.documents": False}),
            "seed 1301: test: trainer.callbacks.Extrapolation.init_args.documents: False -> True",
        ),
        (
            of_fit("model.position.init_args.learnable", True),
            "seed 1301: model.position.init_args.learnable: True -> False of the first seed",
        ),
        (
            lambda about: about["run"]["inputs"].update({"my_file.Mine": "0" * 64}),
            "seed 1301: not the source code of the first seed",
        ),
        (
            lambda about: about["run"]["test"].update({"data.init_args.directory": "/elsewhere"}),
            "seed 1301: test: data.init_args.directory, expected the data of the fit",
        ),
        (
            lambda about: about["evaluations"]["far_context"].update({"text": "0" * 64}),
            "seed 1301: test: another text",
        ),
        (lambda about: about["run"]["cost"]["environment"].update({"devices": "4"}), "seed 1301: trained on 4 devices"),
        (lambda about: about["run"]["cost"].clear(), "seed 1301: no number of parameters"),
        (lambda about: about["run"]["cost"].update({"parameters": "1"}), "cannot be read ("),
        (lambda about: about.pop("run"), "cannot be read ('run')"),
    ],
)
def test_an_entry_with_another_recipe_is_refused(root: Path, change: Change, reason: str) -> None:
    path = root / "challenge/Mine/runs/Mine/seed-1301" / results_table.ABOUT
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))
    text = page(root)
    assert f"- Mine: {reason}" in text
    assert "| Mine |" not in text


@pytest.mark.slow
def test_an_entry_whose_source_code_is_not_in_its_folder_is_refused(root: Path) -> None:
    def change(class_path: str) -> None:
        for path in (root / "challenge/Mine").rglob(results_table.ABOUT):
            about = json.loads(path.read_text())
            about["run"]["config"]["model.position.class_path"] = class_path
            path.write_text(json.dumps(about))

    change("Mine")
    assert "- Mine: Mine is no strategy of kerple" in page(root)
    change("my_file.Mine")
    assert "- Mine: no my_file.py in the folder" in page(root)
    file = root / "challenge/Mine/my_file.py"
    file.write_text("import math\nfrom torch import nn\nfrom helper import Base")
    assert "- Mine: no definition of Mine in my_file.py; no helper.py in the folder" in page(root)
    file.write_text("from helper import Base\nclass Mine(Base): pass")
    file.with_name("helper.py").write_text("import kerple.positions\nimport third")
    assert "- Mine: no third.py in the folder" in page(root)
    file.with_name("third.py").write_text("class (")
    assert "- Mine: cannot be read (" in page(root)
    file.with_name("third.py").write_text("raise AssertionError('executed')")
    assert "Refused" not in page(root)


@pytest.mark.slow
def test_losses_of_other_targets_are_refused(root: Path) -> None:
    path = root / "challenge/Mine/runs/Mine/seed-1302" / results_table.TABLE
    table = pd.read_csv(path)
    far = table["protocol"].str.startswith(FAR)
    changed = table.assign(protocol=table["protocol"].str.replace("far_own64", "far_own32"))
    for other in (table[~(far & (table["block"] > 20))], changed, table.assign(count=table["count"] + far)):
        other.to_csv(path, index=False)
        reason = "seed 1302: the losses with and without distant text have other targets than those of main"
        assert f"- Mine: {reason}" in page(root)


@pytest.mark.slow
def test_a_folder_without_records_of_main_is_an_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty/main").mkdir(parents=True)
    for folder in ("empty", "nowhere"):
        with pytest.raises(UserError, match=f"results: got {tmp_path}/{folder}, expected the folder of the"):
            page(tmp_path / folder)


@pytest.mark.slow
def test_an_entry_without_all_seeds_or_with_a_strategy_of_main_is_refused(root: Path) -> None:
    runs = root / "challenge/Mine/runs"
    copy, expected = root / "challenge/Copy", "expected one strategy with the name of the folder, which no strategy of"
    shutil.copytree(root / "challenge/Mine", copy)
    assert f"- Copy: runs of Mine, {expected}" in page(root)
    copy.rename(root / "challenge/ALiBi")
    (root / "challenge/ALiBi/runs/Mine").rename(root / "challenge/ALiBi/runs/ALiBi")
    assert f"- ALiBi: runs of ALiBi, {expected}" in page(root)
    shutil.rmtree(root / "challenge/ALiBi")
    (root / "challenge/.hidden").mkdir()
    shutil.copytree(runs / "Mine", root / "challenge/Part/runs/a/Part")
    for name in ("Mine [2]", "Mine|2", "Mine "):
        shutil.copytree(runs / "Mine", root / "challenge" / name / "runs" / name)
    text = page(root)
    assert "hidden" not in text
    assert "- Part: records in a, expected records in Part/seed-N" in text
    for name in ("Mine [2]", "Mine|2", "Mine "):
        assert f"- {name}: a name with other characters than letters" in text
        shutil.rmtree(root / "challenge" / name)
    shutil.rmtree(root / "challenge/Part")
    table = runs / "Mine/seed-1302" / results_table.TABLE
    whole = pd.read_csv(table)
    whole[whole["length"] < 2048].to_csv(table, index=False)  # of a strategy that cannot read 2,048 tokens
    assert "- Mine: seed 1302: no losses with and without distant text at 16 training lengths" in page(root)
    table.write_bytes(table.read_bytes()[:-9])
    assert "- Mine: cannot be read (" in page(root)
    shutil.rmtree(runs / "Mine/seed-1302")
    assert "- Mine: seeds 1300, 1301, expected 1300, 1301, 1302" in page(root)
