"""The script `slurm/compare.sbatch` with two pretended nodes, whose commands of Slurm start it here."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from lightning_fabric.plugins.environments.lightning import find_free_network_port

from tests.cli.tiny import TINY
from tests.compare.conftest import write_file

pytest.importorskip("ray", reason="no ray: make test-slow installs requirements-remote.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[1]
SRUN = """#!/usr/bin/env bash
while test "${1#--}" != "$1"; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$SLURM_LOG"
test "$1" != show || printf '%s\\n%s\\n' "$SLURM_NODE" "$SLURM_NODE"
"""


@pytest.fixture
def job(tmp_path):
    """A function that starts the script for a comparison in this folder."""
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    sections = {key: TINY[key] for key in ("model", "data", "trainer")}
    write_file(tmp_path, sections, strategies={"ALiBi": {}}, baseline="ALiBi")
    port = find_free_network_port()
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "RAY_PORT": str(port)}
    variables |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NODELIST": "n[1-2]", "KERPLE_PYTHON": sys.executable}
    variables |= {"SLURM_LOG": str(tmp_path / "scontrol.log")}
    variables |= {"SLURM_NODE": socket.gethostbyname(socket.gethostname()), "OMP_NUM_THREADS": "1"}

    started: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        command = [str(ROOT / "slurm/compare.sbatch"), "--config", str(tmp_path / "compare.yaml"), "--parallel", "2"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | variables, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.terminate()  # after a failure; the script then ends Ray


def test_a_comparison_on_two_nodes_is_requeued_and_finished(job, tmp_path):
    process = job()
    output = ""
    while "[0/2 done, " not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    process.send_signal(signal.SIGUSR1)
    output += process.communicate()[0]
    assert "to continue, run the command again" in output
    assert process.returncode == 130, output
    assert "Token authentication is disabled" not in output
    assert "requeue 7" in (tmp_path / "scontrol.log").read_text()
    process = job()
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert set(pd.read_csv(tmp_path / "report/results.csv")["seed"]) == {1, 2}


def test_a_node_on_which_ray_does_not_start_ends_the_job(job, tmp_path):
    fails = SRUN.replace("exec", 'case "$*" in *--address=*) exit 1 ;; esac\nexec')
    (tmp_path / "srun").write_text(fails)
    process = job()
    output = process.communicate()[0]  # until Ray of the other node has ended too
    assert "slurm/compare.sbatch: Ray has not started on all nodes" in output
    assert process.returncode == 1
