"""What `run.py` imports before it knows which command is asked for, and what it says to an incomplete command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kerple.base.shipped_configs import found
from kerple.cli.main import COMMANDS, main
from kerple.cli.parser import fit_parser
from kerple.cli.resolve import check_test, resolve
from kerple.compare.comparison import Job

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pytorch_lightning", "pandas", "matplotlib", "transformers")


PROGRAM = """
import json, sys
from kerple.cli.main import main
statuses = []
for arguments in COMMANDS:
    print("|", end="", file=sys.stderr)
    try:
        main(arguments)
        statuses.append(0)
    except SystemExit as end:
        statuses.append(end.code)
print("|" + json.dumps([statuses, [name for name in HEAVY if name in sys.modules]]))
"""


def imported_by(*commands: list[str]) -> tuple[list[int], set[str], str]:
    """Statuses of commands in one new process, which of the heavy packages they imported, standard error."""
    program = f"COMMANDS, HEAVY = {commands!r}, {HEAVY!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    statuses, names = json.loads(done.stdout.rpartition("|")[2])
    return statuses, set(names), done.stderr


def test_help_imports_nothing_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert imported_by(["--help"]) == ([0], set(), "|")
    main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)


def test_a_mistake_is_told_without_torch() -> None:
    demo = ["compare", "--config", "configs/compare/demo.yaml"]
    mistakes = [
        (["inspect", "no/such/folder"], "no/such/folder"),
        (["compare", "--seedz", "3"], "seedz"),
        (["compare", "--config", "no-such.yaml"], "no-such.yaml"),
        ([*demo, "--baseline", "Kerplelog"], "expected one of"),
        ([*demo, "--parallel", "0"], "parallel: got 0"),
        (["train"], "command: got train, expected one of prepare, fit"),
        ([], "command: got nothing"),
    ]
    statuses, imported, said = imported_by(*(arguments for arguments, _ in mistakes))
    assert (statuses, imported) == ([2] * len(mistakes), set())
    for (_, message), told in zip(mistakes, said.split("|")[1:], strict=True):
        assert message in told


def test_the_parser_of_a_fit_has_the_options_of_the_command() -> None:
    from kerple.base.precision import AutoTrainer
    from kerple.cli.lightning import CLI, LanguageModel, LightningDataModule

    class Parsed(CLI):
        def before_instantiate_classes(self) -> None: ...

        def instantiate_classes(self) -> None: ...

        def _run_subcommand(self, subcommand: str) -> None: ...

    arguments = ["--config", str(ROOT / "configs/demo.yaml"), "--model.position", "ALiBi", "--data.length", "32"]
    cli = Parsed(
        LanguageModel,
        LightningDataModule,
        trainer_class=AutoTrainer,
        subclass_mode_data=True,
        seed_everything_default=1235,
        auto_configure_optimizers=False,
        args=["fit", *arguments],
    )
    ours = fit_parser().parse_args(arguments).as_dict()
    theirs = cli.config.fit.as_dict()
    assert {key: theirs.pop(key) for key in ("ckpt_path", "weights_only")} == {"ckpt_path": None, "weights_only": None}
    assert ours | {"config": None} == theirs | {"config": None}


def test_the_tests_of_shipped_comparisons_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_flags = (f"--config={found('configs/demo.yaml')}", "--model.position=ALiBi", "--run_dir=run")
    job = Job(
        "ALiBi", 1, tmp_path / "run", fit_flags, ("--config=configs/compare/quick-test.yaml", "--run_dir=run/test")
    )
    check_test(job, resolve(job))
