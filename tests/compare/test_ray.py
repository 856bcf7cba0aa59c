"""Runs and parts of a corpus on a Ray cluster of two nodes, which are killed, against the same on this machine.

The nodes are processes of this machine. Most runs are fake runs, see `fake_run`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kerple.base import ray_cluster
from kerple.base.errors import UserError
from kerple.cli import compare
from kerple.data.prepare.workers import tokenise_on_ray
from tests.cli.tiny import TINY
from tests.compare.conftest import WHOLE_TABLE, fits, use_fake_runs, write_file
from tests.data.conftest import contents, small_build, write_lines

pytest.importorskip("ray", reason="no ray: make test-slow installs requirements-remote.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Nodes:
    """A Ray cluster whose head has no cores, and whose other nodes can be killed and started."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address = self.cluster.address
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    def processes(self, node: Any) -> list[psutil.Process]:
        """The processes that the process of a node has started."""
        return psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)

    def index(self, number: int) -> int:
        """The index of the node with a process."""
        return next(i for i, node in enumerate(self.nodes) if number in [p.pid for p in self.processes(node)])

    def replace(self, index: int) -> None:
        """Kill a node as if its machine were switched off, and start another one."""
        children = self.processes(self.nodes[index])
        self.cluster.remove_node(self.nodes[index], allow_graceful=False)
        for process in children:  # the workers of a machine end with it
            if process.is_running():
                process.kill()
        self.nodes[index] = self.cluster.add_node(num_cpus=1)


@pytest.fixture(scope="module")
def nodes():
    import ray

    nodes = Nodes()
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def results(config: Path, *arguments: str) -> bytes:
    compare.main(["--config", str(config), "--parallel", "2", *arguments])
    return (config.parent / "report" / WHOLE_TABLE).read_bytes()


