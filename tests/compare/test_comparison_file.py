"""The jobs of a comparison file, the shipped comparison files, and the progress of a comparison."""

from dataclasses import replace
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from kerple.base.errors import UserError
from kerple.base.run_progress import FILE, write_progress
from kerple.cli import compare
from kerple.compare import comparison_duration, workflow
from kerple.compare.comparison_file import Comparison, Strategy, as_flags, read_comparison
from kerple.compare.planned_run import PlannedRun
from kerple.compare.progress_board import Board
from kerple.compare.resolution import resolve
from kerple.config.flat_configuration import differences, flat

ROOT = Path(__file__).parents[2]


def comparison(path: str, **changes: Any) -> Comparison:
    per_layer = Strategy("KerpleLog", {"floor": 0.05}, {"data.length": 128})
    settings: dict[str, Any] = {"name": "small", "base": [path], "seeds": [1, 2], "baseline": "KerpleLog"}
    settings["strategies"] = {"KerpleLog": None, "per layer": per_layer}
    return Comparison(**settings | changes)


def test_every_strategy_and_seed_is_a_job_with_its_flags(base: str) -> None:
    jobs = comparison(base, flags={"trainer.max_steps": 9}, test={"config": base}).planned_runs()
    expected = [("KerpleLog", 1), ("per layer", 1), ("KerpleLog", 2), ("per layer", 2)]
    assert [(job.label, job.seed) for job in jobs] == expected
    flags = " --trainer.max_steps=9 --data.length=128 --seed_everything=2 --data.seed=2 --model.position=KerpleLog"
    flags += " --model.position.floor=0.05"
    assert jobs[3].fit_flags + jobs[3].position_flags == [f"--config={base}", *flags.split()]
    assert jobs[3].test_flags == [f"--config={base}"]
    assert jobs[3].test_folder == Path("logs/compare/small/per layer/seed-2/test")


def test_parts_have_folders(base: str) -> None:
    parts = {"copy": {"config": base}, "reverse": {"data.task": "Reverse"}}
    jobs = comparison(base, parts=parts, test_folder="again").planned_runs()
    expected = [("copy", "KerpleLog", 1), ("copy", "per layer", 1), ("reverse", "KerpleLog", 1)]
    assert [(job.part, job.label, job.seed) for job in jobs[:3]] == expected
    assert len({job.directory for job in jobs}) == 8
    assert jobs[0].fit_flags[:2] == [f"--config={base}"] * 2
    assert jobs[2].fit_flags[1] == "--data.task=Reverse"
    assert str(jobs[2].test_folder) == "logs/compare/small/reverse/KerpleLog/seed-1/again"


def test_a_strategy_may_have_the_first_seeds_only_and_a_pretrained_model_has_one(base: str) -> None:
    yarn = Strategy(hf="folder/model", options={"scaling": "yarn", "factor": 2}, flags={"data.length": 9})
    strategies = {"KerpleLog": None, "T5": Strategy(seeds=2), "YaRN": yarn}
    jobs = comparison(base, seeds=[3, 1, 2], strategies=strategies, test={"config": base}).planned_runs()
    expected = [("KerpleLog", 3), ("KerpleLog", 1), ("KerpleLog", 2), ("T5", 3), ("T5", 1), ("YaRN", 3)]
    assert [(job.label, job.seed) for job in jobs] == expected
    test = ["--hf=folder/model", "--model.scaling=yarn", "--model.factor=2", f"--config={base}", "--data.length=9"]
    assert (jobs[-1].fit_flags, jobs[-1].test_flags) == ([], test)


def test_flags_of_every_type() -> None:
    values = {"a": "text", "b": 1e-3, "c": None, "d": True, "e": [1, 2], "f": {"g": "h"}}
    assert as_flags(values) == ["--a=text", "--b=0.001", "--c=null", "--d=true", "--e=[1, 2]", '--f={"g": "h"}']


