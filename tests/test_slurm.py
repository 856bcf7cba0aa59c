"""The job script, with an `srun` that writes down what it was asked."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "slurm" / "fit.sbatch"


def started(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    srun = folder / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
    srun.chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    command = ["bash", str(SCRIPT), "--config", "a file.yaml"]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_every_start_resumes_on_the_nodes_it_was_given(tmp_path: Path) -> None:
    job = {"SLURM_NNODES": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8"}
    done = started(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **job)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        str(tmp_path), "--cpus-per-task=8", "--kill-on-bad-exit=1", ".venv/bin/python", "run.py", "fit", "--config",
        "a file.yaml", "--ckpt_path", "last", "--trainer.devices", "4", "--trainer.num_nodes", "8",
    ]  # fmt: skip
    assert "start this with sbatch" in started(tmp_path, SLURM_SUBMIT_DIR="").stderr
