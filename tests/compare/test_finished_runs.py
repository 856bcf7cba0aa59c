"""Tables of finished runs, records, and tables in Markdown and LaTeX."""

import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile

import numpy as np
import pandas as pd
import pytest
import zstandard

from kerple.compare import committed_records, comparison_report
from kerple.compare.finished_runs import FinishedRun, read_runs
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import PACKED, find_runs, record_folders, recorded_runs
from kerple.compare.table_markup import Cell, Table
from kerple.compare.tables import cost_table
from kerple.measure import results_table
from kerple.measure.results_table import Row
from tests.compare.runs_on_disk import CURVES, LENGTHS, reconfigure, write_run, write_task_run

CURVE = CURVES["KerpleLog"]


@pytest.mark.parametrize("part", ["", "code"])
def test_sums_are_by_document_or_by_group_of_documents(part: str, tmp_path: Path) -> None:
    test = write_run(tmp_path / "run", "ALiBi", 1236, CURVE)
    rows = [Row("ppl", "last8", 128, None, block, float(block), 512) for block in range(12)]
    rows.append(Row("ppl", "last8", 128, None, 12, 0.0, 0))  # a block that a limited test did not read
    results_table.add_to_results(test, "more", rows, {"block_document": [3, 3, 3, 5, 5, 5, 5, 8, 9, 9, 9, 9, 9]})
    rows = [Row("ppl", "last9", 128, None, block, float(block), 512) for block in range(5)]
    about = {"block_document": [3, 3, 5, 8, 9], "groups": ["attrs", "flask", "attrs", "click"]}  # of the documents
    results_table.add_to_results(test, "most", rows, about)
    read = read_runs([FinishedRun("ALiBi", 1236, test, part)]).blocks
    blocks = dict(iter(read.groupby(read["protocol"].str.removeprefix(f"{part} "))))
    assert blocks["last8"]["sum"].tolist() == [0 + 1 + 2, 3 + 4 + 5 + 6, 7, 8 + 9 + 10 + 11]
    assert blocks["last8"]["count"].tolist() == [512 * n for n in (3, 4, 1, 4)]
    assert blocks["last9"]["block"].tolist() == ["attrs", "flask", "click"]
    assert blocks["last9"]["sum"].tolist() == [0 + 1 + 3, 2, 4]
    assert blocks["last9"]["count"].tolist() == [512 * n for n in (3, 1, 1)]


def test_a_collapsed_run_has_an_infinite_perplexity_and_losses_by_position_are_left_out(tmp_path: Path) -> None:
    test = write_run(tmp_path / "run", "ALiBi", 1236, CURVE)
    rows = [Row("ppl", "last8", 64, None, 0, 1e6, 8), Row("ppl", "pos", 64, 1, None, 9.0, 8)]
    results_table.add_to_results(test, "more", rows, {})
    perplexities = read_runs([FinishedRun("ALiBi", 1236, test)]).results.query("metric == 'ppl'")
    values = perplexities.set_index(["protocol", "length"])["value"]
    assert values["last8", 64] == np.inf
    assert "pos" not in values.index
    assert values["full", 64] == pytest.approx(CURVE[0])


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("rows", [[], [Row("ppl", "per_position", 64, 1, None, 9.0, 8)]])
def test_an_evaluation_with_groups_but_without_blocks_is_reported(rows: list[Row], tmp_path: Path) -> None:
    test = write_run(tmp_path / "run", "ALiBi", 1236, CURVE)
    groups = {"block_document": [3, 5], "groups": ["attrs", "flask"], "documents": True}
    results_table.add_to_results(test, "far_context", rows, groups)
    scored = [Row("ppl", "last8", 64, None, block, 9.0, 8) for block in (0, 1)]
    results_table.add_to_results(test, "last", scored, groups)
    reconfigure(test.parent, trainer={"precision": "32-true"})
    committed_records.complete(PlannedRun("ALiBi", 1236, "", test.parent, test, [], config={}, test_config={}))
    runs = read_runs([FinishedRun("ALiBi", 1236, test)])
    assert set(runs.blocks["protocol"]) == {"full", "windowed64", "last8"}
    assert set(runs.blocks["block"][runs.blocks["protocol"] == "last8"]) == {"attrs", "flask"}
    assert comparison_report.write_comparison(runs, tmp_path / "report", name="x", baseline="ALiBi").is_file()


@pytest.mark.usefixtures("without_figures")
def test_a_test_without_configuration_and_cost_has_a_report(tmp_path: Path) -> None:
    test = write_run(tmp_path / "mine", "ALiBi", 1235, CURVE)
    for name in ("config.yaml", "cost.json"):
        (test.parent / name).unlink()
    runs = read_runs([FinishedRun("mine", 0, test)])
    assert comparison_report.write_comparison(runs, tmp_path / "report", name="x", baseline="mine").is_file()


