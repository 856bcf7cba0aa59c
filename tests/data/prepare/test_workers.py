import os
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from kerple.base.errors import UserError
from kerple.data.prepare import workers
from tests.data.conftest import contents, small_build


def die(*_: object) -> None:
    os._exit(1)


@pytest.mark.slow
def test_a_preparation_in_which_a_process_dies_is_continued(json_lines, prepared, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "tokenise", die)
        with pytest.raises(UserError, match=r"data\.prepare_workers: got 2, one of which ended unexpectedly"):
            small_build(tmp_path, json_lines, prepare_workers=2)
    small_build(tmp_path, json_lines, prepare_workers=2)
    assert contents(tmp_path) == contents(prepared)


@pytest.mark.timeout(60)  # instead of the project's ten minutes, because the failure is a wait without end
def test_processes_end_if_the_preparation_is_interrupted_while_it_starts_one(monkeypatch):
    start, started = SpawnProcess.start, []

    def interrupted(process):
        start(process)
        started.append(process)
        if len(started) == 2:  # before the pool knows the process
            raise KeyboardInterrupt

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(workers.tokenise_parts(2, None, [(number, []) for number in range(3)]))
    assert not [process for process in started if process.join(20) or process.is_alive()]


@pytest.mark.slow
def test_processes_end_if_the_preparation_is_killed(tmp_path):
    (tmp_path / "main.py").write_text("""import time; from kerple.data.prepare import workers
def parts():
    yield 0, []; print('started', flush=True); time.sleep(60)
if __name__ == '__main__':
    list(workers.tokenise_parts(2, None, parts()))""")
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen([sys.executable, tmp_path / "main.py"], env=environment, stdout=subprocess.PIPE)
    process.stdout.readline()
    running: list[psutil.Process] = []
    while len(running) < 2:  # one of them is Python's resource tracker
        running = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    time.sleep(1)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(running, timeout=10)[1]
