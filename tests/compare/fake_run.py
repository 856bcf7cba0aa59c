"""Stands in for run.py where only the order of events matters: same arguments, same files, no torch.

A fit takes 20 steps of 10 ms (FAKE_STEP seconds each, or FAKE_STEP_<strategy>), says how far it is, keeps its state in
checkpoints/last.ckpt every 5 and, like the real one, never writes into a directory that is there unless told to resume.
Its result depends on every step having been taken exactly once.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from kerple.base.directories import fit_directory
from kerple.base.progress import VARIABLE, note

command, *arguments = sys.argv[1:]
options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
strategy = options.get("model.position", "")

if command == "fit":
    directory = Path(options["run_dir"])
    if "ckpt_path" in options:
        directory = fit_directory(str(directory), "", "", "", None, options["ckpt_path"])
    checkpoint = directory / "checkpoints" / "last.ckpt"
    with (directory.parent / f"{directory.name}.starts").open("a") as starts:
        starts.write(json.dumps({"resume": "ckpt_path" in options}) + "\n")
    if "fail" in strategy:
        sys.exit("the position of the fake is not a position")
    if "ckpt_path" in options:
        state = json.loads(checkpoint.read_text())
    else:
        checkpoint.parent.mkdir(parents=True)  # raises where there is a run already
        state = {"step": 0, "value": int(options["seed_everything"]) % 7, "position": strategy}
        position = {"class_path": f"kerple.positions.{strategy}"}
        config = {"seed_everything": int(options["seed_everything"]), "model": {"position": position}}
        config["data"] = {"init_args": {"length": 64}}
        (directory / "config.yaml").write_text(json.dumps(config))
    while state["step"] < 20:
        time.sleep(float(os.environ.get(f"FAKE_STEP_{strategy}", os.environ.get("FAKE_STEP", "0.01"))))
        state |= {"step": state["step"] + 1, "value": (state["value"] * 31 + state["step"]) % 1009}
        if VARIABLE in os.environ:
            told = {
                "doing": "training",
                "done": state["step"],
                "of": 20,
                "for": 60.0,
                "since": 9,
                "left": 20.0 - state["step"],
            }
            note(Path(os.environ[VARIABLE]), **told, loss=4.25, tokens_per_second=1234.0)
        if state["step"] % 5 == 0:
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(json.dumps(state))
            fresh.replace(checkpoint)
else:
    checkpoint = Path(options["ckpt_path"])
    folder = Path(options["run_dir"])
    folder.mkdir()  # raises where there is a test already
    state = json.loads(checkpoint.read_text())
    assert state["step"] == 20
    nll = 100 * math.log(10 + state["value"] / 100 + len(state["position"]))
    rows = [{"protocol": "full", "length": n, "nll_sum": nll + n / 100, "targets": 100} for n in (64, 128)]
    if state["position"] == "Unmeasured":
        rows = []
    text = json.dumps({"version": int(os.environ.get("FAKE_VERSION", "1")), "rows": rows})
    with (folder / "extrapolation.json").open("w") as file:
        for character in text:  # slow enough to be killed in the middle
            file.write(character)
            file.flush()
    time.sleep(0.05)
