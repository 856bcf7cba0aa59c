"""The report of runs with known numbers."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from kerple.base.errors import UserError
from kerple.compare import comparison_report as report
from kerple.compare.charts import DEVIATION, loss_and_gain, metric_charts
from kerple.compare.estimates import estimate
from kerple.compare.figures import add_legend, draw, narrow, styles_of, write_print_figures
from kerple.compare.finished_runs import FinishedRun, Runs, read_runs
from kerple.compare.inconsistencies import inconsistencies
from kerple.compare.measure_tables import analyses
from kerple.compare.statistics import summarise
from kerple.measure import results_table
from tests.compare.runs_on_disk import BYTES_PER_TOKEN, CURVES, reconfigure, write_run, write_runs, write_task_run

SEEDS = (1235, 1236, 1237)


def report_texts(runs: list[FinishedRun], folder: Path, baseline: str = "KerpleLog") -> tuple[str, str]:
    """Write a report, and return its page and its tables."""
    report.write_comparison(read_runs(runs), folder / "report", name="x", baseline=baseline)
    return ((folder / "report" / "report.html").read_text(), (folder / "report" / "table.md").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return read_runs(write_runs(tmp_path_factory.mktemp("runs"), CURVES, SEEDS))


@pytest.fixture(scope="module")
def folder(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report.write_comparison(runs, folder, name="three curves", baseline="KerpleLog", missing=["T5 seed 1235"])
    return folder


def test_results_contain_every_run_length_and_protocol_once(folder: Path) -> None:
    table = pd.read_csv(folder / "results.csv")
    assert len(table) == 3 * 3 * 4 * 2 * 2  # strategies, seeds, lengths, protocols, ppl and bits per byte
    assert set(table["protocol"]) == {"full", "windowed64"}
    values = table.set_index(["strategy", "seed", "metric", "protocol", "length"])["value"]
    assert values["RoPE", 1237, "ppl", "full", 512] == pytest.approx(37.0 * 1.001)
    assert values["RoPE", 1236, "bits_per_byte", "full", 512] == pytest.approx(np.log2(37.0) / BYTES_PER_TOKEN)


def test_the_same_runs_give_the_same_bytes(runs: Runs, folder: Path, tmp_path: Path) -> None:
    report.write_comparison(runs, tmp_path, name="three curves", baseline="KerpleLog")
    for name in ("results.csv", "summary.csv", "costs.csv", "table.md", "ppl-against-length.svg", "kernels.csv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_markdown_table_marks_best_and_significant(folder: Path) -> None:
    lines = (folder / "table.md").read_text().splitlines()
    start = lines.index("### Perplexity, full")
    header, _, *body = lines[start + 2 : start + 7]
    assert header == "|  | 64 (1×) | 128 (2×) | 256 (4×) | 512 (8×) | ratio to KerpleLog at 512 |"
    table = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in body}
    assert table["KerpleLog"] == ["18.50 ± 0.02", *(f"**{v:.2f} ± 0.02**" for v in CURVES["KerpleLog"][1:]), "–"]
    # 18.1 / 17.2 ± 2.776 · √(2/3) · 0.001; the hardness of the blocks is the same on both sides
    assert table["ALiBi"][4] == "1.052 [1.050, 1.055]"
    assert table["RoPE"][0] == "**18.40 ± 0.02†**"  # 0.1 lower at every seed
    assert table["RoPE"][3] == "37.00 ± 0.04†"


def test_the_context_gain_is_a_difference_on_the_same_targets(folder: Path) -> None:
    lines = (folder / "table.md").read_text().splitlines()
    start = lines.index("### Context gain beyond 64 tokens")
    assert lines[start + 2] == "|  | 128 (2×) | 256 (4×) | 512 (8×) |"  # at the training length it is 0
    gain = "**+0.0100 [+0.0100, +0.0100]**"  # blocks differ in their losses, but not in the difference
    assert lines[start + 4 : start + 7] == [f"| {strategy} | {gain} | {gain} | {gain} |" for strategy in CURVES]


class Links(HTMLParser):
    """Targets of the links of a page, whose tags must be balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_other_file_and_describes_the_comparison(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert Links(page).sources == []
    for name in ("ppl-against-length", "ppl-relative-to-KerpleLog"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # protocol, number of targets, version, speed, common option, missing run, differing option
    shown = ("windowed64", "<td>6,144</td>", "2.13.0", "27,236", "batch_size: 8", "T5 seed 1235", "positions.RoPE")
    assert [text for text in shown if text not in page] == []
    found = re.findall('<p class="finding">(.*?)</p>', page)[0]
    for sentence in ("KerpleLog has the lowest perplexity, 17.20", "none is better and ALiBi, RoPE are worse"):
        assert sentence in found
    # differences of 5% and more, and a standard deviation of 0.1% over seeds, which is the same for all strategies
    assert "seeds of each strategy: 2 (ALiBi, RoPE)." in page
    assert "mean correlation of 1.00, over 3 pairs" in page


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ("A1 A2 B1 B2", "× seeds 1, 2"),
        ("A1 B1", "× seed 1"),
        ("A1 A2 A3 B1 B2", "with 2 to 3 of the seeds 1, 2, 3"),
        ("A1 A2 B3 B4", "with 2 of the seeds 1, 2, 3, 4"),
        ("A1 A2 pA1 pA2 B1 B2 pB1", "with 1 to 2 of the seeds 1, 2"),
    ],
)
def test_the_page_says_how_many_seeds_a_strategy_has_in_a_part(runs: str, expected: str) -> None:
    found = [FinishedRun(run[-2], int(run[-1]), Path(run), part=run[:-2]) for run in runs.split()]
    empty = pd.DataFrame()
    runs_with_seeds = Runs(empty, empty, empty, configs={run: {} for run in found})
    assert report.Report("x", "A", runs_with_seeds, empty, [], []).seeds == expected


