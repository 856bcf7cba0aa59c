"""Replacement of the program `run.py` with the same arguments and files, but without torch.

A fit takes 20 steps of FAKE_STEP seconds (default 0.01). It writes its progress, and a checkpoint every 5 steps. It
does not write into an existing folder, unless it resumes. Its result is correct only if every step was taken once. A
test takes 5 such steps, and leaves an incomplete file if it is killed. FAKE_PAUSE is a phase, see `pause`.
"""

import json
import math
import os
import sys
import time
from io import StringIO
from pathlib import Path

import yaml

from kerple.base.run_progress import FILE, write_progress
from kerple.compare import committed_records, run_process
from kerple.compare.planned_run import PlannedRun
from kerple.measure import results_table
from kerple.measure.results_table import Row

CODE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
PROCESS = ["-c", CODE + "from tests.compare.fake_run import work; work()"]


def main(command: str, *flags: str) -> None:
    """Run one command."""
    options = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    config = yaml.safe_load(options["config"])
    options |= config.get("flags", {}) | ({"weights": config["weights"]} if config.get("weights") else {})
    fit(options) if command == "fit" else test(options)


def work() -> None:
    """Run the process of a run, with this file as the program."""
    run_process.PROGRAM, run_process.SHARED = Path(__file__), []
    committed_records.parent_digest = parent_digest
    complete, replace = committed_records.complete, os.replace

    def complete_slowly(run: PlannedRun) -> None:
        os.replace = lambda *paths: pause("record", run.directory) or replace(*paths)
        complete(run)

    committed_records.complete = complete_slowly
    run_process.main()


def pause(phase: str, folder: Path) -> None:
    """Write the number of this process, and wait to be killed, if FAKE_PAUSE is this phase and the run was not in it.

    Args:
        phase: "fit" after a checkpoint, "test" with an incomplete file, or "record" before a file of a record replaces
            the previous one.
        folder: Folder of the run.
    """
    marker = folder.with_name(f"{folder.name}.{phase}")
    if os.environ.get("FAKE_PAUSE") == phase and not marker.exists():
        marker.write_text(str(os.getpid()))
        time.sleep(600)


def parent_digest(run: PlannedRun) -> dict[str, str]:
    """Replacement of `committed_records.parent_digest` for the checkpoints of `fit`."""
    return {"parent": run.weights.read_text()} if run.weights and run.weights.is_file() else {}


def forked(description: str, log: str, environment: dict[str, str]) -> None:
    """Run like `PROCESS`, but in a fork, with the settings of `kerple.compare.engines.LocalProcesses.start`."""
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.stdin, sys.argv = StringIO(description), sys.argv[:1]
    work()


def fit(options: dict[str, str]) -> None:
    directory, strategy = Path(options["output"]), options["model.position"]
    checkpoint, seed = directory / "checkpoints" / "last.ckpt", int(options["seed_everything"])
    with (directory.parent / f"{directory.name}.starts").open("a") as starts:
        starts.write(f"{' '.join(options)}\n")
    if "fail" in strategy:
        sys.exit("the position of the fake is not a position")
    if "ckpt_path" in options:
        state = json.loads(checkpoint.read_text())
    else:
        checkpoint.parent.mkdir(parents=True)  # raises an error if the folder contains a run
        state = {"step": 0, "value": seed % 7, "position": strategy}
        if "weights" in options:
            state["value"] = json.loads(Path(options["weights"]).read_text())["value"]
        config = {"flags": {key: value for key, value in options.items() if key != "output"}, "seed_everything": seed}
        config |= {"model": {"position": {"class_path": strategy}}, "data": {"class_path": "none", "length": 64}}
        config |= {"trainer": {"precision": "fake"}, "weights": options.get("weights")}
        (directory / "config.yaml").write_text(json.dumps(config))
    while state["step"] < 20:
        time.sleep(float(os.environ.get("FAKE_STEP", "0.01")))
        state |= {"step": state["step"] + 1, "value": (state["value"] * 31 + state["step"]) % 1009}
        progress = {"stage": "training", "done": state["step"], "total": 20, "seconds": 60.0, "done_since_start": 9}
        progress |= {"seconds_left": 20.0 - state["step"], "loss": 4.25, "tokens_per_second": 1234.0}
        write_progress(directory / FILE, **progress)
        if state["step"] % 5 == 0:
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(json.dumps(state))
            fresh.replace(checkpoint)
            pause("fit", directory)
    os.environ["LOCAL_RANK"] = "0"  # as Lightning does for several devices; a test would then start no ranks
    cost = {"tokens_per_second": 1e3, "peak_memory_bytes": 2**20, "parameters": 9, "position_parameters": 2}
    (directory / "cost.json").write_text(json.dumps(cost))


def test(options: dict[str, str]) -> None:
    assert "LOCAL_RANK" not in os.environ
    folder = Path(options["output"])
    folder.mkdir()  # raises an error if the folder exists
    state = json.loads(Path(options["ckpt_path"]).read_text())
    assert state["step"] == 20
    loss = math.log(10 + state["value"] / 100 + len(state["position"]))
    rows = [Row("ppl", "full", length, None, None, 100 * loss + length / 100, 100) for length in (64, 128)]
    (folder / "half.csv").write_text("a,b\n1,")
    pause("test", folder.parent)
    time.sleep(float(os.environ.get("FAKE_STEP", "0.01")) * 5)
    (folder / "half.csv").unlink()
    results_table.add_to_results(folder, "fake", [] if state["position"] == "Unmeasured" else rows, {})


test.__test__ = False  # type: ignore[attr-defined]

if __name__ == "__main__":
    main(*sys.argv[1:])
