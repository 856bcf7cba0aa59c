"""Where a run writes: each in a folder of its own, never over an earlier one."""

from glob import escape
from itertools import count
from pathlib import Path


def fit_directory(
    run_dir: str | None, logs: str, experiment: str, strategy: str, seed: int | bool | None, ckpt_path: str | None
) -> Path:
    """The folder a fit writes to.

    Args:
        run_dir: Asked for by name, or None for ``<logs>/<experiment>/<strategy>/seed-<seed>``.
        logs: Root of all runs.
        experiment: What belongs together.
        strategy: Class name of the positional strategy.
        seed: Of the run.
        ckpt_path: ``last`` resumes in the newest version that holds a last checkpoint; a checkpoint inside a version
            resumes in that version; anything else starts a new one.

    Returns:
        A folder that does not exist yet, or the one to resume in.
    """
    wanted = Path(run_dir) if run_dir else Path(logs) / experiment / strategy / f"seed-{seed}"
    versions = [wanted] if wanted.exists() else []
    versions += sorted(wanted.parent.glob(f"{escape(wanted.name)}_v*"), key=lambda path: _version(path.name))
    if ckpt_path == "last":
        resumable = [path for path in versions if (path / "checkpoints" / "last.ckpt").is_file()]
        return resumable[-1] if resumable else _unused(wanted)
    if ckpt_path is not None:
        for path in versions:
            if Path(ckpt_path).resolve().is_relative_to(path.resolve()):
                return path
    return _unused(wanted)


def test_directory(run_dir: str | None, ckpt_path: str, command: str) -> Path:
    """The folder a test or validation writes to: ``test``, ``test_v1``, … beside the checkpoint's folder."""
    if run_dir:
        return _unused(Path(run_dir))
    checkpoints = Path(ckpt_path).parent
    run = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
    return _unused(run / command)


def _version(name: str) -> int:
    number = name.rpartition("_v")[2]
    return int(number) if number.isdigit() else -1


def _unused(path: Path) -> Path:
    if not path.exists():
        return path
    return next(p for n in count(1) if not (p := path.with_name(f"{path.name}_v{n}")).exists())