@pytest.mark.usefixtures("without_figures")
def test_the_page_has_curves_of_the_training_and_the_report_their_table(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, {"KerpleLog": CURVES["KerpleLog"]}, SEEDS[:2])
    for run, offset in zip(runs, (-0.5, 0.5), strict=True):
        for steps in ((1, 2, 3), (3, 4)):  # a process that was stopped after step 3, and one that resumed at step 2
            writer = SummaryWriter(run.folder.parent, filename_suffix=str(steps))
            for step in steps:
                writer.add_scalar("train/loss", 8 - step + offset + 9 * (steps == (1, 2, 3) and step == 3), step)
            writer.add_scalar("val/loss", 5 + offset, steps[-1])
            writer.close()
        # names are ordered by second, host, process and a counter without leading zeros: not always by time
        for file in run.folder.parent.glob("events.out.tfevents.*"):
            file.rename(file.with_name(f"events.out.tfevents.{9 - int(file.name[-2])}"))
    page, text = report_texts(runs, tmp_path)
    assert "training" not in text.lower().replace("training length", "").replace("cost of training", "")
    table = pd.read_csv(tmp_path / "report" / "training.csv").set_index(["seed", "step"])
    assert table.loc[SEEDS[0], "train_loss"].to_dict() == {1: 6.5, 2: 5.5, 3: 4.5, 4: 3.5}
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found
    charts = {chart["title"]: chart["panels"][0]["points"] for chart in json.loads(found[1])["charts"]}
    rows = charts["Training loss"]["KerpleLog"]
    assert [row[:2] for row in rows] == [[1, 7], [2, 6], [3, 5], [4, 4]]
    assert rows[0][2:] == pytest.approx([7 - 0.5**0.5, 7 + 0.5**0.5, "7.000 ± 0.707"])
    assert charts["Training speed"]["KerpleLog"][0][:2] == [26_000 + SEEDS[0], "KerpleLog"]  # of the runs' costs


