"""`Provenance`: a record of the code, the packages and the command of a run."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.training.trainer_access import log_directory

GIT = ["git", "-C", str(Path(__file__).parent)]


class Provenance(Callback):
    """Writes ``provenance/<n>/`` into the folder of a run; n is 0 for the first start and grows with each resumption.

    - ``run.json``: time, command line, working folder, git revision, whether files were changed or added since this
      revision, names of added files, checkpoint from which the run resumes, number of devices, id of the SLURM job.
    - ``lock.txt``: all installed packages with their versions.
    - ``changes.patch``: the changes since the revision, if there are any, without the content of added files.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory = log_directory(trainer)  # on every rank
        if stage != "fit" or not trainer.is_global_zero:
            return
        root = directory / "provenance"
        starts = [int(path.name) for path in root.glob("*") if path.name.isdigit()]
        folder = root / str(max(starts, default=-1) + 1)
        folder.mkdir(parents=True)
        changes = git("diff", "HEAD")
        added = git("ls-files", "--others", "--exclude-standard", "--full-name", ":/").splitlines()
        record = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [sys.executable, *sys.argv],
            "folder": os.getcwd(),
            "revision": git("rev-parse", "HEAD").strip() or None,
            "resumed_from": str(trainer.ckpt_path) if trainer.ckpt_path else None,
            "devices": trainer.world_size,
            "job": os.environ.get("SLURM_JOB_ID"),
            "changed": bool(changes or added),
            "added": added,
        }
        (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (folder / "lock.txt").write_text("".join(f"{line}\n" for line in _installed_packages()), encoding="utf-8")
        if changes:
            (folder / "changes.patch").write_text(changes, encoding="utf-8")


@cache  # the packages of a process do not change, and reading them takes a sixth of the time of a tiny run
def _installed_packages() -> list[str]:
    return sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()}, key=str.lower)


def git(*arguments: str) -> str:
    """Return the output of a git command in the folder of this code; an empty string outside a repository."""
    try:
        result = subprocess.run([*GIT, *arguments], capture_output=True, encoding="utf-8", errors="replace", timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""
