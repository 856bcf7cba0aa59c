"""What is read from the directories of runs, and what is wrong with them."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kerple.compare.collect import Run, locate, read
from kerple.compare.files import results_in

from tests.compare.runs_on_disk import CURVES, LENGTHS, write_run, write_task_run


def test_distances_are_thinned_but_keep_both_ends(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "ALiBi", 1236, CURVES["ALiBi"])
    distances = np.arange(2048)
    pd.DataFrame({"head": 0, "distance": distances, "bias": -distances}).to_csv(directory / "test" / "kernels.csv")
    kept = read([Run("ALiBi", 1236, directory)]).analyses["kernels"]["distance"]
    assert {0, 1, 2, 4, 64, 1024, 2047} <= set(kept)
    assert len(kept) < 50


def test_positions_are_binned_and_keep_their_sums(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    path = directory / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    content["by_position"] = [{"length": 256, "nll_sum": list(range(256)), "targets": [2] * 256}]
    content["rows"].append({"protocol": "per_position", "length": 256, "nll_sum": 32640, "targets": 512})
    path.write_text(json.dumps(content))
    runs = read([Run("RoPE", 1236, directory)])
    table = runs.analyses["by_position"]
    assert list(table["first"]) == list(range(0, 256, 4))
    assert (table["sum"].sum(), table["count"].sum()) == (sum(range(256)), 512)
    assert table["ppl"].iloc[1] == pytest.approx(np.exp((4 + 5 + 6 + 7) / 8))
    assert "per_position" not in set(runs.results["protocol"])


def test_an_infinite_loss_is_infinite_and_not_an_error(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "Sinusoidal", 1236, CURVES["RoPE"])
    path = directory / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    content["rows"][0] |= {"nll_sum": None, "ppl": None, "bits_per_byte": None, "block_nll": [None] * 12}
    path.write_text(json.dumps(content))
    runs = read([Run("Sinusoidal", 1236, directory)])
    assert runs.results["value"].iloc[0] == np.inf


def test_blocks_of_one_document_are_one_piece_of_text(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "ALiBi", 1236, CURVES["ALiBi"])
    path = directory / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    content["block_document"] = [3, 3, 3, 5, 5, 5, 5, 8, 9, 9, 9, 9]
    path.write_text(json.dumps(content))
    blocks = read([Run("ALiBi", 1236, directory)]).blocks
    found = blocks[(blocks["protocol"] == "full") & (blocks["length"] == 128)]
    nll = next(r for r in content["rows"] if r["protocol"] == "full" and r["length"] == 128)["block_nll"]
    assert found["sum"].tolist() == pytest.approx([sum(nll[:3]), sum(nll[3:7]), nll[7], sum(nll[8:])])
    assert found["count"].tolist() == [512 * n for n in (3, 4, 1, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("nll_sum"), "expected nll_sum and targets"),
        (lambda row: row["block_nll"].pop(), r"block_nll \(11 blocks\) does not add up"),
        (lambda row: row.update(block_document=[0] * 11), "block_document: got 11 of them, expected 12"),
        (lambda row: row.update(block_document=[[0]] * 12), "block_document: got what is no list of numbers"),
        (lambda row: row.update(block_document=[True] * 12), "block_document: got what is no list of numbers"),
        (lambda row: row.update(block_document=7, block_nll=None), "block_document: got what is no list of numbers"),
        (lambda row: row.update(targets=0, nll_sum=0.0, block_nll=[0.0] * 12), "got 0 targets"),
    ],
)
def test_files_that_contradict_themselves_are_named(tmp_path: Path, change, message: str) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    path = directory / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    change(content["rows"][0])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, full at {LENGTHS[0]}.*{message}"):
        read([Run("RoPE", 1236, directory)])


def test_tests_with_documents_and_without_do_not_belong_together(tmp_path: Path) -> None:
    seeds = (1236, 1237)
    runs = [Run("ALiBi", seed, write_run(tmp_path / str(seed), "ALiBi", seed, CURVES["ALiBi"])) for seed in seeds]
    for run in runs:
        path = run.directory / "test" / "extrapolation.json"
        content = json.loads(path.read_text()) | {"documents": True}
        path.write_text(json.dumps(content | ({"block_document": [0] * 12} if run.seed == 1236 else {})))
    with pytest.raises(ValueError, match=r"1237/test/extrapolation\.json does not say which blocks"):
        read(runs)


def test_runs_that_are_not_there_or_not_tested_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got .*, without a config\.yaml"):
        locate([tmp_path])
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    (directory / "test" / "extrapolation.json").unlink()
    with pytest.raises(ValueError, match="test the run first"):
        read(locate([tmp_path]))


def test_a_run_that_was_tested_in_several_ways_is_one_run(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    for name in ("test", "sliding", "test_v1"):  # each test writes the configuration it had
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "config.yaml").write_text((directory / "config.yaml").read_text())
    assert locate([tmp_path]) == [Run("RoPE", 1236, directory)]


def test_strategies_of_one_class_are_called_what_their_folders_are(tmp_path: Path) -> None:
    for label in ("KerpleLog", "KerpleLog per layer"):
        write_run(tmp_path / label / "seed-1235", "KerpleLog", 1235, CURVES["KerpleLog"])
    write_run(tmp_path / "KerpleLog" / "seed-1236_v1", "KerpleLog", 1236, CURVES["KerpleLog"])
    write_run(tmp_path / "penalty" / "seed-1235", "ALiBi", 1235, CURVES["ALiBi"])
    assert [(run.strategy, run.seed) for run in locate([tmp_path])] == [
        ("KerpleLog", 1235),
        ("KerpleLog", 1236),
        ("KerpleLog per layer", 1235),
        ("ALiBi", 1235),  # nothing to tell it from: its class, wherever it lies
    ]
    results = read(locate([tmp_path])).results
    assert not results.duplicated(["strategy", "seed", "metric", "protocol", "length"]).any()


@pytest.mark.parametrize("names", [("here", "there"), ("here/KerpleLog/seed-1235", "there/KerpleLog/seed-1235")])
def test_the_same_results_of_two_runs_are_named_with_what_to_do(tmp_path: Path, names: tuple[str, str]) -> None:
    one, other = (write_run(tmp_path / name, "KerpleLog", 1235, CURVES["KerpleLog"]) for name in names)
    expected = rf"{re.escape(str(one))} and {re.escape(str(other))}: .*KerpleLog seed 1235.*leave one out.*seed-1235"
    with pytest.raises(ValueError, match=expected):
        read(locate([tmp_path]))


def test_runs_of_one_class_on_different_tasks_are_one_strategy(tmp_path: Path) -> None:
    for task in ("copy", "reverse"):
        place = tmp_path / task / "KerpleLog" / "seed-1235"
        write_task_run(place, "KerpleLog", 1235, {task: (1.0, 1.0, 0.5, 0.2)})
    assert set(read(locate([tmp_path])).results["strategy"]) == {"KerpleLog"}


def test_another_test_of_the_runs_is_read_if_asked_for(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    (directory / "test").rename(directory / "sliding")
    assert locate([tmp_path], "sliding") == [Run("RoPE", 1236, directory, "sliding")]
    assert set(read(locate([tmp_path], "sliding")).results["length"]) == set(LENGTHS)


def test_parts_with_one_protocol_are_told_apart_and_a_task_of_its_own_keeps_its_name(tmp_path: Path) -> None:
    rows = {"short": ["copy"], "long": ["copy", "reverse"]}
    for part, protocols in rows.items():
        write_run(tmp_path / part, "RoPE", 1236, CURVES["RoPE"])
        content = [{"metric": "accuracy", "protocol": name, "length": 8, "value": 0.5} for name in protocols]
        (tmp_path / part / "test" / "extrapolation.json").write_text(json.dumps(content))
    found = read(Run("RoPE", 1236, tmp_path / part, part=part) for part in rows).results
    assert found["protocol"].tolist() == ["short copy", "long copy", "reverse"]


def test_blocks_that_a_limited_test_did_not_read_are_no_text() -> None:
    row = {"protocol": "full", "length": 8, "nll_sum": 5.0, "targets": 16, "block_nll": [3.0, 2.0, 0.0]}
    ((_, blocks),) = results_in(row | {"block_targets": [8, 8, 0]}, Path("test.json"))
    assert [block["sum"] for block in blocks] == [3.0, 2.0]


def test_costs_say_which_part_they_are_of(tmp_path: Path) -> None:
    runs = [
        Run("RoPE", 1236, write_run(tmp_path / part, "RoPE", 1236, CURVES["RoPE"]), part=part)
        for part in ("code", "prose")
    ]
    assert list(read(runs).costs["part"]) == ["code", "prose"]
    assert "part" not in read([Run("RoPE", 1236, tmp_path / "code")]).costs


@pytest.mark.parametrize("content", ["a: 1", "[1, 2]", "model: {position: [", "model: {position: RoPE}"])
def test_a_configuration_that_is_not_ours_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "config.yaml"))):
        locate([tmp_path])


@pytest.mark.parametrize(
    ("name", "content"),
    [("test/extrapolation.json", '{"rows": ['), ("test/kernels.csv", ""), ("cost.json", "{"), ("config.yaml", "[")],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, content: str) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(directory / name))):
        read([Run("RoPE", 1236, directory)])


def test_an_infinite_loss_at_a_position_is_not_the_lowest(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "Sinusoidal", 1236, CURVES["RoPE"])
    path = directory / "test" / "extrapolation.json"
    content = json.loads(path.read_text())
    content["by_position"] = [{"length": 128, "nll_sum": [None, 30.0] + [20.0] * 126, "targets": [10] * 128}]
    path.write_text(json.dumps(content))
    table = pd.DataFrame({"position": range(128), "window": 64, "targets": 10})
    table["nll_full"], table["nll_windowed"] = [np.nan, np.inf] + [20.0] * 126, 30.0
    table.to_csv(directory / "test" / "position_wise.csv", index=False)
    analyses = read([Run("Sinusoidal", 1236, directory)]).analyses
    assert list(analyses["by_position"]["ppl"][:2]) == [np.inf, pytest.approx(np.exp(2))]
    assert list(analyses["position_wise"]["ppl_full"][:2]) == [np.inf, pytest.approx(np.exp(2))]
    assert set(analyses["position_wise"]["ppl_windowed"]) == {np.exp(3)}


@pytest.mark.parametrize("name", ["results", "summary", "costs"])
def test_an_analysis_with_the_name_of_a_table_of_the_report_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_run(tmp_path / "run", "RoPE", 1236, CURVES["RoPE"])
    (directory / "test" / f"{name}.csv").write_text("layer,probability\n0,1\n")
    with pytest.raises(ValueError, match=rf"{name}\.csv: has the name of a table of the report"):
        read([Run("RoPE", 1236, directory)])
