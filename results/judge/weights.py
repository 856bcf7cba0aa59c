"""Measures that the plan "dilution" makes on the weights of each run: a factor at test time, and copying.

The comparisons configs/compare/dilution.yaml and dilution-heads.yaml make them in the test of each run, so that they
are part of its record.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.evaluation_text import ShardText, Text, TextBlocks
from kerple.measure.far_context import document_groups
from kerple.measure.measure import Measure, ordered_lengths, require_positive
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.positions import Position, Temperature
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Wrapper


class WithTemperature(Wrapper):
    """A trained strategy whose scores are also multiplied by the factor of a `Temperature`.

    Args:
        position: The trained strategy.
        temperature: The factor.
    """

    def __init__(self, position: Position, temperature: Temperature) -> None:
        super().__init__(position)
        self.temperature = temperature

    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        q, k = self.position.transform_qk(q, k, state, positions)
        return self.temperature.transform_qk(q, k, None, positions)


@contextmanager
def temperature_in_global_layers(network: Transformer, temperature: Temperature | None) -> Iterator[None]:
    """Context in which scores of layers without a window have the factor of a `Temperature`; None changes nothing."""
    trained = list(network.positions)
    if temperature is not None:
        for i, position in enumerate(trained):
            if position.window is None:
                network.positions[i] = WithTemperature(position, temperature).eval()
    try:
        yield
    finally:
        for i, position in enumerate(trained):
            network.positions[i] = position


def blocks_of_validation(text: ShardText, length: int, limit: int) -> TextBlocks:
    """Return at most ``limit`` blocks of the validation text, spread evenly over it; at most four of a document."""
    blocks = ShardText(text.folder, "validation").document_blocks(length, per_document=4)
    count = min(limit, len(blocks))
    return blocks.subset(np.linspace(0, len(blocks) - 1, count).round().astype(int).tolist())


@dataclass
class FactorAtTestTime(Measure):
    """Own loss of the last targets with a factor of the scores at test time, whose scale is chosen on validation text.

    The factor is Llama 4's, ``1 + scale · log(1 + ⌊n / L⌋)``, in the layers without a window. n is the number of keys
    that a query sees, and L the training length. The scale with the lowest loss on validation text at the
    longest length is used on the test text. The targets on test text and their inputs are those of the context *own* of
    `kerple.measure.far_context.FarContext` with the same options.

    The result has ``factor.csv`` (split, scale, length, loss), and sums of losses with the protocol ``factor_own<k>``.

    Args:
        lengths: Evaluation lengths in tokens. The longest is the length of a block.
        k: Number of targets at the end of a block.
        scales: Scales, positive numbers.
        validation_blocks: Number of blocks of validation text, spread evenly over it; at most four of a document.
        overlap: Largest overlap of a test document with the training text.
        blocks_per_group: Number of test blocks of each group of documents; None for all.
        blocks_per_document: Largest number of test blocks of each document; None for all.

    Raises:
        UserError: If there is no scale, or a number is not positive.
    """

    lengths: Sequence[int]
    k: int = 64
    scales: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4)
    validation_blocks: int = 60
    overlap: float = 0.5
    blocks_per_group: int | None = None
    blocks_per_document: int | None = None

    name: ClassVar[str] = "factor"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)

    def __post_init__(self) -> None:
        self.lengths = ordered_lengths(self)
        require_positive(self, "k", "validation_blocks", "blocks_per_group", "blocks_per_document")
        if not self.scales or min(self.scales) <= 0:
            raise UserError(f"FactorAtTestTime: scales: got {list(self.scales)}, expected positive numbers")

    def check(self, network: Any, text: Any) -> None:
        super().check(network, text)
        if not isinstance(text, ShardText):
            raise UserError(f"FactorAtTestTime: data: got {text.name}, expected shards, which have a validation split")
        self._validation(text)
        self._test(text)

    def measure(self, network: Transformer, text: ShardText, runner: Runner) -> Result:
        longest = self.lengths[-1]
        rows = []

        def score(split: str, blocks: TextBlocks, lengths: Sequence[int], scale: float) -> dict[int, Any]:
            losses = {length: runner.losses(len(blocks)) for length in lengths}
            temperature = Temperature(network.shape, scale=scale) if scale else None
            with temperature_in_global_layers(network, temperature):
                for i, tokens in runner.blocks(blocks):
                    for length, loss in losses.items():
                        with runner.autocast():
                            loss.update(network.losses(tokens[:, -length - 1 :], self.k), i)
            runner.synchronise(*losses.values())
            for length, loss in losses.items():
                mean = float(loss.nll.sum() / loss.targets.sum())
                rows.append({"split": split, "scale": scale, "length": length, "loss": mean})
            return losses

        validation = self._validation(text)
        for scale in (0.0, *self.scales):
            score("validation", validation, [longest], scale)
        chosen = min(rows[1:], key=lambda row: row["loss"])["scale"]
        blocks = self._test(text)
        losses = score("test", blocks, self.lengths, chosen)
        assert blocks.documents is not None
        documents = blocks.documents.tolist()
        groups = document_groups(text, documents)
        about = {"strategy": network.name, "split": text.split, "k": self.k, "block": longest, "scale": chosen}
        about |= {"block_document": documents, "documents": True, "precision": runner.precision}
        about |= {"groups": [groups[documents.index(document)] for document in dict.fromkeys(documents)]}
        sums = [row for length, loss in losses.items() for row in loss.rows(f"factor_own{self.k}", length)]
        report = f"factor at test time: scale {chosen:g} has the lowest loss on validation text"
        return Result(self.name, {self.name: rows}, sums=sums, about=about, report=report)

    def _validation(self, text: ShardText) -> TextBlocks:
        return blocks_of_validation(text, self.lengths[-1], self.validation_blocks)

    def _test(self, text: Text) -> TextBlocks:
        limits = self.blocks_per_group, self.blocks_per_document
        return text.document_blocks(self.lengths[-1], None, self.overlap, *limits)


@dataclass
class RepeatedTokens(Measure):
    """Loss of random tokens when they occur for the first time, and when they are repeated. It reads no text.

    An input has ``distance`` random tokens, and then again the first ``k`` of them. Only the last k - 1 targets are
    scored, so that the token before each scored target has occurred before. The same targets are scored in inputs in
    which other random tokens replace the first ``k``.

    The result has ``repeated_tokens.csv`` (distance, first, repeated): mean losses in nats.

    Args:
        distances: Distances in tokens between both occurrences, at least ``k``.
        k: Number of repeated tokens.
        inputs: Number of inputs for each distance.

    Raises:
        UserError: If a number is out of range.
    """

    distances: Sequence[int] = (64, 512, 1024)
    k: int = 64
    inputs: int = 32

    name: ClassVar[str] = "repeated_tokens"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)

    def __post_init__(self) -> None:
        require_positive(self, "inputs")
        if self.k < 2 or not self.distances or min(self.distances) < self.k:
            given = f"got k {self.k} and distances {list(self.distances)}"
            raise UserError(f"RepeatedTokens: {given}, expected distances of at least k, and k of at least 2")

    def measure(self, network: Transformer, text: Text, runner: Runner) -> Result:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for distance in self.distances:
            size = (self.inputs, distance)
            random, other = (torch.randint(network.head.out_features, size, generator=generator) for _ in range(2))
            repeated = torch.cat([random, random[:, : self.k]], 1)
            first = torch.cat([other[:, : self.k], repeated[:, self.k :]], 1)
            losses = {"first": runner.losses(), "repeated": runner.losses()}
            for i, _ in runner.part(repeated):
                for name, tokens in (("first", first), ("repeated", repeated)):
                    with runner.autocast():
                        losses[name].update(network.losses(tokens[i : i + 1].to(runner.device), self.k - 1), 0)
            runner.synchronise(*losses.values())
            means = {name: float(loss.nll.sum() / loss.targets.sum()) for name, loss in losses.items()}
            rows.append({"distance": distance, **means})
        return Result(self.name, {self.name: rows})