@pytest.mark.slow
def test_figures_for_print_are_narrow_pdfs_of_the_chosen_strategies(runs: Runs, tmp_path: Path) -> None:
    summary = summarise(runs.results, "KerpleLog", blocks=runs.blocks)
    strategies, full = ["RoPE", "KerpleLog"], summary[summary["protocol"] == "full"]
    for folder, of in (("one", summary), ("two", full)):
        write_print_figures(of, runs, strategies, "KerpleLog", tmp_path / folder)
    names, again = ({path.name for path in (tmp_path / folder).iterdir()} for folder in ("one", "two"))
    assert {"ppl-against-length-full.pdf", "ppl-against-length-windowed64.pdf"} <= names
    assert "ppl-against-length-full.pdf" in again
    for name in names:
        pdf = (tmp_path / "one" / name).read_bytes()
        assert b"/MediaBox [ 0 0 234 169.2 ]" in pdf  # 3.25 inches of 72 points
        assert name not in again or pdf == (tmp_path / "two" / name).read_bytes()
    parts = [full.assign(protocol=f"{part} full") for part in ("C", "C+", "C++")]
    of_parts = replace(runs, training_lengths=defaultdict(lambda: 64))
    write_print_figures(pd.concat([full, *parts]), of_parts, strategies, "KerpleLog", tmp_path / "parts")
    assert len([*(tmp_path / "parts").glob("ppl-against-length-*.pdf")]) == 4
    ppl = summary[summary["metric"] == "ppl"]
    chart, *_ = metric_charts(ppl.assign(std=ppl["mean"] / 2), runs, "KerpleLog")
    figure = draw(chart, styles_of(ppl["strategy"]))
    assert figure.axes[0].get_ylim()[0] < ppl["mean"].min() / 2  # the axis contains the bands
    assert figure.legends[0].get_title().get_text() == DEVIATION
    with pytest.raises(UserError, match=r"figure_strategies: got T5, FIRE without .* KerpleLog, ALiBi, RoPE"):
        report.write_comparison(runs, tmp_path / "none", name="x", baseline="KerpleLog", printed=["T5", "RoPE", "FIRE"])
    assert not [*(tmp_path / "none").iterdir()]  # a wrong name replaces no part of a report


@pytest.mark.parametrize(("strategies", "in_print"), [(12, True), (29, False)])
def test_the_legend_is_inside_the_page_and_leaves_room_for_the_axes(strategies: int, in_print: bool) -> None:
    figure = Figure((6.4, 3.9), layout="constrained")
    ax = figure.subplots()
    for i in range(strategies):
        ax.plot([1, 2], [i, i], label=f"KerpleLog per layer {i}")
    add_legend(figure, "band")
    if in_print:
        narrow(figure)
    figure.draw_without_rendering()
    legend, axes, page = figure.legends[0].get_window_extent(), ax.get_window_extent(), figure.bbox
    assert page.x0 <= legend.x0 < legend.x1 <= page.x1
    assert page.y0 <= legend.y0 < legend.y1 <= page.y1
    assert legend.y1 < axes.y0 if in_print else axes.x1 < legend.x0
    assert min(axes.height, axes.width) > page.width / 3


@pytest.mark.usefixtures("without_figures")
def test_an_analysis_that_the_report_does_not_know_is_a_table_of_means(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, {"KerpleLog": CURVES["RoPE"], "T5": CURVES["RoPE"]}, SEEDS[:2])
    for run in runs:
        first = np.array([0.25, 0.5]) if run.strategy == "KerpleLog" else np.array([0.125, 0.375])
        table = pd.DataFrame({"layer": [0, 1], "blocks": 8, "probability": first + 0.01 * (run.seed - SEEDS[0])})
        table.to_csv(run.folder / "first_token.csv", index=False)
        pd.DataFrame({"distance": range(40), "bias": 0.5}).to_csv(run.folder / "long.csv", index=False)
    page, text = report_texts(runs, tmp_path)
    # the mean of x and x + 0.01 is x + 0.005, their standard deviation 0.01 / √2
    assert "### first_token: probability\n\n|  | layer 0 | layer 1 |\n" in text
    assert "| KerpleLog | 0.255 ± 0.0071 | 0.505 ± 0.0071 |" in text
    assert "| long | 160 | long.csv |" in text
    assert "<td>0.505 ± 0.0071</td>" in page.partition("<h2>Details</h2>")[2]
    table = pd.read_csv(tmp_path / "report" / "long.csv")
    assert list(table.columns) == ["strategy", "seed", "distance", "bias"]


