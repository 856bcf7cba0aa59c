"""The report of runs whose numbers are known beforehand."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from kerple.compare.collect import Run, locate, read

from kerple.compare import page as report
from tests.compare.runs_on_disk import BYTES_PER_TOKEN, CURVES, LENGTHS, write_run, write_task_run

COMMITTED = Path(__file__).parents[2] / "results"
SEEDS = (1235, 1236, 1237)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for strategy, curve in CURVES.items():
        for seed in SEEDS:
            write_run(root / strategy / f"seed-{seed}", strategy, seed, curve)
    return root


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report.write(read(locate([root])), folder, name="three curves", baseline="KerpleLog", missing=["T5 seed 1235"])
    return folder


def test_results_hold_every_run_length_and_protocol_once(folder: Path) -> None:
    results = pd.read_csv(folder / "results.csv")
    assert len(results) == 3 * 3 * 4 * 2 * 2  # strategies, seeds, lengths, protocols, ppl and bits per byte
    assert set(results["protocol"]) == {"full", "windowed64"}
    row = results.query(
        "strategy == 'RoPE' and seed == 1237 and metric == 'ppl' and protocol == 'full' and length == 512"
    )
    assert row["value"].item() == pytest.approx(37.0 * 1.001)
    bits = results.query("strategy == 'RoPE' and seed == 1236 and metric == 'bits_per_byte' and length == 512")["value"]
    assert bits.iloc[0] == pytest.approx(np.log2(37.0) / BYTES_PER_TOKEN)


def test_the_same_runs_give_the_same_bytes(root: Path, folder: Path, tmp_path: Path) -> None:
    report.write(read(locate([root])), tmp_path, name="three curves", baseline="KerpleLog")
    for name in ("results.csv", "summary.csv", "costs.csv", "table.md", "ppl-against-length.svg", "kernels.csv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_markdown_table_marks_best_and_significant(folder: Path) -> None:
    lines = (folder / "table.md").read_text().splitlines()
    start = lines.index("### Perplexity, full")
    header, _, *body = lines[start + 2 : start + 7]
    assert header == "|  | 64 (1×) | 128 (2×) | 256 (4×) | 512 (8×) | ratio to KerpleLog at 512 |"
    table = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in body}
    assert table["KerpleLog"] == ["18.50 ± 0.02", *(f"**{v:.2f} ± 0.02**" for v in CURVES["KerpleLog"][1:]), "–"]
    assert table["ALiBi"][4] == "1.052 [1.052, 1.052]"  # 18.1 / 17.2, the blocks' hardness being the same on both sides
    assert table["RoPE"][0] == "**18.40 ± 0.02†**"  # 0.1 lower at every seed: lower, and significantly so
    assert table["RoPE"][3] == "37.00 ± 0.04†"


def test_intervals_contain_the_ratio_and_pair_the_blocks(folder: Path) -> None:
    summary = pd.read_csv(folder / "summary.csv").query("metric == 'ppl' and protocol == 'full'").set_index("strategy")
    alibi = summary.loc["ALiBi"].iloc[-1]
    # hardness of blocks is the same on both sides: it cancels in the ratio
    assert alibi["ratio"] == pytest.approx(18.1 / 17.2)
    assert (alibi["ratio_low"], alibi["ratio_high"]) == (pytest.approx(18.1 / 17.2), pytest.approx(18.1 / 17.2))
    assert np.isnan(summary.loc["KerpleLog"].iloc[0]["ratio_low"])


def test_what_distant_text_is_worth_is_told_on_the_same_targets(folder: Path) -> None:
    lines = (folder / "table.md").read_text().splitlines()
    start = lines.index("### Context gain beyond 64 tokens")
    assert lines[start + 2] == "|  | 128 (2×) | 256 (4×) | 512 (8×) |"  # at the training length they are the same
    worth = "**+0.0100 [+0.0100, +0.0100]**"  # blocks differ, pairs do not
    assert lines[start + 4 : start + 7] == [
        f"| {strategy} | {worth} | {worth} | {worth} |" for strategy in sorted(CURVES)
    ]


def test_latex_escapes_and_marks(folder: Path) -> None:
    text = (folder / "table.tex").read_text()
    assert r"\textbf{17.20 $\pm$ 0.02}" in text
    assert r"37.00 $\pm$ 0.04$^\dagger$" in text
    assert "±" not in text
    assert "†" not in text
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") >= 3


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_needs_no_other_file_and_says_what_was_done(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert links.open == []
    assert links.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in links.sources)
    assert b"<svg" in base64.b64decode(links.sources[0].partition(",")[2])
    shown = ("windowed64", "<td>6,144</td>", "2.13.0", "27,236", "batch_size: 8", "T5 seed 1235", "positions.RoPE")
    for text in shown:
        assert text in page, text  # protocol, targets, versions, speed, config, what is missing, what differs
    assert "seed_everything" not in page


def test_the_page_has_the_curves_as_data(folder: Path) -> None:
    text = re.search(r'id="data">(.*?)</script>', (folder / "report.html").read_text(), re.DOTALL)
    assert text
    (full,) = (p for p in json.loads(text[1])["metrics"][0]["protocols"] if p["name"] == "full")
    assert (full["trained"], full["lengths"]) == (64, list(LENGTHS))
    assert {curve["name"] for curve in full["strategies"]} == set(CURVES)
    for curve in full["strategies"]:
        expected = np.array(CURVES[curve["name"]])
        assert curve["mean"] == pytest.approx(expected, rel=1e-6)
        for seed, values in curve["seeds"].items():
            assert values == pytest.approx(expected * (1 + (int(seed) - 1236) / 1000), rel=1e-6)
        ratio = expected / np.array(CURVES["KerpleLog"])
        for name in ("ratio", "ratio_low", "ratio_high") if curve["name"] != "KerpleLog" else ():
            assert curve[name] == pytest.approx(ratio, rel=1e-6)  # blocks and seeds change both sides alike


def test_figures_are_written_twice(folder: Path) -> None:
    for name in ("ppl-against-length", "ppl-relative-to-KerpleLog"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{name}.svg").read_text()


def test_ratios_to_an_older_baseline_do_not_stay(root: Path, tmp_path: Path) -> None:
    for baseline in ("RoPE", "KerpleLog"):
        report.write(read(locate([root])), tmp_path, name="three curves", baseline=baseline)
    assert {path.stem for path in tmp_path.glob("*-relative-to-*")} == {"ppl-relative-to-KerpleLog"}


def test_analyses_are_joined_with_strategy_and_seed_in_front(folder: Path) -> None:
    table = pd.read_csv(folder / "kernels.csv")
    assert list(table.columns) == ["strategy", "seed", "head", "distance", "bias"]
    assert table.query("strategy == 'ALiBi' and seed == 1235")["bias"].item() == pytest.approx(-123.5)


@pytest.mark.usefixtures("undrawn")
def test_an_analysis_that_the_report_does_not_know_is_a_table_of_means(tmp_path: Path) -> None:
    runs = []
    for strategy, shares in (("KerpleLog", (0.25, 0.5)), ("T5", (0.125, 0.375))):
        for seed in SEEDS[:2]:
            directory = write_run(tmp_path / strategy / f"seed-{seed}", strategy, seed, CURVES["RoPE"])
            found = [share + 0.01 * (seed - SEEDS[0]) for share in shares]
            first = pd.DataFrame({"layer": [0, 1], "blocks": 8, "probability": found})
            first.to_csv(directory / "test" / "first_token.csv", index=False)
            pd.DataFrame({"share": found[:1], "rank": [2.5], "skipped": [None]}).to_csv(
                directory / "test" / "top.csv", index=False
            )
            large = pd.DataFrame({"distance": range(40), "bias": 0.5})
            large.to_csv(directory / "test" / "long.csv", index=False)
            runs.append(Run(strategy, seed, directory))
    page = page_of(runs, tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    # the mean of x and x + 0.01 is x + 0.005, their standard deviation 0.01 / √2
    assert "### first_token: probability\n\n|  | layer 0 | layer 1 |\n" in text
    assert "| KerpleLog | 0.255 ± 0.0071 | 0.505 ± 0.0071 |" in text
    assert "| T5 | 0.13 ± 0.0071 | 0.38 ± 0.0071 |" in text
    assert "### top\n\n|  | share | rank |\n| --- | ---: | ---: |\n| KerpleLog | 0.255 ± 0.0071 | 2.5 ± 0 |" in text
    assert "### Larger tables of analyses" in text
    assert "| long | 160 | long.csv |" in text
    details = page.partition("<h2>Details</h2>")[2]
    for shown in ("<summary>first_token: probability</summary>", "<td>0.505 ± 0.0071</td>", "<td>long.csv</td>"):
        assert shown in details


@pytest.mark.usefixtures("undrawn")
def test_task_accuracies_need_nothing_of_their_own(tmp_path: Path) -> None:
    for strategy, copy, reverse in (("NoPE", 0.9, 0.2), ("T5", 0.5, 0.3), ("Sinusoidal", 0.0, 0.0)):
        for seed in SEEDS:
            accuracies = {"copy": (1.0, 1.0, copy, copy), "reverse": (1.0, 1.0, reverse, reverse)}
            write_task_run(tmp_path / "runs" / strategy / f"seed-{seed}", strategy, seed, accuracies)
    report.write(read(locate([tmp_path / "runs"])), tmp_path / "report", name="tasks", baseline="NoPE")
    text = (tmp_path / "report" / "table.md").read_text()
    assert "### Exact match at lengths beyond 20, by task" in text
    assert "| NoPE | **0.900** | 0.200 | **0.750** |" in text  # ranks 1 and 2: (1 + 1/2) / 2
    assert "| T5 | 0.500 | **0.300** | **0.750** |" in text
    assert "| Sinusoidal | 0.000 | 0.000 | 0.333 |" in text
    assert "### Exact match, copy" in text


@pytest.mark.usefixtures("undrawn")
def test_a_task_that_a_strategy_lacks_is_left_open_and_nothing_is_ranked(tmp_path: Path) -> None:
    for strategy, tasks in (("NoPE", {"copy": 0.9, "reverse": 0.2}), ("T5", {"copy": 0.5})):
        for task, beyond in tasks.items():
            accuracies = {task: (1.0, 1.0, beyond, beyond)}
            write_task_run(tmp_path / "runs" / task / strategy / "seed-1236", strategy, 1236, accuracies)
    report.write(read(locate([tmp_path / "runs"])), tmp_path / "report", name="tasks", baseline="NoPE")
    text = (tmp_path / "report" / "table.md").read_text()
    assert "| NoPE | **0.900** | 0.200 |" in text  # nobody to be better than
    assert "| T5 | 0.500 | – |" in text
    assert "reciprocal" not in text


HOSTILE = ("base/line", "<script>alert(1)</script>", r"a_b & 50% $x$ #1 {y} ~z^ \input{q} |", r"$\nosuch$", "_low")


def test_labels_are_text_in_every_language(tmp_path: Path) -> None:
    runs = [
        Run(label, seed, write_run(tmp_path / f"{i}-{seed}", "RoPE", seed, CURVES["RoPE"]))
        for i, label in enumerate(HOSTILE)
        for seed in SEEDS[:2]
    ]
    report.write(read(runs), tmp_path / "report", name="<b>&", baseline="base/line", missing=["<i>"])

    page = (tmp_path / "report" / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert links.open == []
    assert not {"<script>", "<b>&", "<i>"} & set(re.findall(r"<script>|<b>&|<i>", page))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page

    tex = (tmp_path / "report" / "table.tex").read_text()
    escaped = r"a\_b \& 50\% \$x\$ \#1 \{y\} \textasciitilde{}z\textasciicircum{} \textbackslash{}input\{q\} $|$ &"
    assert escaped in tex
    rows = [line for line in tex.splitlines() if line.endswith(r"\\") and "alert" in line]
    assert rows  # perplexities have a column more, their ratio to the baseline: the same runs, so 1
    for line in (line for line in rows if "pm" in line and "-123" not in line):  # the kernels' bias, one column
        assert len(re.findall(r"(?<!\\)&", line)) == len(LENGTHS) + ("[1.000, 1.000]" in line)

    rows = [line for line in (tmp_path / "report" / "table.md").read_text().splitlines() if "input" in line]
    assert rows
    for line in (line for line in rows if "±" in line and "-123" not in line):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(LENGTHS) + 2 + ("[1.000, 1.000]" in line)
    assert " _low" in (tmp_path / "report" / "ppl-against-length.svg").read_text()  # in the legend
    assert (tmp_path / "report" / "ppl-relative-to-base_line.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_bits_per_byte_of_an_older_test_are_marked(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run" / "seed-1236"
    write_run(run, "KerpleLog", 1236, CURVES["KerpleLog"])
    path = run / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    for row in content["rows"]:
        del row["bytes"]  # as it was written before
    path.write_text(json.dumps(content))
    for directory, old in ((run, True), (root, False)):
        report.write(read(locate([directory])), tmp_path / "report", name="x", baseline="KerpleLog")
        for name in ("table.md", "table.tex", "report.html"):
            text = (tmp_path / "report" / name).read_text()
            assert text.count(report.OLD_BYTES) == (2 if old else 0)  # full and windowed


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*/results.csv")), ids=lambda path: path.parent.name)
def test_committed_bits_per_byte_are_of_scored_bytes_or_marked(path: Path) -> None:
    results = pd.read_csv(path).pivot_table("count", ["strategy", "seed", "protocol", "length"], "metric")
    if "bits_per_byte" not in results:
        return
    old = (results["bits_per_byte"] == results["ppl"]).any()  # counted targets, not bytes
    for name in ("table.md", "table.tex", "report.html"):
        assert (report.OLD_BYTES in (path.parent / name).read_text()) == old


def test_a_comparison_of_nothing_but_collapsed_runs_is_reported(tmp_path: Path) -> None:
    runs = []
    for strategy in ("NoPE", "RoPE"):
        directory = write_run(tmp_path / strategy, strategy, 1236, CURVES["RoPE"])
        path = directory / "test" / "extrapolation.json"
        content = json.loads(path.read_text())
        for row in content["rows"]:
            row |= {"nll_sum": None, "bits_per_byte": None, "block_nll": [None] * 12}
        path.write_text(json.dumps(content))
        table = pd.DataFrame({"position": range(2), "window": 64, "targets": 10, "nll_full": 1e5, "nll_windowed": 1e5})
        table.to_csv(directory / "test" / "position_wise.csv", index=False)
        runs.append(Run(strategy, 1236, directory))
    report.write(read(runs), tmp_path / "report", name="x", baseline="NoPE")
    assert "| RoPE | ∞ | ∞ | ∞ | ∞ |" in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_tasks_are_ranked_beyond_the_training_length_of_each(tmp_path: Path) -> None:
    for strategy, copy, reverse in (("NoPE", 0.9, 0.2), ("T5", 0.5, 0.3)):
        for task, last, trained in (("copy", copy, 30), ("reverse", reverse, 20)):
            place = tmp_path / "runs" / task / strategy / "seed-1236"
            write_task_run(place, strategy, 1236, {task: (1.0, 1.0, last, last / 2)})
            config = yaml.safe_load((place / "config.yaml").read_text())
            config["data"]["init_args"] |= {"length": 82, "train_length": trained}
            (place / "config.yaml").write_text(yaml.safe_dump(config))
    report.write(read(locate([tmp_path / "runs"])), tmp_path / "report", name="tasks", baseline="NoPE")
    text = (tmp_path / "report" / "table.md").read_text()
    assert "### Exact match at lengths beyond training, by task" in text
    assert "| NoPE | **0.450** | 0.150 | 0.750 |" in text  # copy at 40 only, reverse at 30 and 40; ranks tie
    assert "| T5 | 0.250 | **0.225** | 0.750 |" in text


def test_position_wise_losses_are_summed_in_bins_and_drawn(tmp_path: Path) -> None:
    positions = np.arange(256)
    for strategy in ("KerpleLog", "ALiBi"):
        directory = write_run(tmp_path / "runs" / strategy, strategy, 1236, CURVES[strategy])
        table = pd.DataFrame({"position": positions, "window": 64, "targets": 10})
        table["nll_full"], table["nll_windowed"] = 30 - positions / 100, 31.0
        table.to_csv(directory / "test" / "position_wise.csv", index=False)
    report.write(read(locate([tmp_path / "runs"])), tmp_path / "report", name="x", baseline="KerpleLog")
    binned = pd.read_csv(tmp_path / "report" / "position_wise.csv").query("strategy == 'ALiBi'")
    assert list(binned["first"]) == list(range(0, 256, 4))
    assert binned["targets"].unique() == [40]
    assert binned["nll_full"].iloc[1] == pytest.approx(4 * 30 - (4 + 5 + 6 + 7) / 100)
    assert binned["ppl_windowed"].iloc[0] == pytest.approx(np.exp(3.1))
    assert "last 64 keys" in (tmp_path / "report" / "position-wise.svg").read_text()


def page_of(runs: list[Run], folder: Path) -> str:
    report.write(read(runs), folder, name="x", baseline="KerpleLog")
    return (folder / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_seeds_that_were_trained_otherwise_are_not_averaged_in_silence(root: Path, tmp_path: Path) -> None:
    page = page_of(locate([root]), tmp_path / "before")
    assert "differ in more" not in page
    assert "everything but the strategy is the same" in page
    runs = locate([root])[:-1]
    changed = write_run(tmp_path / "run", "RoPE", 1237, CURVES["RoPE"])
    config = yaml.safe_load((changed / "config.yaml").read_text())
    config["data"]["init_args"] |= {"batch_size": 16, "seed": 1237}
    (changed / "config.yaml").write_text(yaml.safe_dump(config))
    found = read([*runs, Run("RoPE", 1237, changed)])
    assert "RoPE: data.init_args.batch_size: 8 | 16" in report.mixed(found)
    page = page_of([*runs, Run("RoPE", 1237, changed)], tmp_path / "after")
    assert "RoPE: data.init_args.batch_size: 8 | 16" in page
    assert "what differs beside the strategy is listed below" in page


def test_an_option_that_is_newer_than_some_runs_is_no_difference_at_its_default(root: Path, tmp_path: Path) -> None:
    runs = locate([root])[:-1]
    later = write_run(tmp_path / "run", "RoPE", 1237, CURVES["RoPE"])
    config = yaml.safe_load((later / "config.yaml").read_text())
    for qk_norm, said in ((False, []), (True, ["RoPE: model.qk_norm: not there | True"])):
        config["model"]["qk_norm"] = qk_norm
        (later / "config.yaml").write_text(yaml.safe_dump(config))
        assert report.mixed(read([*runs, Run("RoPE", 1237, later)])) == said


def test_an_option_that_some_runs_lack_and_others_have_as_null_is_no_difference(root: Path, tmp_path: Path) -> None:
    runs = locate([root])[:-1]
    later = write_run(tmp_path / "run", "RoPE", 1237, CURVES["RoPE"])
    config = yaml.safe_load((later / "config.yaml").read_text())
    config["data"]["init_args"]["tokenizer"] = None
    (later / "config.yaml").write_text(yaml.safe_dump(config))
    assert report.mixed(read([*runs, Run("RoPE", 1237, later)])) == []


@pytest.mark.usefixtures("undrawn")
def test_the_report_says_what_was_scored(tmp_path: Path) -> None:
    runs = []
    for seed, sampling in ((1235, "blocks"), (1236, "paper")):
        directory = write_run(tmp_path / str(seed), "KerpleLog", seed, CURVES["KerpleLog"])
        path = directory / "test" / "extrapolation.json"
        content = json.loads(path.read_text())
        content |= {"block": 512, "sampling": sampling, "documents": sampling == "blocks", "precision": "bf16-mixed"}
        content["rows"][0]["skip"] = 448
        path.write_text(json.dumps(content))
        runs.append(Run("KerpleLog", seed, directory))
    page = page_of(runs[:1], tmp_path / "one")
    assert "test split, blocks of 512 targets, inside documents only, the first 448 targets" in page
    assert "computed in bf16-mixed" in page
    assert any("other text at each length" in way for way in report.mixed(read(runs)))


@pytest.mark.usefixtures("undrawn")
def test_runs_scored_on_different_amounts_of_text_are_named(root: Path, tmp_path: Path) -> None:
    assert report.mixed(read(locate([root]))) == []
    runs = [
        Run(strategy, seed, write_run(tmp_path / strategy / f"seed-{seed}", strategy, seed, CURVES[strategy], blocks))
        for strategy, blocks in (("KerpleLog", 12), ("RoPE", 12), ("ALiBi", 3))
        for seed in (1235, 1236)
    ]
    few = "1,536 (ALiBi seed 1235, ALiBi seed 1236)"  # 3 blocks of 512 targets, not 12
    assert report.mixed(read(runs)) == [
        f"full at 64: scored per run: 6,144 | {few}",
        f"windowed64 at 64: scored per run: 6,144 | {few}",
    ]
    assert few in page_of(runs, tmp_path / "report")


def test_corpora_of_different_sizes_are_no_mixture(tmp_path: Path) -> None:
    runs = [
        Run("KerpleLog", 1235, write_run(tmp_path / part, "KerpleLog", 1235, CURVES["KerpleLog"], blocks), part=part)
        for part, blocks in (("code", 12), ("prose", 3))
    ]
    assert report.mixed(read(runs)) == []


@pytest.mark.usefixtures("undrawn")
def test_protocols_of_every_corpus_are_explained(tmp_path: Path) -> None:
    runs = [
        Run("KerpleLog", 1235, write_run(tmp_path / part, "KerpleLog", 1235, CURVES["KerpleLog"]), part=part)
        for part in ("code", "prose")
    ]
    page = page_of(runs, tmp_path / "report")
    for part in ("code", "prose"):
        assert f'<th>{part} full</th><td class="text">non-overlapping segments of the length' in page
        assert f'<th>{part} windowed64</th><td class="text">as full, attention limited' in page
    assert ">task" not in page


@pytest.mark.usefixtures("undrawn")
def test_runs_of_several_precisions_are_named_above_the_table(root: Path, tmp_path: Path) -> None:
    precisions = ["32-true", "32-true", "bf16-mixed"]
    shutil.copytree(root, tmp_path / "runs")
    runs = locate([tmp_path / "runs"])
    for run in runs:
        path = run.directory / "cost.json"
        cost = json.loads(path.read_text())
        cost["environment"]["precision"] = precisions[run.seed % 3] if run.strategy == "RoPE" else "32-true"
        path.write_text(json.dumps(cost))
    (odd,) = (run.seed for run in runs if run.strategy == "RoPE" and run.seed % 3 == 2)
    said = f"precision: 32-true | bf16-mixed (RoPE seed {odd})"

    found = read(runs)
    report.write(found, tmp_path / "report", name="mixed", baseline="KerpleLog")

    assert report.mixed(found) == [said]
    table = (tmp_path / "report" / "table.md").read_text()
    assert table.index(said) < table.index("| KerpleLog")
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.index(said) < page.index("<table")


@pytest.mark.usefixtures("undrawn")
def test_runs_too_short_to_have_a_speed_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run" / "seed-1236", "ALiBi", 1236, CURVES["ALiBi"])
    cost = json.loads((run / "cost.json").read_text())
    (run / "cost.json").write_text(json.dumps(cost | {"tokens_per_second": None}))
    report.write(read(locate([tmp_path / "run"])), tmp_path / "report", name="short", baseline="ALiBi")
    assert "| ALiBi | 8 | 1,310,000 | – | 500 |" in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_tasks_are_averaged_over_the_lengths_that_all_strategies_have(tmp_path: Path) -> None:
    for strategy, beyond in (("NoPE", (0.9, 0.1)), ("Learned", (0.8, None))):
        for task in ("copy", "reverse"):
            place = tmp_path / "runs" / task / strategy / "seed-1236"
            write_task_run(place, strategy, 1236, {task: (1.0, 1.0, beyond[0], beyond[1] or 0.0)})
            if beyond[1] is None:  # it has no positions for longer problems
                path = next((place / "test").glob("*.json"))
                content = json.loads(path.read_text())
                rows = content["rows"] if isinstance(content, dict) else content
                del rows[-1]
                path.write_text(json.dumps(content))
    report.write(read(locate([tmp_path / "runs"])), tmp_path / "report", name="tasks", baseline="NoPE")
    text = (tmp_path / "report" / "table.md").read_text()
    assert "| NoPE | **0.900** | **0.900** | **1.000** |" in text
    assert "| Learned | 0.800 | 0.800 | 0.500 |" in text
    assert "Of copy, reverse only the lengths that all strategies have" in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert "trained to length" in page
    assert "20 tokens" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_callback_that_one_strategy_has_is_a_difference(root: Path, tmp_path: Path) -> None:
    callback = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    saver = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "here", "save_top_k": 1}}
    for run in locate([root]):
        callbacks = [saver, callback] if run.label == "RoPE" else [saver]
        copy = tmp_path / "runs" / run.label / run.directory.name
        shutil.copytree(run.directory, copy)
        config = yaml.safe_load((copy / "config.yaml").read_text())
        (copy / "config.yaml").write_text(yaml.safe_dump(config | {"trainer": {"callbacks": callbacks}}))
    page = page_of(locate([tmp_path / "runs"]), tmp_path / "report")
    assert "everything but the strategy is the same" not in page
    assert "EarlyStopping.init_args.monitor" in page
    assert "ModelCheckpoint.init_args.save_top_k" not in page.split("<h2>")[1]
