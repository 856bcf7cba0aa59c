"""`Search`: measures the loss of each method on text, and drops methods that are clearly worse."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping
from kerple.data.text import Text, TextBlocks, shuffled
from kerple.extend.methods import Method
from kerple.measure.far_context import counterparts, document_groups, far_context_texts, mean_interval
from kerple.measure.runner import Runner

FEWEST, MOST = 2, 16  # fewest blocks at any length, and most blocks at the longest length
VALIDATION, TEST = "validation", "test"
Losses = NDArray[np.float64]


@dataclass
class Search:
    """A search for the method with the lowest loss at N tokens, which also measures losses on test text.

    A block is N + 1 tokens of one document, and no two blocks are of the same document. At length ℓ the model reads the
    last ℓ inputs of a block, and the loss is that of the last k = L/4 targets. The targets are therefore the same at
    every length. The mean loss of each block is written to a file as soon as it is measured. A search that continues
    after a stop takes it from there.

    Args:
        path: The model, as a name for `kerple.hf.source.find_model`.
        methods: The methods; the first leaves the model unchanged.
        length: Training length L.
        target: Length N.
        bound: Largest rise of the loss at L, as a fraction.
        folder: Folder of the records.
        texts: The text of ``validation`` and of ``test``.
        runner: Device and precision.
        effects: The comparisons of `choose`, by label and length: ``effect`` (the mean difference of losses and its
            95% interval), ``against`` (the label of the reference), ``blocks`` (their number) and ``dropped``.
    """

    path: str
    methods: list[Method]
    length: int
    target: int
    bound: float
    folder: Path
    texts: Mapping[str, Text]
    runner: Runner
    effects: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    _loaded: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.k = max(1, self.length // 4)
        doublings = (self.target // self.length - 1).bit_length()
        self.lengths = [*(self.length << i for i in range(doublings)), self.target]  # L, 2 L, 4 L, …, N

    @cached_property
    def blocks(self) -> dict[str, tuple[TextBlocks, list[int]]]:
        """Blocks of each text in random order, and for each block the index of a block of another group of documents.

        Raises:
            UserError: If a text has fewer than two documents of more than N tokens.
        """
        result = {}
        for split, text in self.texts.items():
            blocks = text.document_blocks(self.target, overlap=0.5, per_document=1)
            order = shuffled(len(blocks), min(len(blocks), 2 * MOST), 0)
            assert blocks.documents is not None
            groups = document_groups(text, blocks.documents[order].tolist())
            result[split] = blocks.chosen(order), counterparts(groups)
        return result

    def losses(self, method: Method, split: str, length: int, blocks: int, context: str = "own") -> Losses:
        """Mean loss of the targets of each of the first blocks, (blocks,) fp64 in nats; recorded losses are reused.

        Args:
            method: The method.
            split: The text.
            length: Number of inputs.
            blocks: Number of blocks.
            context: ``own``, or ``foreign`` to take all inputs before the last L from another document.

        Raises:
            UserError: If a loss is not finite.
        """
        method = self.methods[0] if method.as_trained and length <= self.length else method
        path, (own_blocks, others) = self._record(method, split, length, context), self.blocks[split]
        record = read_mapping(path) if path.exists() else {"losses": [], "seconds": []}
        for i in range(len(record["losses"]), blocks):
            network, start = self.network(method), time.monotonic()
            own, other = own_blocks[i], own_blocks[others[i]]
            tokens = far_context_texts(own, other, length, min(length - 1, self.length))[context]
            with torch.inference_mode(), self.runner.autocast():
                losses = network.losses(tokens[None].to(self.runner.device), self.k, method.visibility)
            record["losses"].append(float(losses.double().mean()))
            record["seconds"].append(seconds := time.monotonic() - start)
            if not losses.isfinite().all():
                raise UserError(f"model: the loss of {method.label} is not finite; check the weights for NaN")
            write(path, json.dumps(record), durable=False)
            if seconds > 1:
                print(f"{method.label}, {split}, {length:,} tokens: block {i + 1}, {seconds:.0f} s", flush=True)
        return np.array(record["losses"][:blocks])

    def plan(self, minutes: float) -> tuple[int, float]:
        """The number of blocks at N that can be read in a time, at least `FEWEST`, and their time in seconds.

        The unchanged model is timed at L. The estimate assumes that time grows with the square of the length, which is
        an upper bound, and that half of the methods are dropped.
        """
        self.losses(self.methods[0], VALIDATION, self.length, 1)
        measured = read_mapping(self._record(self.methods[0], VALIDATION, self.length))["seconds"][0]
        seconds = measured * (np.array(self.lengths) / self.length) ** 2
        block = float(len(self.methods) * (seconds.sum() - seconds[-1] / 2) + 4 * seconds[-1] + 3 * seconds[0])
        most = min(MOST, *(len(blocks) for blocks, _ in self.blocks.values()))
        blocks = min(max(int(60 * minutes / block), FEWEST), most)
        return blocks, blocks * block

    def choose(self, blocks: int) -> list[Method]:
        """The methods that meet the bound at L and are not clearly worse at N, by validation text; the best is first.

        Each length is read with `FEWEST` blocks first. At L a method is dropped if its loss rises by more than the
        bound; after the first blocks only if the 95% interval of the rise is above the bound. Beyond L a method is
        dropped if the paired 95% interval of its loss minus the lowest loss is above 0.

        Raises:
            UserError: If no method meets the bound.
        """
        unchanged, *remaining = self.methods
        for length in self.lengths:
            trained, available = length == self.length, len(self.blocks[VALIDATION][0])
            most = blocks if length == self.target else min(2 * blocks, available)
            for count in sorted({FEWEST, most}):
                losses = {m.label: self.losses(m, VALIDATION, length, count) for m in remaining}
                remaining.sort(key=lambda m: losses[m.label].mean())
                best = unchanged if trained else remaining[0]
                reference = self.losses(best, VALIDATION, length, count)
                limit = self.bound * float(reference.mean()) if trained else 0.0
                for m in list(remaining):
                    effect = mean_interval(losses[m.label] - reference)
                    dropped = effect[0 if trained and count == most else 1] > limit
                    about = {"effect": effect, "against": best.label, "blocks": count, "dropped": dropped}
                    self.effects.setdefault(m.label, {})[length] = about
                    if dropped:
                        remaining.remove(m)
                        print(f"{m.label}: not read beyond {length:,} tokens", flush=True)
                if not remaining:
                    given = f"got {100 * self.bound:g}%, but every method raises the loss by more"
                    raise UserError(f"bound: {given}; give a larger one")
        return remaining

    def network(self, method: Method) -> Any:
        """The network of a method; only the last one is kept in memory."""
        if method.label not in self._loaded:
            self._loaded.clear()  # frees memory before the next network is read
            self._loaded[method.label] = method.network(self.path, self.length).to(self.runner.device)
        return self._loaded[method.label]

    def _record(self, method: Method, split: str, length: int, context: str = "own") -> Path:
        return self.folder / f"{split}-{length}-{context}-{re.sub('[^a-z0-9]+', '-', method.label.lower())}.json"