def test_an_analysis_with_one_value_per_run_is_a_table_of_means_for_any_number_of_runs() -> None:
    table = pd.DataFrame({"strategy": ["T5"] * 13, "seed": range(13), "layer": 0, "rank": [0.5] * 13})
    assert [means.title for means in analyses({"ranks": table})] == ["ranks"]


@pytest.mark.usefixtures("without_figures")
def test_tasks_are_ranked_beyond_the_training_length(tmp_path: Path) -> None:
    runs = []
    for strategy, copy, reverse in (("NoPE", 0.9, 0.2), ("T5", 0.5, 0.3), ("Sinusoidal", 0.0, 0.2)):
        accuracies = {"copy": (1.0, 1.0, copy, copy), "reverse": (1.0, 1.0, reverse, reverse)}
        accuracies["copy generated"] = accuracies["copy"]  # is no third task
        runs.append(FinishedRun(strategy, 1236, write_task_run(tmp_path / strategy, strategy, 1236, accuracies)))
    _, text = report_texts(runs, tmp_path, "NoPE")
    assert "### Exact match at lengths beyond 20, by task" in text
    assert "| NoPE | **0.900** | 0.200 | 0.700 |" in text  # ranks 1 and 2.5, which is a tie: (1 + 1/2.5) / 2
    assert "| T5 | 0.500 | **0.300** | **0.750** |" in text  # (1/2 + 1) / 2
    assert "| Sinusoidal | 0.000 | 0.200 | 0.367 |" in text  # (1/3 + 1/2.5) / 2


@pytest.mark.usefixtures("without_figures")
def test_without_a_task_of_a_strategy_there_are_no_ranks_and_only_common_lengths_count(tmp_path: Path) -> None:
    """T5 lacks a task. Learned has no positions for the longest problems of the other task."""
    accuracies = {"NoPE": {"copy": (1.0, 1.0, 0.9, 0.1), "reverse": (1.0, 1.0, 0.2, 0.2)}}
    accuracies |= {"T5": {"copy": (1.0, 1.0, 0.5, 0.1)}, "Learned": {"copy": (1.0, 1.0, 0.8)}}
    runs = []
    for strategy, task, values in ((s, *of_task) for s, of_tasks in accuracies.items() for of_task in of_tasks.items()):
        runs.append(
            FinishedRun(strategy, 1236, write_task_run(tmp_path / task / strategy, strategy, 1236, {task: values}))
        )
        reconfigure(tmp_path / task / strategy, data={"length": 82, "train_length": 20 if task == "copy" else 30})
    _, text = report_texts(runs, tmp_path, "NoPE")
    for row in ("| NoPE | **0.900** | 0.200 |", "| T5 | 0.500 | – |", "| Learned | 0.800 | – |"):
        assert row in text


@pytest.mark.slow
def test_a_comparison_of_only_collapsed_runs_has_a_report(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, dict.fromkeys(("NoPE", "RoPE"), (1e308,) * 4), SEEDS[:2])
    for run in runs:
        table, _ = results_table.read(run.folder)
        results_table.write_table(run.folder, table.assign(sum=table["sum"] * 1e3))
    page, text = report_texts(runs, tmp_path, "NoPE")
    assert "∞" in text
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data
    json.loads(data[1], parse_constant=pytest.fail)  # strict JSON


