"""`Needle`: whether a model finds a number that is hidden in a long text, by depth and length."""

import json
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from kerple.analyses.haystack import ANSWER, NOISE, Kind, hidden, prompt, recall
from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, log_directory, publish, strategy_name
from kerple.evaluation.results import reach
from kerple.evaluation.typed import data_of, network_of
from kerple.model.generation import generate


class Needle(Analysis):
    """Measures the share of hidden values that the model names when it generates greedily, at each depth and length.

    The problems and the score, ``string_match_all``, are those of RULER (Hsieh et al. 2024, arXiv 2404.06654). Writes
    ``<kind>.csv`` (length, depth, problems, found), a heat map ``<kind>.png``, and ``<kind>.json``, which has a row of
    metric ``accuracy`` for each length, for `compare`. The data must be text, that is `TokenShards`.

    Args:
        kind: ``niah_single_1``, ``niah_single_2``, ``niah_multikey_1`` or ``niah_multivalue``.
        lengths: Numbers of tokens of haystack, needles, question and answer together.
        depths: Shares of the haystack that come before the needle, 0..1.
        problems: Number of problems at each depth and length.
        haystack: ``noise`` for RULER's five sentences, or ``corpus`` for the test split. None takes RULER's choice:
            noise for niah_single_1, text for the others.
        seed: Chooses keys, numbers and places, the same for every model.

    Raises:
        UserError: If an option is out of range, or the data is not text.
    """

    name = "needle"

    def __init__(
        self,
        kind: Kind = "niah_single_1",
        lengths: Sequence[int] = (256, 512, 1024),
        depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
        problems: int = 4,
        haystack: Literal["noise", "corpus"] | None = None,
        seed: int = 1235,
    ) -> None:
        if not lengths or min(lengths) < 1 or problems < 1 or not depths:
            raise UserError(
                f"Needle: got lengths {list(lengths)}, depths {list(depths)}, problems {problems}; expected positive "
                "numbers, and at least one of each"
            )
        super().__init__(max(lengths), blocks=1)
        for depth in depths:
            hidden(kind, depth, np.random.default_rng(0))
        if haystack not in (None, "noise", "corpus"):
            raise UserError(f"Needle: haystack: got {haystack!r}, expected noise, corpus, or null for RULER's choice")
        self.kind = self.name = kind
        self.lengths, self.depths = sorted(set(lengths)), sorted(set(depths))
        self.problems, self.seed = problems, seed
        self.haystack = haystack or ("noise" if kind == "niah_single_1" else "corpus")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not hasattr(data_of(trainer), "encode") or not hasattr(data_of(trainer), "stream"):
            raise UserError(
                f"Needle: got data {type(data_of(trainer)).__name__}, expected text; use data TokenShards, or drop "
                "this callback"
            )

    def impossible(self, pl_module: LightningModule) -> str | None:
        return None  # `analyse` leaves out the lengths that are too long

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bound = reach(network_of(pl_module))
        lengths = [length for length in self.lengths if bound is None or length <= bound]
        cells = list(product(range(len(lengths)), range(len(self.depths)), range(self.problems)))
        found = torch.zeros(len(lengths), len(self.depths), dtype=torch.float64, device=pl_module.device)
        for i, d, number in cells[trainer.global_rank :: trainer.world_size]:
            with trainer.precision_plugin.forward_context():
                found[i, d] += self._try(data_of(trainer), pl_module, lengths[i], self.depths[d], number)
        found = trainer.strategy.reduce(found, reduce_op="sum").cpu()
        rows = [
            {"length": length, "depth": depth, "problems": self.problems, "found": float(found[i, d])}
            for i, length in enumerate(lengths)
            for d, depth in enumerate(self.depths)
        ]
        figure = self._figure(found / self.problems, lengths, pl_module) if lengths else None
        publish(trainer, self.kind, figure, rows)
        directory = log_directory(trainer)
        if trainer.is_global_zero:
            count = self.problems * len(self.depths)
            about = {"protocol": self.kind, "metric": "accuracy", "count": count}
            summed = [
                {**about, "length": n, "sum": float(f.sum()), "value": float(f.sum()) / count}
                for n, f in zip(lengths, found, strict=True)
            ]
            skipped = [
                {"protocol": self.kind, "length": length, "reason": f"the strategy has only {bound} positions"}
                for length in self.lengths
                if length not in lengths
            ]
            content = {"haystack": self.haystack, "rows": summed, "skipped": skipped}
            (directory / f"{self.kind}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _try(self, data: Any, pl_module: LightningModule, length: int, depth: float, number: int) -> float:
        # seeded by the cell, so that what is hidden does not depend on the order or the number of devices
        rng = np.random.default_rng([self.seed, length, round(depth * 10**6), number])
        problem = hidden(self.kind, depth, rng)
        if self.haystack == "noise":
            sentence = data.encode(NOISE)
            haystack = sentence * -(-length // len(sentence))
        else:
            stream = data.stream("test")
            haystack = stream.read(int(rng.integers(len(stream) - length)), length).tolist()
        tokens = torch.tensor([prompt(problem, length, haystack, data.encode)], device=pl_module.device)
        written = continued(network_of(pl_module), tokens, ANSWER * len(problem.values))
        return recall(data.decode(written), problem.values)

    def _figure(self, share: Tensor, lengths: Sequence[int], pl_module: LightningModule) -> Figure:
        drawn = Figure(figsize=(1.6 + 0.9 * len(lengths), 1.6 + 0.5 * len(self.depths)), layout="constrained")
        axes = drawn.add_subplot()
        image = axes.imshow(share.T.numpy(), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(self.depths)), [f"{d:.0%}" for d in self.depths])
        for i, d in product(range(len(lengths)), range(len(self.depths))):
            axes.text(i, d, f"{float(share[i, d]):.0%}", ha="center", va="center", fontsize=8)
        axes.set(xlabel="length (tokens)", ylabel="depth of the needle")
        drawn.suptitle(f"{strategy_name(pl_module)}: {self.kind} in {self.haystack}", fontsize=10)
        drawn.colorbar(image, label="values found")
        return drawn


def continued(network: Any, tokens: Tensor, steps: int) -> list[int]:
    """The ``steps`` tokens that a network generates greedily after the tokens (1, T) int64."""
    if hasattr(network, "continued"):  # a pretrained model generates by its own code, with its own cache
        return network.continued(tokens, steps)
    return [int(token) for token in generate(network, tokens, steps)]
