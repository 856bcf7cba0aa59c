"""The wheel works in an empty folder without a checkout, and the packages of conda's environment can be installed."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
OUTSIDE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # so that no checkout is imported
TOY = [
    "--data.corpus=texts.jsonl", "--data.vocabulary=300", "--data.length=16", "--data.batch_size=4", "--model.dim=16",
    "--model.layers=1", "--model.heads=2", "--trainer.max_steps=2", "--trainer.accelerator=cpu",
    "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false",
    "--trainer.callbacks=[]",
]  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command, in an environment with the libraries of this one and without this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True)
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "environment" / "lib" / version / "site-packages"
    # a plain path, so that the .pth files in that folder, such as that of an editable checkout, are not read
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.with_name("kerple")


def run(program: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], cwd=folder, env=OUTSIDE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_fit_test_and_compare_from_an_empty_folder(program: Path, tmp_path: Path) -> None:
    installed = run(program.with_name("python"), tmp_path, "-c", "import kerple; print(kerple.__file__)")
    assert str(program.parents[1]) in installed
    texts = [f"document {n}: " + " ".join(f"word{(n * i) % 97}" for i in range(200)) for n in range(300)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(program, tmp_path, "fit", "--config", "configs/demo.yaml", *TOY)
    assert (tmp_path / "logs/demo/KerpleLog/seed-1235/checkpoints/last.ckpt").is_file()
    toy = "{name: toy, base: [configs/demo.yaml], seeds: [1], baseline: NoPE, strategies: {NoPE: {}, ALiBi: {}}}"
    (tmp_path / "toy.yaml").write_text(toy)
    callbacks = [{"class_path": "Extrapolation", "init_args": {"lengths": [16, 32], "blocks": 2}}]
    test = f"--test={json.dumps({'trainer.callbacks': callbacks})}"
    flags = f"--flags={json.dumps(dict(flag[2:].split('=') for flag in TOY))}"
    assert "NoPE" in run(program, tmp_path, "compare", "--config", "toy.yaml", flags, test)
    assert (tmp_path / "results/toy/report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # downloads torch and its dependencies
def test_the_pip_section_of_the_conda_environment_resolves_and_trains(tmp_path: Path) -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (packages,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    assert packages[0] in (ROOT / "requirements.txt").read_text().split("\n")
    venv.create(tmp_path / "environment", with_pip=True)
    program = tmp_path / "environment/bin/kerple"
    install = [str(program.with_name("python")), "-m", "pip", "install", "--quiet", "-r", "/dev/stdin"]
    subprocess.run(install, input="\n".join(packages), text=True, cwd=ROOT, env=OUTSIDE, check=True)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "document {n}{" word" * n}"}}\n' for n in range(300)))
    run(program, tmp_path, "fit", "--config", str(ROOT / "configs/demo.yaml"), *TOY)