def test_the_newest_complete_test_of_a_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = write_run(tmp_path / "ALiBi" / "seed-1235", "ALiBi", 1235, CURVE)
    for version in ("v9", "v10", "old", "v11"):
        shutil.copytree(test, test.with_name(f"test_{version}"))
    test.with_name("test_v11").joinpath(results_table.ABOUT).unlink()  # of a test that was stopped early
    newest = test.with_name("test_v10")
    assert find_runs([tmp_path]) == [FinishedRun("ALiBi", 1235, newest)]
    assert f"{newest}: the newest of 3 tests" in capsys.readouterr().out
    assert find_runs([tmp_path], "test_v9") == [FinishedRun("ALiBi", 1235, test.with_name("test_v9"))]
    results_table.add_to_results(test.with_name("test_v9"), "needle", [Row("niah", "a", 8, None, 0, 1, 1)], {})
    with pytest.raises(ValueError, match="test_v10, which lacks the measurement needle of test_v9; test the run again"):
        find_runs([tmp_path])


def test_two_runs_with_the_same_label_and_seed_are_an_error(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name, "KerpleLog", 1235, CURVE) for name in ("here", "there"))
    expected = rf"{re.escape(str(one))}, {re.escape(str(other))}: .*KerpleLog seed 1235.*leave out a folder"
    with pytest.raises(ValueError, match=expected):
        read_runs(FinishedRun("KerpleLog", 1235, folder) for folder in (one, other))


def test_a_protocol_has_its_part_as_prefix_only_if_several_parts_have_it(tmp_path: Path) -> None:
    tasks = {"short": {"copy": (1.0,) * 4}, "long": {"copy": (1.0,) * 4, "reverse": (0.5,) * 4}}
    runs = [
        FinishedRun("NoPE", 1236, write_task_run(tmp_path / part, "NoPE", 1236, of), part) for part, of in tasks.items()
    ]
    assert list(dict.fromkeys(read_runs(runs).results["protocol"])) == ["short copy", "long copy", "reverse"]


# columns of results, and values that are refused in them
CELLS = [("count", 0), ("sum", None), ("length", "x"), ("count", 1.5), ("sum", -1), ("sum", -math.inf)]
CELLS += [("block", value) for value in (-1, 0.5, "x", 0)]  # the last has each row twelve times


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test/results.json", '{"rows": ['),
        ("test/results.csv.gz", "metric"),
        ("test/kernels.csv", ""),
        ("test/summary.csv", "a,b\n1,2\n"),  # the name of a table of the report
        *(("test/mine.csv", f"{column},b\n1,2\n") for column in ("strategy", "seed", "part")),  # columns of the report
        ("config.yaml", "[]"),
        ("cost.json", "[]"),
        ("test/results.json", "[]"),
        *(("test/results.csv.gz", {column: value}) for column, value in CELLS),
        ("test/results.csv.gz", {"metric": "exact_match", "sum": 513}),  # more correct answers than answers
        *(("cost.json", f'{{"parameters": {value}}}') for value in ("-1", "NaN", '"a"')),
        ("cost.json", '{"environment": []}'),
        *(("test/results.json", entries) for entries in ({"groups": ["a"]}, {"groups": "a"}, {"protocols": "full"})),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, content: str | dict[str, Any]) -> None:
    test = write_run(tmp_path / "run", "RoPE", 1236, CURVE)
    path, (table, about) = test.parent / name, results_table.read(test)
    if isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".json":
        about["evaluations"]["extrapolation"] |= content
        results_table.write_about(test, about)
    else:
        results_table.write_compressed(path, table.astype(object).assign(**content))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_runs([FinishedRun("RoPE", 1236, test)])