def run_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if "tests.compare.fake_run" in " ".join(process.cmdline()) and process.ppid() != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_comparison_of_two_strategies_and_three_seeds_equals_that_of_this_machine(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tables = []
    for engine in ([], ["--engine", "ray", "--address", nodes.address]):
        folder = tmp_path / (engine[1] if engine else "local")
        sections = {key: TINY[key] for key in ("model", "data", "trainer")}
        results(write_file(folder, sections, baseline="ALiBi", seeds=[1, 2, 3]), *engine)
        tables.append({name: (folder / "report" / name).read_bytes() for name in (WHOLE_TABLE, "table.md")})
    assert tables[0] == tables[1]
    assert tables[0][WHOLE_TABLE].count(b"\n") > 6


def test_runs_whose_nodes_and_workers_are_killed_ten_times_have_the_same_results(nodes, tmp_path, monkeypatch):
    use_fake_runs(monkeypatch.setattr, processes=True)
    monkeypatch.setenv("FAKE_STEP", "0.001")
    expected = results(write_file(tmp_path / "local", seeds=[1, 2, 3]))
    config, draw, kills = write_file(tmp_path / "ray", seeds=[1, 2, 3]), random.Random(0), list[str]()
    process = start_command(config, nodes.address)
    while len(kills) < 10:
        time.sleep(draw.uniform(1, 10))
        assert process.poll() is None, process.communicate()[0]
        workers = [psutil.Process(parent) for parent in {run.ppid() for run in run_processes()} - {1}]
        workers = [worker for worker in workers if worker.name().startswith("ray::")]
        if len(kills) % 2 == 0:
            nodes.replace(draw.randint(0, 1))
            kills.append("node")
        elif workers:
            draw.choice(workers).kill()
            kills.append("worker")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert (config.parent / "report" / WHOLE_TABLE).read_bytes() == expected
    print(kills, fits(config))
    assert sum(fits(config).values()) > 6  # some fits were continued


@pytest.mark.parametrize("phase", ["fit", "test", "record"])
def test_a_run_whose_node_is_killed_continues_in_each_phase(nodes, tmp_path, monkeypatch, phase):
    use_fake_runs(monkeypatch.setattr, processes=True)
    one_run: Any = {"seeds": [1], "strategies": {"KerpleLog": {}}}
    expected = results(write_file(tmp_path / "local", **one_run))
    config = write_file(tmp_path / "ray", **one_run)
    process = start_command(config, nodes.address, FAKE_PAUSE=phase, FAKE_STEP="0.01")
    marker = config.parent / f"runs/KerpleLog/seed-1.{phase}"
    while not (marker.exists() and marker.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    nodes.replace(nodes.index(int(marker.read_text())))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert (config.parent / "report" / WHOLE_TABLE).read_bytes() == expected
    assert fits(config) == {"KerpleLog seed-1": 2}  # a finished fit is resumed too, and ends immediately


def test_parts_are_tokenised_on_the_cluster_with_equal_shards(nodes, tmp_path):
    corpus = write_lines(tmp_path / "corpus.jsonl", [f"the number {number} and {number**2}" for number in range(2000)])
    on_ray = partial(tokenise_on_ray, ray_cluster.Cluster("prepare: engine", nodes.address))
    small_build(tmp_path / "local", corpus)
    small_build(tmp_path / "ray", corpus, tokenise_all=on_ray)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(contents(tmp_path / "ray")) > 20


def test_other_versions_folders_and_addresses_are_one_line(nodes, tmp_path, monkeypatch):
    cluster = ray_cluster.Cluster("compare: engine", nodes.address)
    monkeypatch.chdir(tmp_path)
    missing = cluster.task(ray_cluster.versions, 1)
    tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(UserError, match=r"compare: engine: .* has no folder .*, which all nodes must share$"):
        cluster.result(missing())
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(ray_cluster, "versions", lambda: "Python 3.9.1, kerple 0.1.0")
    with pytest.raises(UserError, match=r"has Python 3.*kerple.*, expected Python 3.9.1, kerple 0.1.0; install these"):
        cluster.result(cluster.task(json.dumps, 1)())
    with pytest.raises(UserError, match="cpus, gpus: got 99, 0, expected those of a node, which have"):
        cluster.task(json.dumps, 99)


def test_a_cluster_with_another_python_is_one_line_with_both_versions(monkeypatch):
    import ray

    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.1")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"got host:1, which cannot be used \(Version mismatch: .*: 3.12.1\), exp"):
        ray_cluster.Cluster("compare: engine", "host:1")


COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes with SIGINT ignored
from tests.compare.conftest import use_fake_runs
use_fake_runs(setattr, processes=True)
from kerple.compare import engines
engines.PROCESS = [engines.PROCESS[0], f"import os; os.environ |= {sys.argv[3]}; " + engines.PROCESS[1]]
from kerple.cli.main import main
main(["compare", "--config", sys.argv[1], "--parallel", "2", "--engine", "ray", "--address", sys.argv[2]])
"""


def start_command(config: Path, address: str, **variables: str) -> "subprocess.Popen[str]":
    """Start the comparison, whose runs get the environment variables, and wait until a fit has a checkpoint."""
    variables = {"FAKE_STEP": "1"} | variables
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, "-c", COMMAND, str(config), address, str(variables)], **pipes)
    while not list(config.parent.rglob("last.ckpt")) and process.poll() is None:
        time.sleep(0.2)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_and_the_next_command_continues(nodes, tmp_path, number):
    config = write_file(tmp_path, seeds=[1])
    process = start_command(config, nodes.address)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "to continue, run the command again" in output
    assert not [p for p in run_processes() if "FAKE_STEP" in " ".join(p.cmdline())]


def test_without_its_head_the_comparison_ends_in_one_line(nodes, tmp_path):
    """The last test, because it ends the cluster."""
    import ray

    config = write_file(tmp_path, seeds=[1])
    process = start_command(config, nodes.address)
    ray.shutdown()  # Ray ends a process that is connected to a lost cluster
    for started in nodes.cluster.head_node.all_processes.values():
        for each in started:
            each.process.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "does not answer, expected start the cluster" in output