@pytest.mark.slow
def test_labels_are_escaped_in_every_markup_language(hostile_report: Path) -> None:
    page, folder = hostile_report.read_text(), hostile_report.parent
    Links(page)
    assert not re.findall(r"<b>[|&]|<i>", page)
    assert "&lt;b&gt;|$&amp;" in page

    tex = (folder / "table.tex").read_text()
    assert r"\_low \& 50\% &" in tex
    assert r"\$\textbackslash{}nosuch\$ &" in tex
    rows = [line for line in tex.splitlines() if line.endswith(r"\\") and line.startswith(r"$<$b$>$$|$\$\& &")]
    assert rows  # perplexities have one column more, the ratio to the baseline
    for line in (line for line in rows if "pm" in line and "-123" not in line):  # -123: the analysis of one column
        assert len(re.findall(r"(?<!\\)&", line)) == len(CURVES["RoPE"]) + ("[" in line)

    rows = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith(r"| &lt;b>\|$& |")]
    assert rows
    for line in (line for line in rows if "±" in line and "-123" not in line):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(CURVES["RoPE"]) + 2 + ("[" in line)
    assert " _low" in (folder / "ppl-against-length.svg").read_text()  # in the legend
    assert (folder / "ppl-relative-to-base_line.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_other_differences_than_strategy_and_seed_are_named_above_the_tables(tmp_path: Path) -> None:
    callback = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    saver = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "here", "save_top_k": 1}}
    runs = write_runs(tmp_path, {strategy: CURVES[strategy] for strategy in ("KerpleLog", "RoPE")}, SEEDS[:2])
    for run in runs:
        reconfigure(run.folder.parent, trainer={"callbacks": [saver]})
    other = runs[-1].folder.parent
    # folders may differ
    reconfigure(other, data={"tokenizer": None, "directory": "elsewhere"}, experiment="second", logs="elsewhere")
    assert inconsistencies(read_runs(runs)) == []
    reconfigure(other, data={"batch_size": 16})
    difference = "RoPE: data.init_args.batch_size: 16 | 8"
    assert inconsistencies(read_runs(runs)) == [difference]
    page, text = report_texts(runs, tmp_path)
    assert text.index(difference) < text.index("| KerpleLog")
    assert page.index(difference) < page.index("<table")
    reconfigure(other, trainer={"callbacks": [saver, callback]})
    page, _ = report_texts(runs, tmp_path)
    assert "EarlyStopping.init_args.monitor" in page
    assert "ModelCheckpoint.init_args.save_top_k" not in page.split("<h2>")[1]


@pytest.mark.usefixtures("without_figures")
def test_tables_of_far_context_are_differences_of_the_same_runs_over_groups_of_documents(tmp_path: Path) -> None:
    rng, runs, losses = np.random.default_rng(0), [], {}
    documents, groups = [5, 5, 7, 9, 9, 9, 11], ["a", "b", "a", "c"]  # document of each block, group of each document
    for seed in SEEDS:
        test = write_run(tmp_path / str(seed), "KerpleLog", seed, CURVES["KerpleLog"])
        losses[seed] = {name: rng.normal(mean, 0.1, 7) for name, mean in (("own", 4), ("none", 4.5), ("foreign", 4.2))}
        rows = [
            results_table.Row("ppl", f"far_{name}8", 256, None, block, 8 * loss, 8)
            for name, of_blocks in losses[seed].items()
            for block, loss in enumerate(of_blocks)
        ]
        about = {"split": "test", "block_document": documents, "groups": groups}
        results_table.add_to_results(test, "far_context", rows, about)
        runs.append(FinishedRun("KerpleLog", seed, test))
    page, text = report_texts(runs, tmp_path)
    assert "Perplexity, far_" not in text
    assert "foreign: it reads L - T tokens of another document" in page
    (chart,) = loss_and_gain(read_runs(runs).results)
    points = chart.panels[0].points[["x", "y"]]
    gains = [(losses[seed]["none"] - losses[seed]["own"]).mean() for seed in SEEDS]
    loss = [np.log(CURVES["KerpleLog"][2] * (1 + (seed - 1236) / 1000)) for seed in SEEDS]
    np.testing.assert_allclose(points, np.stack([loss, gains], 1), rtol=1e-12)
    group_of = np.array([groups[sorted(set(documents)).index(d)] for d in documents])
    contexts = {"gain": ("none", "own"), "content": ("foreign", "own"), "disturbance": ("foreign", "none")}
    for name, (first, second) in contexts.items():
        row = text.split(f"### Far context: {name}\n")[1].split("\n")[3]
        differences = np.array([losses[seed][first] - losses[seed][second] for seed in SEEDS])
        sums = np.stack([differences[:, group_of == g].sum(1) for g in "abc"], 1) * 8
        low, high = estimate((sums, np.tile([8.0 * (group_of == g).sum() for g in "abc"], (3, 1)))).interval()
        assert f"{differences.mean():+.4f} [{low:+.4f}, {high:+.4f}]" in row


