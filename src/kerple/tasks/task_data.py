"""`TaskData`: the Lightning data module of a task."""

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
    the answer and its end token. Nothing is read from or written to disk. No test example occurs in training; see
    `kerple.tasks.sampling`.

    Args:
        task: Class name of the task.
        length: Training length in tokens, at least that of the longest training sequence. Some strategies use it.
        train_length: Largest length of a training problem; lengths are uniform on 1..train_length.
        test_lengths: Lengths of test problems; null for 1 to twice ``train_length``.
        batch_size: Number of problems in a training batch on each device.
        eval_batch_size: Number of problems in a batch of validation or test.
        examples: Number of training problems, which are then repeated in another order. Short problems may occur
            twice. null draws new problems for the whole run.
        validation_examples: Number of validation problems, of training lengths.
        test_examples: Largest number of test problems of each length.
        held_out: Fraction of the problems of training lengths in the test split. The validation split has the same
            fraction.
        seed: Seed of the training problems; null for the seed of the run (``seed_everything``).
        workers: Number of processes that prepare training batches; with 0 the training process prepares them.
        vocabulary: Number of token ids, at least the number of characters.

    Raises:
        UserError: If a number is out of range, training sequences are longer than ``length``, or a character of the
            task is not in the vocabulary.
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
        self.sample_seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
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
        samples = [self.sampler.training_problem(self.sample_seed, i, self.train_length) for i in range(100)]
        needed = max(len(example.tokens()) - 1 for example in samples)
        if needed > self.length:
            raise UserError(f"data.length: got {self.length}, expected {needed} or more, the length of a problem")

    def sample(self, index: int) -> Example:
        """Return training problem number ``index``, whose length is uniform on 1..train_length."""
        return self.sampler.training_problem(self.sample_seed, index)

    def train_dataloader(self) -> BatchLoader:
        """Return the training batches of this rank, for the whole run if `trainer.max_steps` is set.

        Raises:
            UserError: If neither `trainer.max_steps` nor ``examples`` is set, or there are fewer examples than in a
                batch.
        """
        rank, world = rank_in(self)
        samples = self.batch_size * world  # in a batch of all ranks
        if self.trainer is not None and self.trainer.max_steps > 0:
            batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches  # one epoch for the whole run
        elif self.examples is None:
            raise UserError("trainer.max_steps: got none, expected a number of steps, or data.examples for an epoch")
        else:
            batches = self.examples // samples
        if batches < 1:
            raise UserError(f"data.examples: got {self.examples}, expected at least {samples}, a batch on each device")
        dataset = TrainingProblems(self.sampler, self.sample_seed, self.batch_size, self.examples, batches, rank, world)
        return BatchLoader(dataset, samples, self.workers)

    def val_dataloader(self) -> EvaluationLoader:
        return self._held_out([self.validation_problems])

    def test_dataloader(self) -> EvaluationLoader:
        """Return one batch per rank, because Lightning tests nothing without a batch. Measures use `text`."""
        return self._held_out([group[:1] for group in self.test_problems if group][:1])

    def text(self, split: str) -> Examples:
        """Return the examples of the validation or test split."""
        groups = self.test_problems if split == "test" else [self.validation_problems]
        return Examples(self.task, groups, self.eval_batch_size, self.train_length, self.lengths)

    @cached_property
    def validation_problems(self) -> list[Example]:
        """Validation problems of training lengths, shortest first, equal for all seeds."""
        problems = self.sampler.distinct("validation", self.validation_examples)
        if not problems:
            raise UserError(f"data.held_out: got {self.held_out}, which leaves no validation problem; increase it")
        return sorted(problems, key=lambda example: len(example.text))

    @cached_property
    def test_problems(self) -> list[list[Example]]:
        """Test problems of each length, equal for all seeds. A short length may have none."""
        return [self.sampler.distinct("test", self.test_examples, length) for length in self.lengths]

    def _held_out(self, groups: list[list[Example]]) -> EvaluationLoader:
        return EvaluationLoader(HeldOutProblems(groups, self.eval_batch_size, *rank_in(self)))

    def places(self, scheme: str) -> Callable[[Tensor], Tensor]:
        """Return the function from tokens (B, T) to places for the network.

        Args:
            scheme: ``coupled`` for the places of the task, or ``abacus`` for the place of each digit in its number.

        Raises:
            UserError: If the task has no such places, or they are not causal.
        """
        if scheme == "coupled":
            self._check_causal()
            return self.task.places
        if not self.task.numbers:
            raise UserError(f"data.task: got {self.task.name!r}, expected a task with numbers for Abacus")
        return abacus

    def _check_causal(self) -> None:
        """Raise a UserError if places depend on later tokens, because generation would be impossible."""
        problems = [self.sampler.training_problem(self.sample_seed, i, self.train_length) for i in range(8)]
        tokens = collate(problems)["tokens"]
        places = self.task.places(tokens)
        for end in range(1, tokens.shape[1]):
            if not torch.equal(self.task.places(tokens[:, :end]), places[:, :end]):
                expected = "places that do not depend on later tokens"
                raise UserError(f"data.task: got {self.task.name!r}, expected {expected}; they differ at token {end}")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt such as ``12+34=``, with the begin token of every sequence."""
        return characters_to_ids(text if text.startswith(BEGIN) else BEGIN + text)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        return ids_to_characters(tokens)

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return END_ID