def test_differences_leave_out_older_options_locations_and_new_options_with_defaults() -> None:
    callback = {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}
    of_callback = flat({"trainer": {"callbacks": [callback]}})
    written = {"a": 1, "only before": 2, "data.init_args.directory": "x"} | of_callback
    first, *others = differences(written, {"a": 2, "data.init_args.directory": "y"})
    assert (first, len(others)) == ("a: 1 -> 2", 2)
    model = {"model.class_path": "kerple.LanguageModel"}
    assert differences(model, model | {"model.qk_norm": False}) == []  # newer than the run, with its default value
    assert differences(model, model | {"model.qk_norm": True}) == ["model.qk_norm: None -> True"]
    assert flat({"experiment": date(2026, 11, 27)}) == {"experiment": "2026-11-27"}  # YAML reads dates
    mixture = {"a.b": 0.5, "c": 0.5}  # of two folders
    for option, earlier, text, now in (
        ("model.optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, "torch.optim.SGD", "adamw"),
        ("data.init_args.mixture", mixture, mixture, None),
        ("data.init_args.samples", None, None, 8),
        ("trainer.callbacks", [callback], {key.split(".", 2)[2]: value for key, value in of_callback.items()}, None),
    ):
        assert differences(flat({option: earlier}), {option: now}) == [f"{option}: {text!r} -> {now!r}"]
    position = "model.position.init_args"  # PoPE's former phase has another meaning; PaTH has no kernel now
    assert differences({f"{position}.phase": 0.0}, {}) == [f"{position}.phase: 0.0 -> None"]
    assert differences({f"{position}.convolution": 1}, {}) == []
    assert len(differences({f"{position}.convolution": 3}, {})) == 1
    data, sections = {"data.class_path": "TokenShards"}, "data.init_args.sections"  # 1 was all, now None is
    earlier = data | {sections: 1, "data.init_args.prepare_engine": "local"}
    assert differences(earlier, data | {sections: None}) == []
    assert differences(earlier | {sections: 2}, data | {sections: None}) == [f"{sections}: 2 -> None"]
    assert differences(data | {sections: 1}, data | {sections: None}) == [f"{sections}: 1 -> None"]


@pytest.mark.parametrize("name", ["limit_val_batches", "overfit_batches", "val_check_interval"])
def test_one_batch_is_another_value_than_all_batches(name: str) -> None:
    option = f"trainer.{name}"
    assert differences({option: 1.0}, {option: 1}) == [f"{option}: 1.0 -> 1"]
    assert differences({option: 0}, {option: 0.0}) == []
    assert differences({"model.floor": 1}, {"model.floor": 1.0}) == []
    fit, test = ({"trainer": {name: value}, "floor": value} for value in (1.0, 1))
    run = PlannedRun("ALiBi", 1, "", Path("a"), Path("a/test"), config=fit, test_config=test)
    assert run.test == {"trainer": {name: 1}}


@pytest.mark.slow
def test_the_last_run_of_each_shipped_comparison_parses_and_folders_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths in comparison files are relative to the current folder
    parsed = set()
    for path in sorted(Path("configs/compare").glob("*.yaml")):
        jobs = read_comparison(str(path)).planned_runs()
        assert len({job.directory for job in jobs}) == len(jobs)
        fitted = [job for job in jobs if job.fit_flags and not any("--weights" in flag for flag in job.fit_flags)]
        for job in fitted[-1:]:
            if tuple(job.fit_flags[:2]) not in parsed:
                parsed.add(tuple(job.fit_flags[:2]))
                assert resolve(job).config["seed_everything"] == job.seed, path
    assert parsed


def test_a_callback_without_options_and_an_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = {"trainer.callbacks": [{"class_path": "Dashboards"}]}
    changes: dict[str, Any] = {"strategies": {"RoPE": None, "x": Strategy("RoPE", {"bass": 1})}, "baseline": "RoPE"}
    good, bad, *_ = comparison("configs/demo.yaml", flags=flags, test=flags, **changes).planned_runs()
    assert resolve(good).test == {}  # the test has the callbacks of the fit
    with pytest.raises(UserError, match=r"compare: x seed 1: .*bass"):
        resolve(bad)


def test_a_callback_of_the_user_in_a_comparison_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_callback.py").write_text(
        "from pytorch_lightning import Callback\n\n\nclass Mine(Callback):\n    def __init__(self, number: int):\n"
        "        raise AssertionError('built while the comparison was read')\n"
    )
    mine = {"class_path": "my_callback.Mine", "init_args": {"number": 3}}
    settings = yaml.safe_load((ROOT / "configs/compare/demo.yaml").read_text())
    flags = {"trainer.callbacks": [{"class_path": "Dashboards"}, mine]}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(settings | {"test": flags, "flags": flags}))
    read = read_comparison(str(tmp_path / "compare.yaml"))
    callbacks = resolve(read.planned_runs()[0]).test_config["trainer"]["callbacks"]
    assert [callback for callback in callbacks if callback["class_path"].endswith("Mine")] == [mine]


