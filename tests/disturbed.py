"""Fits in separate processes that tests kill, and callbacks that record and interrupt them."""

import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from pytorch_lightning import Callback, LightningModule, Trainer

from tests.toy import QUIET

ROOT = Path(__file__).parents[1]
# a server process imports torch and builds the parser once, and forks the other processes
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.parser_ahead"])
WORDS = ["alpha", "beta", "gamma", "delta", "kernel", "distance", "length", "token", "bias", "head"]


class Record(Callback):
    """Appends a line for each micro-batch (number, loss, tokens) and for each validation to a file of its rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        tokens = batch["tokens"].tolist()
        self._write(trainer, ["batch", trainer.fit_loop.total_batch_idx, outputs["loss"].item(), tokens])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, ["validation", trainer.global_step, trainer.callback_metrics["val/loss"].item()])

    def _write(self, trainer: Trainer, row: list[Any]) -> None:
        with open(Path(self.folder) / f"rank{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


class Interrupt(Callback):
    """Sends a signal to its own process, or raises an error, at the n-th call of a hook on one rank."""

    def __init__(self, hook: str, call: int, number: int = signal.SIGKILL, rank: int = 0) -> None:
        super().__init__()
        self.call, self.number, self.rank = call, number, rank
        setattr(self, hook, self._hook)

    def _hook(self, trainer: Trainer, *_: Any) -> None:
        self.call -= 1
        if self.call == 0 and trainer.global_rank == self.rank:
            if not self.number:
                raise RuntimeError("interrupted")
            os.kill(os.getpid(), self.number)


def interruption(hook: str, call: int, number: int = signal.SIGKILL, rank: int = 0) -> list[dict[str, Any]]:
    options = {"hook": hook, "call": call, "number": int(number), "rank": rank}
    return [{"class_path": "tests.disturbed.Interrupt", "init_args": options}]


class Fit:
    """A small run in a new folder. Each `start` is a new process that continues the run, on ``processes`` processes.

    ``config`` has the options of model, data and trainer that differ from the defaults below.
    """

    def __init__(self, folder: Path, shards: Path, processes: int = 1, **config: dict[str, Any]) -> None:
        folder.mkdir()
        self.folder, self.processes = folder, processes
        model = {"position": "KerpleLog", "layers": 1, "dim": 16, "heads": 2, "lr": 0.01, "dropout": 0.2}
        data = {"corpus": None, "directory": str(shards), "vocabulary": 300, "length": 16, "batch_size": 4}
        data |= {"validation_segments": 8}
        trainer = {
            **QUIET, "devices": processes, "strategy": "auto" if processes == 1 else "ddp",
            "max_steps": 12, "accumulate_grad_batches": 2, "val_check_interval": 6, "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 1, "log_every_n_steps": 1, "gradient_clip_val": 1.0, "logger": False,
            "use_distributed_sampler": False,
        }  # fmt: skip
        self.config: dict[str, Any] = {
            "seed_everything": 7,
            "output": str(folder / "run"),
            "model": model | config.get("model", {}),
            "data": {"class_path": "TokenShards", "init_args": data | config.get("data", {})},
            "trainer": {"callbacks": []} | trainer | config.get("trainer", {}),
        }

    def write_config(self, *callbacks: dict[str, Any]) -> Path:
        """Write the configuration with these callbacks in addition to its own, and return the path of the file."""
        trainer = self.config["trainer"]
        config = self.config | {"trainer": trainer | {"callbacks": [*trainer["callbacks"], *callbacks]}}
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self, interruption: list[dict[str, Any]] | None = None) -> int:
        """Run the fit and return the exit status of the first process, negative if a signal killed it."""
        checkpoint = {"class_path": "LastCheckpoint", "init_args": {"every_n_train_steps": 3}}
        record = {"class_path": "tests.disturbed.Record", "init_args": {"folder": str(self.folder)}}
        path = self.write_config(record, *(interruption or []), checkpoint)
        arguments = ["fit", "--config", str(path), "--ckpt_path", "last"]
        port = find_free_network_port()
        started = [
            PROCESSES.Process(target=_run, args=(arguments, self.folder, rank, self.processes, port))
            for rank in range(self.processes)
        ]
        for process in started:
            process.start()
        started[0].join()
        for process in started[1:]:
            process.join(0 if started[0].exitcode == -signal.SIGKILL else 60)
            process.kill()  # it would wait for the killed first process
        return started[0].exitcode

    def rows(self, rank: int = 0) -> dict[tuple[str, int], Any]:
        """Return the records by kind and number. A batch that was trained twice must have equal records."""
        rows: dict[tuple[str, int], Any] = {}
        for line in (self.folder / f"rank{rank}.jsonl").read_text().splitlines():
            kind, number, *values = json.loads(line)
            assert rows.setdefault((kind, number), values) == values, (kind, number)
        return rows

    def checkpoint(self) -> dict[str, Any]:
        # a run that was killed before its first checkpoint leaves a folder that is not resumed
        (last,) = self.folder.glob("run*/checkpoints/last.ckpt")
        return torch.load(last, weights_only=True)


def _run(arguments: list[str], folder: Path, rank: int, processes: int, port: int) -> None:
    log = open(folder / f"log{rank}.txt", "a")  # noqa: SIM115 (until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    # a shell starts background processes with SIGINT ignored, and nohup with SIGHUP ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    torch.set_num_threads(1)
    # the workers of a loader must be children of this process, so that they notice its end
    multiprocessing.set_start_method("fork", force=True)
    if processes > 1:  # as torchrun sets them
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    from kerple.cli.main import main

    main(arguments)


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two nested containers of tensors are equal bit for bit."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that two checkpoints have equal weights, optimiser, schedule, random state and step."""
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "random_states", "global_step"):
        assert same(ours[key], theirs[key]), key


def prepare(folder: Path, documents: int = 60, words: tuple[int, int] = (200, 200), part: int = 10**6) -> Path:
    """Write token shards of random documents with this least and greatest number of words; return their folder."""
    from tests.data.conftest import small_build, write_lines

    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(*words))) + f" {i}" for i in range(documents)]
    small_build(folder / "shards", write_lines(folder / "corpus.jsonl", texts), part)
    return folder / "shards"
