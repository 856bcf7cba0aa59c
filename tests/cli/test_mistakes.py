"""Mistakes that users make: each is one line on standard error and exit status 2."""

import logging
import multiprocessing
import os
import resource
import sys

import pytest
import yaml

from kerple.base.errors import UserError
from kerple.cli.compare import prepare_and_checksum
from kerple.cli.main import main
from kerple.training import provenance
from tests.cli.tiny import TINY

FORK = multiprocessing.get_context("fork")


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return only_line(capsys.readouterr().err)


def only_line(printed):
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    return line


def config(folder, **sections):
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY | sections))
    return f"--config={folder}/config.yaml"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.heads=3"], ["heads: got 3"]),  # a class says it when it is built
        (["--data.lenght=3"], ["lenght"]),
        (["--model.position=Kerple1og"], ["model.position", "Kerple1og", "KerpleLog"]),
        (["--model.position=my_gaus.X"], ["model.position", "No module named 'my_gaus'"]),
        (["--model.position=ALiBi", "--model.position.slop=3"], ["model.position", "slop"]),
        (["--trainer.max_steps=-7"], ["max_steps", "-7"]),
        (["--trainer.overfit_batches=1"], ["trainer.overfit_batches"]),
        (["--config=no-such.yaml"], ["no-such.yaml"]),
        (["--ckpt_path=no-such.ckpt"], ["no-such.ckpt"]),
    ],
)
def test_an_option_of_fit(options, parts, tmp_path, capsys):
    line = complaint(capsys, "fit", config(tmp_path), f"--run_dir={tmp_path}/run", *options)
    assert all(part in line for part in parts), line
    assert not list((tmp_path / "run").rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"trainer": {"max_step": 3}}, "max_step"),
        ({"model": None}, "model"),
        ({"trainer": []}, "trainer: got []"),
        ({"model": TINY["model"] | {"position": {"class_path": "RoPE", "init_args": {"bass": 3}}}}, "bass"),
        ({"model": TINY["model"] | {"position": ["RoPE"]}}, "model.position: got"),
    ],
)
def test_a_file_of_options(sections, part, tmp_path, capsys):
    assert part in complaint(capsys, "fit", config(tmp_path, **sections), f"--run_dir={tmp_path}/run")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["check", "--model.position=0"], "model.position"),
        (["predict", "--ckpt_path=x.ckpt", "--tokens=0"], "tokens: got 0"),
        (["fit", "--data.help"], "TokenShards"),
        (["test", "--ckpt_path=https://example.org/a.ckpt"], "which is not a file"),
        (["prepare", "--data=kerple.tasks.TaskData", "--data.task=Copy", "--data.length=100"], "no shards to prepare"),
        (["export", "--ckpt_path=run.py", "--to=x"], "run.py is not a checkpoint"),
    ],
)
def test_an_option_of_another_command(arguments, part, capsys):
    assert part in complaint(capsys, *arguments)


def test_debug_and_faults_of_the_program_have_a_traceback(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="heads: got 3"):
        main(["fit", "--debug", config(tmp_path), f"--run_dir={tmp_path}/run", "--model.heads=3"])

    def broken(self):
        raise ValueError("a bug of ours")

    monkeypatch.setattr("kerple.training.random_state.RandomState.__init__", broken)
    with pytest.raises(ValueError, match="a bug of ours"):
        main(["fit", config(tmp_path), f"--run_dir={tmp_path}/run"])


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.delitem(sys.modules, "kerple.cli.plan", raising=False)
    assert complaint(capsys, "plan").endswith("pip install rich")


def test_an_unknown_option_of_a_strategy_in_a_comparison(tmp_path, capsys):
    base = {"name": "x", "base": ["configs/demo.yaml"], "seeds": [1], "baseline": "RoPE"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(base | {"strategies": {"RoPE": {"optoins": {}}}}))
    assert "strategies: RoPE: got optoins" in complaint(capsys, "compare", f"--config={tmp_path}/x.yaml")


def test_data_of_a_comparison_that_cannot_be_built():
    data = TINY["data"] | {"init_args": TINY["data"]["init_args"] | {"length": 5}}
    with pytest.raises(UserError, match=r"^data.length: got 5 tokens, but copy .* set it to 6 or more"):
        prepare_and_checksum(data)


def _fit_on_a_full_disk(folder, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the kernel refuses what goes beyond
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # what captures stdout may be at its limit
    provenance.git = lambda *_: ""  # a long diff of what is not committed here would meet the limit first
    try:
        main(["fit", f"--config={folder}/config.yaml", f"--run_dir={folder}/run"])
    except SystemExit as ended:
        os._exit(ended.code)


def test_a_disk_that_is_full(tmp_path):
    config(tmp_path)
    process = FORK.Process(target=_fit_on_a_full_disk, args=(tmp_path, tmp_path / "log.txt"))
    process.start()
    process.join()
    assert process.exitcode == 2
    line = only_line((tmp_path / "log.txt").read_text())
    assert f"{tmp_path}/run/checkpoints/last.ckpt" in line
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_that_diverges(tmp_path, capsys):
    # each step multiplies the matrices by 1 - lr · weight_decay = -1e9
    options = ["--model.lr=1000", "--model.weight_decay=1000000", "--model.warmup=0", "--trainer.max_steps=40"]
    line = complaint(capsys, "fit", config(tmp_path), f"--run_dir={tmp_path}/run", *options)
    assert "not finite" in line


@pytest.mark.filterwarnings("ignore")
def test_a_path_with_brackets_and_accents_or_bytes_that_are_no_unicode(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "a[b] {c} é"
    main(["fit", config(tmp_path), f"--run_dir={folder}/run[1]"])
    main(["test", f"--ckpt_path={folder}/run[1]/checkpoints/last.ckpt"])
    assert (folder / "run[1]" / "test" / "config.yaml").is_file()
    main(["fit", config(tmp_path), f"--run_dir={folder}/run[1]", "--ckpt_path=last"])

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest-xdist cannot send such a path
    latin = folder.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    main(["test", f"--ckpt_path={latin}/run[1]/checkpoints/last.ckpt", f"--run_dir={tmp_path}/test"])
    capsys.readouterr()
    assert "run_dir: " in complaint(capsys, "fit", config(tmp_path), f"--run_dir={latin}/new")