def test_flags_that_are_classes_stay_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}  # its argument params is required
    flags = {"model.optimizer": optimizer, "trainer.callbacks": [optimizer, {"class_path": "Dashboards"}]}
    strategies = {"RoPE": {"options": flags, "flags": flags}, "ALiBi": {}}
    sections = {"flags": flags, "stage": flags, "test": flags, "parts": {"code": flags}, "strategies": strategies}
    settings = yaml.safe_load((ROOT / "configs/compare/demo.yaml").read_text()) | {"baseline": "RoPE"}
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(settings | sections))
    read = read_comparison(str(path))
    assert {name: getattr(read, name) for name in sections} == sections | {
        "strategies": {"RoPE": Strategy(None, flags, flags), "ALiBi": Strategy()}
    }
    path.write_text(yaml.safe_dump(settings | {"flags": {"model.optimizer": optimizer}, "strategies": {"RoPE": {}}}))
    (job,) = read_comparison(str(path)).planned_runs()
    assert resolve(job).config["model"]["optimizer"]["init_args"]["momentum"] == 0.9


def test_a_misspelt_flag_is_named_before_a_run_starts(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "configs/compare/demo.yaml").read_text()) | {"runs": str(tmp_path / "runs")}
    for mistake in ({"test": {"trainer.precison": "32-true"}}, {"flags": {"model.leyers": 3}}):
        (tmp_path / "compare.yaml").write_text(yaml.safe_dump(settings | mistake))
        with pytest.raises(UserError, match=r"(?s)compare: (test|ALiBi seed \d+): .*(precison|leyers)"):
            compare.main(["--config", str(tmp_path / "compare.yaml")])
    assert not (tmp_path / "runs").exists()