def test_a_record_gives_the_results_of_the_run_and_its_tables_of_analyses_are_small(tmp_path: Path) -> None:
    test = write_run(tmp_path / "seed-1236", "ALiBi", 1236, CURVE)
    rows = "".join(f"0,{distance},{-0.1 * distance:.17g}\n" for distance in range(2048))
    (test / "kernels.csv").write_text(f"head,distance,bias\n{rows}")
    for recall in (0.25, 0.5):
        (test / f"recall_{recall}.csv").write_text(f"a\n{recall}\n")
    (test / "huge.csv").write_text("a,b\n" + "1,0.5\n" * (committed_records.MOST_ROWS + 1))
    (tmp_path / "seed-1236" / "config.yaml").write_text("trainer: {precision: bf16-mixed}\nseed_everything: 1236")
    config = {"seed_everything": 1236, "trainer.precision": "auto", "trainer.gradient_clip_val": float("inf")}
    config["trainer.profiler"] = None  # kept, so that the run differs from one with another value
    job = PlannedRun("ALiBi", 1236, "", test.parent, test, [], config=config, test_config=config, data="sum")
    committed_records.complete(job)
    about = json.loads((test / results_table.ABOUT).read_text(), parse_constant=pytest.fail)  # strict JSON
    chosen = config | {"trainer.precision": "bf16-mixed", "trainer.gradient_clip_val": "Infinity"}
    assert about["run"]["config"] == chosen  # the precision of the run instead of auto
    assert committed_records.finished(job)
    assert not committed_records.finished(replace(job, data="another"))
    report = tmp_path / "report"
    (report / "runs/ALiBi/seed-1236").mkdir(parents=True)
    (report / "runs/ALiBi/seed-1236/earlier.csv.gz").touch()
    committed_records.write_record(job, report, record_folders(report))
    (record,) = recorded_runs(report)
    ours, again = (read_runs([run]) for run in (replace(record, folder=test), record))
    for name in ("results", "blocks", "costs"):
        assert getattr(again, name).equals(getattr(ours, name))
    assert again.configs.popitem()[1] == ours.configs.popitem()[1]
    assert list(again.analyses) == ["kernels", "recall_0.25", "recall_0.5"]
    assert [again.analyses[f"recall_{recall}"]["a"].item() for recall in (0.25, 0.5)] == [0.25, 0.5]
    kept = again.analyses["kernels"]
    assert len(kept) < 100
    assert kept.merge(ours.analyses["kernels"]).equals(kept)
    assert set(ours.results["length"]) == set(LENGTHS)


def test_single_records_replace_those_in_the_archive_and_the_archive_is_deterministic(tmp_path: Path) -> None:
    packed = []
    for name, order in (("one", (1236, 1237, 1236)), ("two", (1237, 1236))):
        for step, seed in enumerate(order):
            folder = tmp_path / name / f"runs/part/ALiBi/seed-{seed}"
            write_run(folder.with_name("run") / f"{seed}", "ALiBi", seed, CURVE).rename(folder)
            shutil.rmtree(folder.with_name("run"))
            if (step, seed) == (0, 1236):
                results_table.write_compressed(folder / "earlier.csv.gz", pd.DataFrame({"a": [1]}))
            committed_records.pack(tmp_path / name)
            assert not (tmp_path / name / "runs").exists()
        packed.append((tmp_path / name / PACKED).read_bytes())
        recorded = [(run.part, run.strategy, run.seed) for run in recorded_runs(tmp_path / name)]
        assert recorded == [("part", "ALiBi", 1236), ("part", "ALiBi", 1237)]
    assert packed[0] == packed[1]


def test_two_commands_may_write_one_record_at_once(tmp_path: Path) -> None:
    test = write_run(tmp_path / "seed-1236", "ALiBi", 1236, CURVE)
    run = PlannedRun("ALiBi", 1236, "", test.parent, test, [], test_config={}, data="sum")
    files = {"results.csv.gz", "kernels.csv.gz", results_table.ABOUT}
    for number in range(20):
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(committed_records.write_record, run, tmp_path / str(number), []) for _ in "12"]:
                done.result()
        assert {path.name for path in run.record(tmp_path / f"{number}/runs").iterdir()} == files


def test_two_commands_may_pack_the_records_of_one_report_at_once(tmp_path: Path) -> None:
    for number, seed in enumerate(range(1236, 1240), start=1):
        folder = tmp_path / f"runs/ALiBi/seed-{seed}"
        write_run(folder.with_name("run") / f"{seed}", "ALiBi", seed, CURVE).rename(folder)
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(committed_records.pack, tmp_path) for _ in range(4)]:
                done.result()
        assert [run.seed for run in recorded_runs(tmp_path)] == [*range(1236, 1236 + number)]


def test_an_archive_writes_nothing_outside_its_folder_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    with ZipFile(tmp_path / "archive", "w") as archive:
        for up in ("../" * 20, ""):
            archive.writestr(f"{up}{outside}", "evil")
    content = (tmp_path / "archive").read_bytes()
    (tmp_path / PACKED).write_bytes(zstandard.compress(content))
    (folder,) = record_folders(tmp_path)[1:]
    assert {path.name for path in folder.rglob("outside")} == {"outside"}
    assert not outside.exists()
    with ZipFile(tmp_path / "lzma", "w", ZIP_LZMA) as archive:
        archive.writestr("a", "evil")
    header, listed = content.rindex(b"PK\x03\x04"), content.rindex(b"PK\x01\x02")
    encrypted, unknown = (bytearray(content) for _ in range(2))
    encrypted[header + 6] = encrypted[listed + 8] = 1
    unknown[header + 8] = unknown[listed + 10] = 99  # a method of compression
    lzma = bytearray((tmp_path / "lzma").read_bytes())
    lzma[35:45] = b"\xff" * 10
    contents = map(zstandard.compress, (content[:-30], bytes(encrypted), bytes(unknown), bytes(lzma)))
    for damaged in (zstandard.compress(content)[:-3], *contents):
        (tmp_path / PACKED).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{PACKED}: damaged"):
            recorded_runs(tmp_path)


