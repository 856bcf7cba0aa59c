"""`Search`: selection of the context-extension method with the lowest loss."""

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
from kerple.config.files import read_mapping
from kerple.data.evaluation_text import Text, TextBlocks, shuffled
from kerple.extend.methods import Method
from kerple.hf.pretrained_model_reader import read_network
from kerple.measure.far_context import counterparts, document_groups, far_context_texts, mean_interval
from kerple.measure.runner import Runner
from kerple.model.stored_model import build_strategy

FEWEST, MOST = 2, 16  # smallest number of blocks at any length, and largest number at the longest length
VALIDATION, TEST = "validation", "test"


@dataclass
class Search:
    """A search for the context-extension method with the lowest validation loss at N tokens.

    A block is N + 1 tokens of one document, and no two blocks are from the same document. At length ℓ the model reads
    the last ℓ inputs of a block, and the loss is taken over the last k = L/4 targets. The targets are therefore the
    same at every length. The mean loss of each block is written to a file as soon as it is measured, so that a stopped
    search can continue.

    Args:
        path: Path or name of the model, see `kerple.hf.pretrained_files.find_model`.
        methods: The methods; the first leaves the model unchanged.
        length: Training length L in tokens.
        target: Target length N in tokens.
        bound: Largest accepted rise of the loss at L, as a fraction of the loss of the unchanged model.
        folder: Folder of the files with the losses.
        texts: The ``validation`` text and the ``test`` text. `choose` reads only the former.
        runner: Device and precision.

    Attributes:
        effects: Comparisons that `choose` has made, by label of the method and length. ``effect``: mean difference of
            the losses and its 95% interval. ``against``: label of the method that is subtracted. ``blocks``: number
            of blocks. ``dropped``: whether the method was dropped.
    """

    path: str
    methods: list[Method]
    length: int
    target: int
    bound: float
    folder: Path
    texts: Mapping[str, Text]
    runner: Runner
    effects: dict[str, dict[int, dict[str, Any]]] = field(init=False, default_factory=dict)
    _networks: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.k = max(1, self.length // 4)
        doublings = ((self.target - 1) // self.length).bit_length()  # number of L, 2 L, 4 L, … below N
        self.lengths = [*(self.length << i for i in range(doublings)), self.target]

    @cached_property
    def blocks(self) -> dict[str, tuple[TextBlocks, list[int]]]:
        """Up to 32 random blocks of each text, and for each block the index of its counterpart.

        The counterpart is a block from another group of documents (`document_groups`), such as another package. With
        ``context="foreign"``, `losses` replaces distant inputs of a block by inputs of the counterpart. Documents that
        overlap with the training text by more than half are left out.

        Raises:
            UserError: If fewer than two documents of more than N tokens remain in a text.
        """
        result = {}
        for split, text in self.texts.items():
            blocks = text.document_blocks(self.target, overlap=0.5, per_document=1)
            order = shuffled(len(blocks), min(len(blocks), 2 * MOST), 0)
            assert blocks.documents is not None
            result[split] = blocks.subset(order), counterparts(document_groups(text, blocks.documents[order].tolist()))
        return result

    @cached_property
    def has_bos(self) -> bool:
        """Whether the model reads a BOS token before the inputs."""
        return self.network(self.methods[0]).bos is not None

    def losses(self, method: Method, split: str, length: int, blocks: int, context: str = "own") -> NDArray[np.float64]:
        """Return the mean loss of each of the first ``blocks`` blocks in nats per target, (blocks,).

        Losses that are already in a file are not measured again.

        Args:
            method: The method.
            split: ``validation`` or ``test``.
            length: Number of inputs ℓ.
            blocks: Number of blocks.
            context: ``own`` to read the block, or ``foreign`` to replace all inputs before the last L by inputs of the
                block's counterpart.

        Raises:
            UserError: If a loss is not finite.
        """
        # up to L inputs, an ``as_trained`` method has the losses of the unchanged model, so these are measured once
        method = self.methods[0] if method.as_trained and length + self.has_bos <= self.length else method
        path = self._record_path(method, split, length, context)
        all_blocks, counterpart = self.blocks[split]
        record = read_mapping(path) if path.exists() else {"losses": [], "seconds": []}
        for i in range(len(record["losses"]), blocks):
            network = self.network(method)
            start = time.monotonic()
            own, other = all_blocks[i], all_blocks[counterpart[i]]
            tokens = far_context_texts(own, other, length, min(length - 1, self.length))[context]
            with torch.inference_mode(), self.runner.autocast():
                losses = network.losses(tokens[None].to(self.runner.device), self.k, method.visibility)
            record["losses"].append(float(losses.double().mean()))
            record["seconds"].append(seconds := time.monotonic() - start)
            if not losses.isfinite().all():
                raise UserError(f"model: the loss with {method.label!r} is not finite; check the weights for NaN")
            write(path, json.dumps(record), durable=False)
            if seconds > 1:
                print(f"{method.label}, {split}, {length:,} tokens: block {i + 1}, {seconds:.0f} s", flush=True)
        return np.array(record["losses"][:blocks])

    def block_budget(self, minutes: float) -> tuple[int, float]:
        """Return the number of blocks at N that the search reads in ``minutes``, and its estimated time in seconds.

        The number is at least `FEWEST`. It is at most `MOST`, and at most the number of blocks of each text. The
        unchanged model is timed at L. The estimate assumes that time grows with the square of the length, which is an
        upper bound, and that half of the methods are dropped before N. It includes the final comparison on test text
        (`kerple.extend.comparison.compare_best`): four inputs of N tokens and three of L tokens per block.
        """
        self.losses(self.methods[0], VALIDATION, self.length, 1)
        measured = read_mapping(self._record_path(self.methods[0], VALIDATION, self.length))["seconds"][0]
        seconds = measured * (np.array(self.lengths) / self.length) ** 2
        per_block = float(len(self.methods) * (seconds.sum() - seconds[-1] / 2) + 4 * seconds[-1] + 3 * seconds[0])
        count = min(max(int(60 * minutes / per_block), FEWEST), MOST, *(len(b) for b, _ in self.blocks.values()))
        return count, count * per_block

    def choose(self, blocks: int) -> list[Method]:
        """Return the methods that meet the bound at L and are not significantly worse than the best at longer lengths.

        The unchanged model is not among them. They are sorted by their loss at N, the best first. At each length, a
        method is measured on `FEWEST` blocks first, and then on more: ``blocks`` at N, and up to twice as many at
        shorter lengths. A method is dropped

        - at L, after `FEWEST` blocks, if the whole 95% interval of the rise of its loss is above the bound;
        - at L, after all blocks, if the mean rise is above the bound;
        - beyond L, if its paired difference to the method with the lowest mean loss has a 95% interval above 0.

        Raises:
            UserError: If no method meets the bound.
        """
        unchanged, *remaining = self.methods
        for length in self.lengths:
            at_training_length = length == self.length
            available = len(self.blocks[VALIDATION][0])
            most = blocks if length == self.target else min(2 * blocks, available)
            for count in sorted({FEWEST, most}):
                losses = {m.label: self.losses(m, VALIDATION, length, count) for m in remaining}
                remaining.sort(key=lambda m: losses[m.label].mean())
                best = unchanged if at_training_length else remaining[0]
                reference = self.losses(best, VALIDATION, length, count)
                limit = self.bound * float(reference.mean()) if at_training_length else 0.0
                for m in list(remaining):
                    effect = mean_interval(losses[m.label] - reference)
                    dropped = effect[0 if at_training_length and count == most else 1] > limit
                    comparison = {"effect": effect, "against": best.label, "blocks": count, "dropped": dropped}
                    self.effects.setdefault(m.label, {})[length] = comparison
                    if dropped:
                        remaining.remove(m)
                        higher = f"loss higher than that of {best.label} by {effect[0]:.4f} nats"
                        print(f"{m.label}: dropped at {length:,} tokens ({higher})", flush=True)
                if not remaining:
                    given = f"got {self.bound:.3%}, but all methods raise the loss at {length:,} tokens by more"
                    raise UserError(f"bound: {given}; increase --bound")
        return remaining

    def network(self, method: Method) -> Any:
        """Return the model with the RoPE scaling and the positional strategy of a method, but without its visibility.

        Only the network of the last call stays in memory.
        """
        if method.label not in self._networks:
            self._networks.clear()  # frees memory before the next network is read
            options = (method.scaling, method.factor, build_strategy(method.position) if method.position else None)
            network = read_network(self.path, self.length, *options, rope_options=method.rope_options)
            self._networks[method.label] = network.to(self.runner.device)
        return self._networks[method.label]

    def _record_path(self, method: Method, split: str, length: int, context: str = "own") -> Path:
        return self.folder / f"{split}-{length}-{context}-{re.sub('[^a-z0-9]+', '-', method.label.lower())}.json"
