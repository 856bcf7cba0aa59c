"""The job script, with an `srun` that writes down what it was asked."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "slurm" / "fit.sbatch"


def started(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    srun = folder / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
    srun.chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = ["bash", str(SCRIPT), "--config", "a file.yaml"]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(("nodes", "tasks"), [("1", "8"), ("8", "4")])
def test_every_start_resumes_on_the_nodes_it_was_given(nodes: str, tasks: str, tmp_path: Path) -> None:
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": nodes, "SLURM_NTASKS_PER_NODE": tasks}
    given["SLURM_CPUS_PER_TASK"] = "8"
    first, again = (started(tmp_path, **given) for _ in range(2))
    assert first.returncode == 0
    assert first.stdout == again.stdout
    assert first.stdout.splitlines() == [
        str(tmp_path), "--cpus-per-task=8", "--kill-on-bad-exit=1", ".venv/bin/python", "run.py", "fit", "--config",
        "a file.yaml", "--ckpt_path", "last", "--trainer.devices", tasks, "--trainer.num_nodes", nodes,
    ]  # fmt: skip


def test_outside_slurm_it_says_so(tmp_path: Path) -> None:
    done = started(tmp_path, SLURM_SUBMIT_DIR="")
    assert done.returncode != 0
    assert "start this with sbatch" in done.stderr


def test_slurm_is_asked_for_a_signal_in_time_and_for_another_turn() -> None:
    asked = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append"} <= set(asked)