def test_markdown_escapes_html_tags() -> None:
    text = Table("full<img src=x>\n<b>", pd.DataFrame(), "p < 0.05 of <i>x</i>").markdown()
    assert "### full&lt;img src=x> &lt;b>\n" in text
    assert "p < 0.05 of &lt;i>x&lt;/i>\n" in text


def test_latex_has_columns_that_do_not_fit_on_a_page_in_tables_below() -> None:
    lengths = range(1, 14)
    cells = [[Cell(f"{row}.{length:02d} ± 0.10†", bold=length == 3) for length in lengths] for row in range(2)]
    body = pd.DataFrame(cells, index=["NoPE", "a_b & 50% <x> ~^\\"], columns=[f"{length} (1×)" for length in lengths])
    latex = Table("Exact match, 100%", body, "best < all").latex()
    parts = re.findall(r"\\toprule\n(.*?)\\bottomrule", latex, re.DOTALL)
    assert [len(part.splitlines()[0].split(" & ")) - 1 for part in parts] == [5, 4, 4]
    for row, name in enumerate(("NoPE", r"a\_b")):
        lines = [line for part in parts for line in part.splitlines() if line.startswith(name)]
        cells = re.findall(r"(\d)\.(\d\d) \$\\pm\$", "".join(lines))
        assert cells == [(str(row), f"{length:02d}") for length in lengths]
    assert latex.count(r"\caption") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_a_table_of_many_lengths_or_tasks_has_at_most_twelve_columns(tmp_path: Path) -> None:
    curve, lengths = tuple(np.linspace(20, 30, 20)), tuple(64 * n for n in range(1, 21))
    tasks = {f"task {i:02d}": (i / 20,) * 4 for i in range(20)}
    folders = [(strategy, tmp_path / strategy, tmp_path / "tasks" / strategy) for strategy in ("KerpleLog", "ALiBi")]
    of_text = [FinishedRun(s, 1236, write_run(folder, s, 1236, curve, lengths=lengths)) for s, folder, _ in folders]
    of_tasks = [FinishedRun(s, 1236, write_task_run(folder, s, 1236, tasks)) for s, _, folder in folders]
    for runs, row in ((of_text, "1280 (20×)"), (of_tasks, "| task 19 | 0.950 | 0.950 |")):
        comparison_report.write_comparison(read_runs(runs), tmp_path / "report", name="x", baseline="ALiBi")
        text = (tmp_path / "report" / "table.md").read_text()
        assert max(line.count(" | ") for line in text.splitlines() if line.startswith("| ---")) <= 13
        assert row in text


def test_costs_are_averaged_over_seeds_and_different_numbers_of_parameters_are_a_span(tmp_path: Path) -> None:
    runs = []
    parts, strategies, seeds = {"copy": 8, "reverse": 16}, ("NoPE", "KerpleLog"), (1235, 1237)
    for i, (part, strategy, seed) in enumerate(product(parts, strategies, seeds)):
        parameters = parts[part] + (seed == 1237 and strategy == "KerpleLog")
        test = write_run(tmp_path / str(i), strategy, seed, CURVE, position_parameters=parameters)
        runs.append(FinishedRun(strategy, seed, test, part))
    body = cost_table(read_runs(sorted(runs, key=lambda run: run.strategy, reverse=True)).costs).body
    assert list(body.index) == ["copy NoPE", "copy KerpleLog", "reverse NoPE", "reverse KerpleLog"]
    assert [cell.text for cell in body["position parameters"]] == ["8", "8–9", "16", "16–17"]
    assert {cell.text for cell in body["tokens per second"]} == {"27,236"}  # 26,000 + the mean of 1235 and 1237
    incomplete = cost_table(pd.DataFrame({"strategy": ["a"], "seed": [1], "steps": [5]})).body
    assert {cell.text for cell in incomplete.iloc[0]} == {"–"}
    shared = cost_table(read_runs(runs).costs.assign(parallel=2))  # two runs at a time on the machine
    assert "tokens per second" not in shared.body
