"""`TaskData`: the data module that gives Lightning the batches of a task."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.loader import BatchLoader, EvaluationLoader, rank_in
from kerple.tasks.places import abacus
from kerple.tasks.sampling import Examples, HeldOutProblems, Sampler, TrainingProblems, collate
from kerple.tasks.task import Example, Task
from kerple.tasks.vocabulary import BEGIN, CHARACTERS, END_ID, characters_to_ids, ids_to_characters


@dataclass(eq=False)
class TaskData(LightningDataModule):
    """Problems of a task: short ones for training, longer ones for testing (Kazemnejad et al. 2023, arXiv 2305.19466).

    A batch has ``tokens`` (B, T + 1) int64, padded on the right, and ``scored`` (B, T) bool, true for the targets of
    the answer and its end token. Nothing is read from or written to disk. No test example occurs in training;
    `kerple.tasks.sampling` says why.

    Args:
        task: The task, by the name of its class, with its own options below.
        length: Training length in tokens, which some strategies need; at least the length of the longest training
            sequence.
        train_length: Largest length of a training problem; lengths are uniform on 1..train_length.
        test_lengths: Lengths of test problems; null for 1 to twice ``train_length``.
        batch_size: Number of problems in a training batch, on each device.
        eval_batch_size: Number of problems in a batch of validation or test.
        examples: Number of training problems, among which short ones may be equal; afterwards they are repeated in
            another order. With null, new problems are drawn for the whole run.
        validation_examples: Number of validation problems, of training lengths.
        test_examples: Number of test problems of each length, or fewer if not as many exist.
        held_out: Fraction of the problems of training lengths that is kept for testing; the same fraction is kept for
            validation.
        seed: Chooses the training problems; null for the seed of the run (``seed_everything``).
        workers: Number of processes that make training batches; with 0 the training process makes them.
        vocabulary: Number of token ids, at least the number of characters.

    Raises:
        UserError: If a number is out of range, training sequences are longer than ``length``, or the task writes a
            character that is not in the vocabulary.
    """

    task: Task
    length: int
    train_length: int = 20
    test_lengths: list[int] | None = None
    batch_size: int = 64
    eval_batch_size: int = 256
    examples: int | None = None
    validation_examples: int = 256
    test_examples: int = 100
    held_out: float = 0.1
    seed: int | None = None
    workers: int = 0
    vocabulary: int = len(CHARACTERS)

    def __post_init__(self) -> None:
        super().__init__()
        self.lengths = sorted(set(self.test_lengths or range(1, 2 * self.train_length + 1)))
        self.key = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
        self.sampler = Sampler(self.task, self.train_length, self.held_out)
        self._check_options()
        self._check_length()

    def _check_options(self) -> None:
        positive = ("length", "train_length", "batch_size", "eval_batch_size", "validation_examples", "test_examples")
        for name in positive if self.examples is None else (*positive, "examples"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name}: got {getattr(self, name)}, expected a positive number")
        if not 0 < self.held_out < 0.5:
            raise UserError(f"data.held_out: got {self.held_out}, expected a fraction between 0 and 0.5")
        if self.vocabulary < len(CHARACTERS):
            raise UserError(f"data.vocabulary: got {self.vocabulary}, expected at least {len(CHARACTERS)} characters")
        longest = self.task.longest or float("inf")
        for name, lengths in (("train_length", [self.train_length]), ("test_lengths", self.lengths)):
            if lengths[0] < 1 or lengths[-1] > longest:
                raise UserError(f"data.{name}: got {lengths}, expected lengths of 1 to {longest} for {self.task.name}")

    def _check_length(self) -> None:
        samples = [self.sampler.training_problem(self.key, i, self.train_length) for i in range(100)]
        needed = max(len(example.tokens()) - 1 for example in samples)
        if needed > self.length:
            raise UserError(f"data.length: got {self.length}, expected {needed} or more, the tokens of a problem")

    def sample(self, index: int) -> Example:
        """Training problem number ``index``, whose length is uniform on 1..train_length."""
        return self.sampler.training_problem(self.key, index)

    def train_dataloader(self) -> BatchLoader:
        """Training batches of this rank, for the whole run if `trainer.max_steps` says how long it is.

        Raises:
            UserError: Nothing says how long the run is, or there are fewer examples than in a batch.
        """
        rank, world = rank_in(self)
        samples = self.batch_size * world  # in a batch of all ranks
        if self.trainer is not None and self.trainer.max_steps > 0:
            batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches  # one epoch for the whole run
        elif self.examples is None:
            raise UserError("trainer.max_steps: got none, expected a number of steps, or data.examples to end an epoch")
        else:
            batches = self.examples // samples
        if batches < 1:
            raise UserError(f"data.examples: got {self.examples}, expected at least a batch on every device, {samples}")
        dataset = TrainingProblems(self.sampler, self.key, self.batch_size, self.examples, batches, rank, world)
        return BatchLoader(dataset, samples, self.workers)

    def val_dataloader(self) -> EvaluationLoader:
        return self._held_out([self.validation_problems])

    def test_dataloader(self) -> EvaluationLoader:
        """One batch for each rank, because Lightning tests nothing without a batch; measures read `text`."""
        return self._held_out([group[:1] for group in self.test_problems if group][:1])

    def text(self, split: str) -> Examples:
        """The examples of the validation or test split."""
        groups = self.test_problems if split == "test" else [self.validation_problems]
        return Examples(self.task, groups, self.eval_batch_size, self.train_length, self.lengths)

    @cached_property
    def validation_problems(self) -> list[Example]:
        """The validation problems, of training lengths, shortest first; the same for every seed."""
        problems = self.sampler.distinct("validation", self.validation_examples)
        if not problems:
            raise UserError(f"data.held_out: got {self.held_out}, which leaves no validation problem")
        return sorted(problems, key=lambda example: len(example.text))

    @cached_property
    def test_problems(self) -> list[list[Example]]:
        """The test problems of each length, the same for every seed. A short length may have none that is held out."""
        return [self.sampler.distinct("test", self.test_examples, length) for length in self.lengths]

    def _held_out(self, groups: list[list[Example]]) -> EvaluationLoader:
        return EvaluationLoader(HeldOutProblems(groups, self.eval_batch_size, *rank_in(self)))

    def places(self, scheme: str) -> Callable[[Tensor], Tensor]:
        """The function from tokens (B, T) to their places that the network uses.

        Args:
            scheme: ``coupled`` for the task's own places, or ``abacus`` for the place of each digit in its number.

        Raises:
            UserError: If the task has no such places, or they are not causal.
        """
        if scheme == "coupled":
            self._check_causal()
            return self.task.places
        if not self.task.numbers:
            raise UserError(f"data.task: got {self.task.name!r}, expected one with numbers, for Abacus")
        return abacus

    def _check_causal(self) -> None:
        """Raise an error before the first step if a later token changes places: such a model could not generate."""
        tokens = collate([self.sampler.training_problem(self.key, i, self.train_length) for i in range(8)])["tokens"]
        places = self.task.places(tokens)
        for end in range(1, tokens.shape[1]):
            if not torch.equal(self.task.places(tokens[:, :end]), places[:, :end]):
                raise UserError(f"data.task: the places of {self.task.name!r} depend on tokens after {end}")

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt such as ``12+34=``, after the begin token with which a sequence starts."""
        return characters_to_ids(text if text.startswith(BEGIN) else BEGIN + text)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return ids_to_characters(tokens)

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return END_ID