def test_the_estimated_time_is_flops_divided_by_the_speed_of_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_duration, "_speed", lambda dtype, device: {"cpu": 1e9, "cuda": 1e12}[device])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = {"init_args": {"batch_size": 8, "length": 32, "vocabulary": 100}}
    trainer = {"max_steps": 50, "accumulate_grad_batches": 2, "precision": "32-true"}
    config = {"model": {"dim": 64, "heads": 4, "layers": 2}, "data": data, "trainer": trainer | {"accelerator": "cpu"}}
    weights, pairs = 2 * 12 * 64**2 + 64 * 100, 2 * 2 * 64 * 32
    of_a_run = 3 * (2 * weights + pairs) * 8 * 32 * 50 * 2 / 1e9 / comparison_duration.EFFICIENCY
    seconds, start = comparison_duration.training_seconds, comparison_duration.START
    assert seconds([config] * 3, 2) == pytest.approx(3 * (of_a_run + start / 2))
    callbacks = [{"class_path": "x.y"}]  # a GradientAccumulationScheduler's factor is 1 in epochs without another one
    for scheduling, factor in (({0: 6, 1: 4}, 6), ({3: 4}, 1)):
        scheduler = {"class_path": "l.GradientAccumulationScheduler", "init_args": {"scheduling": scheduling}}
        options = {"accumulate_grad_batches": 1, "callbacks": [*callbacks, scheduler]}
        scheduled = config | {"trainer": config["trainer"] | options}
        assert seconds([scheduled], 1) == pytest.approx(of_a_run * factor / 2 + start)
    on_cuda = config | {"trainer": trainer | {"accelerator": "gpu"}}
    monkeypatch.setattr(comparison_duration, "choose_precision", lambda accelerator: ("32-true", "the device has none"))
    assert seconds([on_cuda], 1) == pytest.approx(of_a_run / 1000 + start)
    assert seconds([config | {"trainer": config["trainer"] | {"max_steps": -1}}], 1) is None
    monkeypatch.setattr(comparison_duration, "_speed", lambda dtype, device: {torch.float32: 1e9}[dtype])
    monkeypatch.setattr(comparison_duration, "emulated", lambda precision, accelerator: precision == "bf16-mixed")
    in_bf16 = config | {"trainer": config["trainer"] | {"precision": "bf16-mixed"}}
    assert seconds([in_bf16], 1) == pytest.approx(of_a_run + start)  # emulated products are computed in fp32


def test_the_estimate_counts_the_remaining_steps(tmp_path: Path) -> None:
    todo = [replace(job, config={"trainer": {"max_steps": 50}}) for job in jobs(tmp_path, 5)]
    for job, step in zip(todo[1:], (20, 50, 20, None), strict=True):
        job.checkpoint.parent.mkdir(parents=True)
        if step is None:
            job.checkpoint.write_text("damaged")
        else:
            torch.save({"global_step": step}, job.checkpoint)
    remaining = workflow.remaining_fits(todo, changed=[todo[3]])  # whose checkpoint will be deleted
    assert [config["trainer"]["max_steps"] for config in remaining] == [50, 30, 50, 50]


def jobs(folder: Path, number: int = 4) -> list[PlannedRun]:
    directories = [folder / f"seed-{seed}" for seed in range(number)]
    return [PlannedRun("ALiBi", i, "", d, d / "test", []) for i, d in enumerate(directories)]


def training(job: PlannedRun, seconds: float, left: float) -> None:
    state = {"stage": "training", "done": 40, "total": 400, "seconds": seconds, "done_since_start": 9, "loss": 4.25}
    write_progress(job.directory / FILE, **state, seconds_left=left, tokens_per_second=1234.0)


def test_the_board_shows_a_test_instead_of_its_fit_and_text_with_brackets(tmp_path: Path) -> None:
    output, todo = StringIO(), jobs(tmp_path)
    training(todo[0], 1.0, 1.0)  # the file of a stopped run
    with Board(5, todo, 2, Console(file=output, width=200, highlight=False)) as board:
        assert board.running() == {}
        training(todo[1], 600.0, 0.0)
        write_progress(todo[1].test_folder / FILE, stage="testing, full at 64", done=1, total=8)
        assert [progress["stage"] for progress in board.running().values()] == ["testing, full at 64"]
        board.ended(todo[0], "a line [with brackets]")
    assert "[2/5] a line [with brackets]" in output.getvalue()


def test_the_remaining_time_includes_active_and_waiting_runs(tmp_path: Path) -> None:
    todo = jobs(tmp_path)
    board = Board(4, todo, 2, Console(file=StringIO()))
    assert board.seconds_left(board.running()) is None
    training(todo[0], 5.0, 95.0)
    assert board.seconds_left(board.running()) is None  # too few seconds of training
    training(todo[0], 60.0, 40.0)
    training(todo[1], 60.0, 60.0)
    # active runs need 40 and 60 s more, two waiting runs 110 s each, two at a time
    assert board.seconds_left(board.running()) == (40 + 60 + 2 * 110) / 2
