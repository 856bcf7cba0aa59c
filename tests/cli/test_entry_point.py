"""Imports of `run.py` before it has read the command, and its messages about incomplete command lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerple.cli.main import SPINS
from kerple.config.files import config_path, with_shipped_configs

PROGRAM = """
import sys
from kerple.cli.main import main
def refused(*commands):
    for arguments in commands:
        try:
            main(arguments)
        except SystemExit as end:
            assert end.code in (None, 0, 2), arguments
    print(*sorted({heavy} & set(sys.modules)))
"""
HEAVY = {"torch", "pytorch_lightning", "torchmetrics", "transformers", "pandas", "matplotlib", "scipy", "tensorboard"}
HEAVY |= {"datasets", "webdataset", "sklearn"}
TABLES = "matplotlib pandas scipy"  # read and drawn by a comparison
# Lightning imports torchmetrics, which imports transformers and scipy
TRAINING = "matplotlib pandas pytorch_lightning scipy tensorboard torch torchmetrics transformers"
LIGHT = [
    ["--help"],
    ["train"],
    [],
    ["inspect", "no/such/folder"],
    ["prepare", "--config=none.yaml"],
    ["prepare", "--x=y"],
]
LIGHT += [
    ["probe", "./x", "--layer=false"],
    ["predict", "--ckpt=x"],
    ["extend", "./x", "--length=y"],
    ["export", "--output=x"],
]


def loaded(*steps: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return the heavy modules that are loaded after each step of wrong commands in one process, and the errors."""
    program = PROGRAM.replace("{heavy}", repr(HEAVY)) + "".join(f"refused(*{step!r})\n" for step in steps)
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return ended.stdout.splitlines()[-len(steps) :], errors


def test_early_mistakes_are_reported_before_slow_imports():
    with_torch = [["fit", "--config", "configs/dmo.yaml"], ["fit", "--model.position=KerpelLog"], ["check", "a.B"]]
    modules, errors = loaded(LIGHT, with_torch)
    assert modules == ["", "torch"]
    assert len(errors) == len(LIGHT) - 1 + len(with_torch)
    assert "configs/dmo.yaml" in errors[-3]
    assert "KerpelLog" in errors[-2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--threads=2", "--debug=false", "demo", "--paralel=2"], TABLES),
        (["compare", "--paralel=2"], TABLES),
        (["test", "--hf=./none", "--model.lenght=3"], "matplotlib pandas torch"),
        (["fit", "--model.layer=3"], TRAINING),
        (["test", "--ckpt_path=none.ckpt"], TRAINING),
        (["validate", "--ckpt_path=none.ckpt"], TRAINING),
        (["plan", "--chip=TPU"], TRAINING),
    ],
)
def test_modules_that_are_loaded_before_a_mistake_is_reported(arguments, expected):
    modules, errors = loaded([arguments])
    assert modules == [expected]
    assert len(errors) == 1


THREADS = """
import os, sys
from kerple.cli.main import main
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
    os.environ.pop(name, None)
main(["--debug", "--help"])
assert "GOMP_SPINCOUNT" not in os.environ  # only a process of a command sets it
for settings in ({}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
    os.environ.update(settings)
    sys.argv[1:] = ["--help"]
    main()
    print(os.environ.pop("GOMP_SPINCOUNT", None))
for arguments in (["--threads=3", "inspect", "no"], ["inspect", "--threads", "2"], ["inspect", "no", "--threads"]):
    try:
        main(arguments)
    except SystemExit:
        print(os.environ["OMP_NUM_THREADS"])
print("torch" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP of torch on Linux")
def test_threads_and_the_time_that_they_spin_are_set_before_torch_is_loaded():
    ended = subprocess.run([sys.executable, "-X", "utf8", "-c", THREADS], capture_output=True, text=True, check=True)
    lines = [line for line in ended.stdout.splitlines() if line in ("None", "True", "False") or line.isdecimal()]
    assert lines == [SPINS, "None", "7", "3", "2", "2", "False"]
    assert "error: threads: got nothing, expected a number from 1 to" in ended.stderr


IN_C = """
import sys
from kerple.cli.main import main
sys.argv[1:] = ["--help"]
main()  # restarts the process in UTF-8
main(["prepare", "--config=größe.yaml"])
main(["fit", "--config=größe.yaml"])
main(["test", "--ckpt_path=logs/é/ALiBi/seed-1235/checkpoints/last.ckpt"])
main(["inspect", "data/köpus-bpe300"])
main(["compare", "--config=猫.yaml"])
"""
CONFIG = """
experiment: é # 猫
model: {position: ALiBi, layers: 1, dim: 8, heads: 2}
data: {class_path: TokenShards, init_args: {corpus: köpus, vocabulary: 300, length: 8, prepare_workers: 1}}
trainer:
  {max_steps: 3, accelerator: cpu, callbacks: [{class_path: Extrapolation, init_args: {lengths: [8], blocks: 1}}]}
"""
COMPARISON = "{name: 猫, base: [größe.yaml], strategies: {ALiBi: {}}, seeds: [1], baseline: ALiBi}"


@pytest.mark.slow
def test_all_characters_work_in_an_ascii_locale(tmp_path):
    (tmp_path / "größe.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "猫.yaml").write_text(COMPARISON, encoding="utf-8")
    (tmp_path / "köpus").mkdir()
    for number in range(40):
        (tmp_path / "köpus" / f"é{number}.txt").write_text(f"猫 {number} " * 40, encoding="utf-8")
    (tmp_path / "program.py").write_text(IN_C, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run([sys.executable, "program.py"], capture_output=True, cwd=tmp_path, env=os.environ | plain)
    assert ended.returncode == 0, ended.stderr.decode()
    assert "猫" in ended.stdout.decode()
    assert "Test metric" not in ended.stdout.decode()  # title of Lightning's table with the same numbers
    assert (tmp_path / "results" / "猫" / "report.html").is_file()


def test_a_closed_pipe_is_not_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-m", "kerple", "--help"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_unbuffered_output_is_written_before_a_kill() -> None:
    """The log of a run that is killed, for example for its memory, ends with the run's last line."""
    program = "import os; from kerple.cli.main import main; main(); print('last line'); os.kill(os.getpid(), 9)"
    command = [sys.executable, "-X", "utf8", "-c", program, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (-9, ["last line"])


def test_shipped_configurations_are_found_in_any_folder_after_the_users_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = config_path("configs/demo.yaml")
    assert Path(demo).is_file()
    assert not Path(demo).is_relative_to(tmp_path)
    assert config_path("configs/none.yaml") == "configs/none.yaml"
    typed = ["fit", "--config", "configs/demo.yaml", "--config=configs/demo.yaml", "--prompt", "configs/demo.yaml"]
    assert with_shipped_configs(typed) == ["fit", "--config", demo, f"--config={demo}", "--prompt", "configs/demo.yaml"]
    assert Path(with_shipped_configs(["--model", "configs/model/162m.yaml"])[1]).is_file()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("{}")
    assert with_shipped_configs(typed) == typed
