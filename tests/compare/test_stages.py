"""Second stages: runs that start from the weights of a parent, and the table that compares them with it."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kerple.cli import compare
from kerple.cli.main import main
from kerple.compare import committed_records, resolution
from kerple.compare.comparison_file import Comparison, Strategy, read_comparison
from kerple.compare.finished_runs import FinishedRun, Runs
from kerple.compare.planned_run import PlannedRun
from kerple.compare.resolution import resolve
from kerple.compare.stages import stage_tables
from kerple.compare.table_markup import NOTHING
from tests.cli.tiny import TINY, complaint
from tests.compare import fake_run
from tests.compare.conftest import change, fits, run, write_file

STAGES: dict[str, Any] = {
    "parent": Strategy("RoPE", flags={"model.lr": 1}),
    "longer": Strategy("KerpleLog", {"floor": 0.1}, {"model.lr": 2}, parent="parent"),
    "longest": Strategy("RoPE", flags={"data.length": 9}, parent="longer"),
}


def comparison(path: str, **changes: Any) -> Comparison:
    settings: dict[str, Any] = {"name": "small", "base": [path], "seeds": [1, 2], "baseline": "longer"}
    settings |= {"strategies": STAGES, "stage": {"data.length": 5}}
    return Comparison(**settings | changes)


def test_a_stage_has_the_flags_of_its_parent_and_the_weights_of_the_same_seed(base: str) -> None:
    runs = {job.name: job for job in comparison(base, parts={"a": {}}).planned_runs()}
    longer, longest = runs["a longer seed 2"], runs["a longest seed 2"]
    seeds = ["--seed_everything=2", "--data.seed=2"]
    assert longer.fit_flags == [f"--config={base}", "--model.lr=2", "--data.length=5", *seeds]
    assert longer.position_flags == ["--model.position=KerpleLog", "--model.position.floor=0.1"]
    assert longest.fit_flags == [f"--config={base}", "--model.lr=2", "--data.length=9", *seeds]
    assert (longer.parent, longest.parent) == ("a parent seed 2", "a longer seed 2")
    assert (longer.weights, longest.weights) == (runs["a parent seed 2"].checkpoint, longer.checkpoint)
    assert [job.parent for job in runs.values() if job.label == "parent"] == [None, None]
    again = PlannedRun.read(longest.description())
    assert (again.weights, again.training["weights"]) == (longest.weights, "longer")
    for option, seeded in product(("data.seed", "data.init_args.seed"), repeat=2):
        own = comparison(base, stage={option: 5}, seeds=[1], seeded=["seed_everything", seeded]).planned_runs()
        assert [job.fit_flags[-1] for job in own if job.parent] == [f"--{seeded}=5"] * 2
    pretrained = STAGES | {"parent": Strategy(hf="a/model")}
    model = {job.name: job for job in comparison(base, strategies=pretrained).planned_runs()}
    assert "--weights=a/model" in model["longer seed 2"].fit_flags
    assert (model["longer seed 2"].parent, model["longer seed 2"].weights) == (None, None)
    assert model["longest seed 2"].parent == "longer seed 2"


@pytest.mark.parametrize(
    ("label", "changed", "message"),
    [
        (
            "parent",
            Strategy(parent="longer"),
            "parent: parent: got 'longer', expected one of the strategies above: none",
        ),
        ("longer", Strategy(parent="none"), "longer: parent: got 'none', expected one of the strategies above: parent"),
        ("longer", Strategy(hf="x", parent="parent"), "longer: hf: got x, expected null, because a stage is fitted"),
        ("parent", Strategy(hf="x", seeds=1), "parent: seeds: got 1, expected null, because a pretrained model is t"),
        ("parent", Strategy(seeds=1), "longer: seeds: got 2, expected at most 1, those of its parent"),
        ("parent", Strategy(hf="x", options={"scaling": "yarn"}), "longer: parent: options: got {'scaling': 'yarn'}, "),
        ("longer", Strategy(flags={"weights": "x"}, parent="parent"), "longer: flags: got weights, .* use parent"),
    ],
)
def test_a_parent_is_above_its_stages(base: str, label: str, changed: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=f"^compare: strategies: {message.replace('{', '.').replace('}', '.')}"):
        comparison(base, strategies=STAGES | {label: changed})


@pytest.mark.slow
def test_a_parent_is_trained_once_and_its_stages_again_if_it_changes(config: Path) -> None:
    parent: dict[str, Any] = {"position": "RoPE"}
    strategies = {"parent": parent, "a": {"position": "KerpleLog", "parent": "parent"}}
    change(config, strategies=strategies, seeds=[1], baseline="parent")
    run(config, "--parallel", "2")
    runs = config.parent / "runs"
    value = json.loads((runs / "parent/seed-1/checkpoints/last.ckpt").read_text())["value"]
    for step in range(20):  # as `fake_run` computes it
        value = (value * 31 + step) % 1009
    assert json.loads((runs / "a/seed-1/checkpoints/last.ckpt").read_text())["value"] == value
    entry = committed_records.read_run_entry(runs / "a/seed-1/test")
    assert entry is not None
    checkpoint = (runs / "parent/seed-1/checkpoints/last.ckpt").read_text()
    assert (entry["config"]["weights"], entry["inputs"]["parent"]) == ("parent", checkpoint)

    # a new stage starts from the same parent, and a stopped one continues, also if the folder of runs is moved
    strategies["b"] = {"position": "ALiBi", "parent": "parent"}
    shutil.rmtree(runs / "a/seed-1/test")
    runs.rename(config.parent / "moved")
    change(config, strategies=strategies, runs=str(config.parent / "moved"))
    run(config)
    (config.parent / "moved").rename(runs)
    change(config, runs=str(runs))
    assert fits(config) == {"a seed-1": 2, "b seed-1": 1, "parent seed-1": 1}  # the finished fit ends immediately

    # only records are left: the parent is trained again for a new stage, and the other stages are not
    shutil.rmtree(runs)
    strategies["c"] = {"position": "T5", "parent": "b"}
    change(config, strategies=strategies)
    run(config)
    assert fits(config) == {"b seed-1": 1, "c seed-1": 1, "parent seed-1": 1}

    # a changed parent changes its stages
    change(config, strategies=strategies | {"parent": parent | {"flags": {"trainer.max_steps": 30}}})
    with pytest.raises(ValueError, match=r"parent seed 1: flags\.trainer\.max_steps: ") as refused:
        run(config)
    assert "b seed 1: flags.trainer.max_steps: None -> '30'; parent seed 1 has changed" in str(refused.value)
    run(config, "--rerun_changed", "true")
    assert fits(config) == {"a seed-1": 1, "b seed-1": 2, "c seed-1": 2, "parent seed-1": 2}


@pytest.mark.slow
def test_stages_of_a_parent_with_new_weights_are_not_in_the_report(config: Path, monkeypatch: Any, capsys: Any) -> None:
    strategies: dict[str, Any] = {"parent": {"position": "RoPE"}, "a": {"position": "ALiBi", "parent": "parent"}}
    change(config, strategies=strategies, seeds=[1], baseline="parent")
    run(config)
    shutil.rmtree(config.parent / "runs")  # only records are left, so the parent is trained again for a new stage

    def other_weights(job: PlannedRun) -> dict[str, str]:  # than those from which `a` started
        return {name: f"{digest}a" for name, digest in fake_run.parent_digest(job).items() if job.label == "a"}

    monkeypatch.setattr(committed_records, "parent_digest", other_weights)
    change(config, strategies=strategies | {"b": {"position": "T5", "parent": "parent"}})
    run(config)
    assert fits(config) == {"b seed-1": 1, "parent seed-1": 1}
    warning = "warning: a seed 1 is not in the report: parent seed 1 was trained again and has other weights; "
    assert warning in capsys.readouterr().out
    table = (config.parent / "report/table.md").read_text()
    assert ("\n| a |" in table, "\n| b |" in table) == (False, True)


@pytest.mark.slow
def test_stages_that_override_the_change_of_their_parent_are_trained_again(config: Path) -> None:
    strategies: dict[str, Any] = {"parent": {"position": "RoPE"}, "a": {"position": "ALiBi", "parent": "parent"}}
    strategies["b"] = {"position": "T5", "parent": "a"}
    change(config, strategies=strategies, seeds=[1], baseline="parent", stage={"trainer.max_steps": 5})
    run(config)
    strategies["parent"]["flags"] = {"trainer.max_steps": 30}
    change(config, strategies=strategies)
    with pytest.raises(ValueError, match="no finished run"):  # those of the stages are not reported
        run(config, "--report_only", "true")
    run(config, "--rerun_changed", "true")
    assert fits(config) == {"a seed-1": 2, "b seed-1": 2, "parent seed-1": 2}


def test_the_data_of_finished_runs_that_are_trained_again_is_prepared(tmp_path: Path, monkeypatch: Any) -> None:
    folders = [tmp_path / label / "seed-1" for label in ("parent", "a")]
    parent = PlannedRun("parent", 1, "", folders[0], folders[0] / "test", config={"data": {"length": 4}})
    stage = replace(parent, label="a", directory=folders[1], config={"data": {"length": 8}}, parent=parent.name)
    monkeypatch.setattr(resolution, "prepare_and_checksum", lambda data: f"checksum {data['length']}")
    unfinished, both = {str(stage.data_options): "checksum 8"}, ["checksum 4", "checksum 8"]
    with monkeypatch.context() as patch:
        patch.setattr(committed_records, "finished", lambda run: run is parent)
        assert sorted(resolution._prepared_checksums([parent, stage]).values()) == both  # the parent has no weights
        parent.checkpoint.parent.mkdir(parents=True)
        parent.checkpoint.touch()
        assert resolution._prepared_checksums([parent, stage]) == unfinished
    stage.directory.mkdir(parents=True)
    monkeypatch.setattr(committed_records, "finished", lambda run: run is stage)
    monkeypatch.setattr(committed_records, "changes", lambda run: ["another length"] if run is parent else [])
    assert sorted(resolution._prepared_checksums([parent, stage]).values()) == both


def stage_runs(missing: tuple[tuple[str, int], ...] = ()) -> Runs:
    """Runs of a parent, a control and a longer stage with three seeds each, without the missing ones."""
    lengths = {"parent": 64, "control": 64, "long": 128}
    loss = {("parent", 64): 3.0, ("parent", 128): 4.0, ("control", 64): 3.03, ("control", 128): 3.9}
    loss |= {("long", 64): 3.012, ("long", 128): 2.8}
    near = {("long", 128): 2.9, ("control", 128): 3.7, ("parent", 128): 3.5}
    rows, configs, costs = [], {}, []
    for label, seed in product(lengths, (1, 2, 3)):
        if (label, seed) in missing:
            continue
        for protocol, values in (("full", loss), ("windowed64", near)):
            for (name, at), value in values.items():
                for block in range(4 if name == label else 0):
                    shift = seed / 100 + block / 10  # of all strategies, so that it cancels
                    rows.append((label, seed, "ppl", protocol, at, block, 50 * (value + shift - 0.27), 50))
        position = "kerple.positions.RoPE" if label != "long" else "kerple.positions.NoPE"
        config = {"model.position.class_path": position, "data.init_args.length": lengths[label]}
        config |= {"data.init_args.batch_size": 2, "weights": None if label == "parent" else "parent"}
        configs[FinishedRun(label, seed, Path(label))] = config
        costs.append({"strategy": label, "seed": seed, "steps": 1000 if label == "parent" else 100})
    columns = ["strategy", "seed", "metric", "protocol", "length", "block", "sum", "count"]
    return Runs(pd.DataFrame(), pd.DataFrame(rows, columns=columns), pd.DataFrame(costs), configs=configs)


def test_the_table_of_stages_has_changes_against_parent_and_control_gains_and_tokens() -> None:
    """Expected values are computed from the losses by hand."""
    runs = stage_runs()
    runs.environments[FinishedRun("parent", 1, Path("parent"), part="other")] = {"devices": 2}  # of no run here
    (table,) = stage_tables(runs)
    assert list(table.body.index) == ["parent", "control", "long"]
    cells = {key: {name: cell.text for name, cell in row.items()} for key, row in table.body.T.items()}
    mean = 3.0 + 0.02 + 0.15 - 0.27  # of the parent at 64
    tokens, short, against_parent, against_window, against_control, gain = table.body.columns
    assert [cells[key][tokens] for key in cells] == ["128,000", "128,000 + 12,800", "128,000 + 25,600"]
    assert cells["long"][short].startswith(f"{100 * 0.012 / mean:+.2f} [")
    assert (table.body[short]["long"].bold, table.body[short]["control"].bold) == (True, False)  # 0.41% and 1.03%
    assert cells["long"][against_parent].startswith("-1.2000 [")
    assert against_window == "loss at 128 minus parent with windowed64"
    assert [cells[key][against_window][:7] for key in cells] == ["+0.5000", "+0.4000", "-0.7000"]
    assert cells["long"][against_control].startswith("-1.1000 [")
    assert gain == "gain beyond 64 at 128"
    assert against_control == "loss at 128 minus control"
    assert cells["long"][gain].startswith("+0.1000 [")
    assert [cells[key][gain][:7] for key in cells] == ["-0.5000", "-0.2000", "+0.1000"]


def test_only_a_window_of_the_parent_below_the_longest_length_is_a_reference() -> None:
    runs, parent = stage_runs(), "loss at 128 minus parent"
    stages = runs.blocks["strategy"] != "parent"

    def references(protocol: pd.Series) -> tuple[list[str], bool]:
        (table,) = stage_tables(replace(runs, blocks=runs.blocks.assign(protocol=protocol)))
        return [name for name in table.body.columns if name.startswith(parent)], "with a window" in table.note

    names = runs.blocks["protocol"]
    assert references(names) == ([parent, f"{parent} with windowed64"], True)
    of_stages = names.where(~stages | (names == "full"), "windowed96")  # each has the window of its training length
    assert references(of_stages) == ([parent, f"{parent} with windowed64"], True)
    only_stages = names.where(stages | (names == "full"), "other")
    assert references(only_stages) == ([parent], False)
    assert references(names.replace("windowed64", "windowed128")) == ([parent], False)  # equal to full


def test_a_stage_is_not_compared_with_a_control_that_lacks_its_seeds() -> None:
    (table,) = stage_tables(stage_runs(missing=(("control", 2), ("control", 3))))
    assert table.body["loss at 128 minus control"]["long"] == NOTHING
    assert table.body["loss at 128 minus parent"]["control"].text.startswith("-0.1000")


def test_a_pretrained_parent_without_seeds_is_compared_with_all_seeds_of_its_stages() -> None:
    runs = stage_runs(missing=(("parent", 2), ("parent", 3)))
    for run_, config in runs.configs.items():
        config.update({"model.path": "a/model"} if run_.strategy == "parent" else {"weights": "a/model"})
    (table,) = stage_tables(runs)
    # the mean of three seeds is 0.01 above the first seed, the only one of the parent
    assert table.body["loss at 128 minus parent"]["control"].text.startswith("-0.0900 [")


def test_a_run_with_the_name_of_the_model_from_which_it_started_is_no_stage_of_itself() -> None:
    runs = stage_runs()
    for config in runs.configs.values():
        config.update({"weights": "parent"})  # also of the run with this label
    (table,) = stage_tables(runs)
    assert [row["training tokens"].text for _, row in table.body.iterrows()][:2] == ["128,000", "128,000 + 12,800"]


@pytest.mark.slow  # reads the options of a fit with Lightning
def test_a_stage_of_a_pretrained_model_is_tested_with_its_own_strategy() -> None:
    recipe = read_comparison("configs/compare/extend-by-training.yaml")
    strategies = recipe.strategies | {"parent": Strategy(hf="results/models/rope")}
    stages = replace(recipe, strategies=strategies, seeds=[1]).planned_runs()[1:]
    assert len(stages) == 10
    for stage in map(resolve, stages):
        position = stage.config["model"]["position"]
        assert position["class_path"] == f"kerple.positions.{strategies[stage.label].position}"
        assert stage.test_config["model"]["position"] == position


@pytest.mark.slow
def test_a_stage_starts_from_the_weights_of_its_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real program, through `fit` and `plan` too."""
    sections = {key: TINY[key] for key in ("model", "data")} | {"trainer": TINY["trainer"] | {"max_steps": 3}}
    stages = {"a": {"position": "RoPE", "parent": "parent"}, "b": {"position": "NoPE", "parent": "a"}}
    settings: dict[str, Any] = {"baseline": "parent", "seeds": [1], "stage": {"data.seed": 2, "model.lr": 0.0001}}
    config = write_file(tmp_path, sections, strategies={"parent": {"position": "RoPE"}} | stages, **settings)
    shared = tmp_path / "base.yaml"
    compare.main(["--config", str(config)])
    weights = {
        label: torch.load(tmp_path / f"runs/{label}/seed-1/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for label in ("parent", "a", "b")
    }
    for one, other in (("parent", "a"), ("a", "b")):
        change = max(float((weights[one][name] - value).abs().max()) for name, value in weights[other].items())
        assert 0 < change < 0.002  # three steps of AdamW at this rate; independent weights differ by more
    compare.main(["--config", str(config)])
    assert "3 runs: 3 finished, 0 to do" in capsys.readouterr().out
    again = tmp_path / "runs/parent/seed-1/checkpoints/last.ckpt"
    content = torch.load(again, weights_only=True)
    content["state_dict"]["network.embedding.weight"] += 1
    torch.save(content, again)
    with pytest.raises(ValueError, match="a seed 1: parent has changed") as refused:
        compare.main(["--config", str(config)])
    assert "b seed 1: a seed 1 has changed, from which it starts" in str(refused.value)
    capsys.readouterr()
    flags = ["fit", "--config", str(shared), "--weights", str(tmp_path / "runs/a/seed-1")]
    error = complaint(capsys, *flags, "--output", tmp_path / "c", "--trainer.max_steps", "2")
    assert error == "error: trainer.max_steps: got 2, expected more than 2 with --weights, the steps of the warm-up"
    plan = ["plan", "--config", str(shared), "--weights", str(tmp_path / "runs/b/seed-1"), "--data.train_length", "4"]
    main([*plan, "--chips", "A100"])
    printed = capsys.readouterr().out
    assert "parent's tokens  144" in printed  # three fits of 3 steps with 2 sequences of 8 tokens