@pytest.mark.usefixtures("without_figures")
def test_the_report_names_differences_in_text_precision_and_number_of_targets(tmp_path: Path) -> None:
    runs = []
    for seed, sampling, blocks, precision in ((1235, "blocks", 12, "32-true"), (1236, "paper", 3, "bf16-mixed")):
        about = {
            "sampling": sampling,
            "seed": 7,
            "precision": precision,
            "documents": 4,
            "overlapping": 2,
            "text": f"{seed:x}" * 9,
        }
        cost = {"tokens_per_second": None, "environment": {"precision": precision}}
        test = write_run(tmp_path / str(seed), "KerpleLog", seed, CURVES["KerpleLog"], blocks, about, **cost)
        runs.append(FinishedRun("KerpleLog", seed, test))
    page, text = report_texts(runs[:1], tmp_path)
    assert "inside 4 documents (2 other documents of the split left out because of overlap with the training" in page
    assert "| KerpleLog | 8 | 1,310,000 | – | 500 |" in text  # a run of a few steps has no speed
    read = read_runs(runs)
    for environment, data, devices in zip(read.environments.values(), "ab", "18", strict=True):
        environment |= {"data": data, "devices": devices}
    differences = "; ".join(inconsistencies(read))
    assert "data: a | b (KerpleLog seed 1236)" in differences
    assert "devices: 1 | 8 (KerpleLog seed 1236)" in differences
    assert "shuffled segments (seed 7), other text at each length" in differences
    texts = "sha256 of the test text: 4d34d34d34d3 | 4d44d44d44d4 (KerpleLog seed 1236)"
    assert f"; full: {texts}" in differences
    assert differences.count(texts) == 1  # although the protocol windowed64 has the same text
    assert "precision: 32-true | bf16-mixed (KerpleLog seed 1236)" in differences
    assert "full at 64: number of scored targets: 1,536 | 6,144 (KerpleLog seed 1235)" in differences
    old = FinishedRun("KerpleLog", 1237, write_run(tmp_path / "old", "KerpleLog", 1237, CURVES["KerpleLog"]))
    assert "sha256" not in "; ".join(inconsistencies(read_runs([runs[0], old])))  # an old record has no digest
    blocks_of = {"code": 12, "prose": 3}
    tests = {part: write_run(tmp_path / part, "A", 1236, CURVES["ALiBi"], n) for part, n in blocks_of.items()}
    parts = [FinishedRun("A", 1236, test, part) for part, test in tests.items()]
    assert inconsistencies(read_runs(parts)) == []  # parts may have corpora of different sizes


@pytest.mark.parametrize(
    ("protocol", "option", "phrase"),
    [
        ("keep_first2", "window", "window of {} keys"),
        ("gap8", "context", "context of {} tokens"),
        ("no_context8", "context", "context of {} tokens"),
        ("far_none4", "training_length", "near text of {} tokens"),
    ],
)
def test_other_options_of_a_protocol_with_the_same_name_are_a_difference(protocol, option, phrase, tmp_path) -> None:
    runs = []
    for seed, value in zip(SEEDS, (4, 12), strict=False):
        test = write_run(tmp_path / str(seed), "KerpleLog", seed, CURVES["KerpleLog"])
        row = results_table.Row("ppl", protocol, 64, None, None, 9.0, 8)
        results_table.add_to_results(test, "more", [row], {"split": "test", option: value})
        runs.append(FinishedRun("KerpleLog", seed, test))
    texts = (f"test split, {phrase.format(value)}" for value in (4, 12))
    assert f"{protocol}: {' | '.join(texts)}" in inconsistencies(read_runs(runs))
