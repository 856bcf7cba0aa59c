"""`TaskData`: the data module of algorithmic tasks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from kerple.base.errors import UserError, require
from kerple.base.processor_cores import check_workers
from kerple.data.loader import TrainingLoader, batches_of_epoch, batches_of_run, rank_and_world_size
from kerple.tasks.sampling import Examples, HeldOutProblems, Sampler, collate
from kerple.tasks.task import Example, Task
from kerple.tasks.token_places import abacus
from kerple.tasks.vocabulary import BEGIN, CHARACTERS, characters_to_ids, ids_to_characters


@dataclass(eq=False)
class TaskData(LightningDataModule):
    """Problems of a task: short ones for training, longer ones for testing (Kazemnejad et al. 2023, arXiv 2305.19466).

    A batch has ``tokens`` (B, T + 1) int64, padded on the right, and ``scored`` (B, T) bool, true for the targets of
    the answer and its end token. B is the number of problems, and T + 1 the number of tokens of the longest one.
    Nothing is read from or written to disk. No test problem occurs in training; see `kerple.tasks.sampling`.

    Args:
        task: Class name of the task.
        length: Training length in tokens, which some strategies use. A training problem has at most this many inputs.
        train_length: Largest length of a training problem, in units of the task such as digits, not in tokens. Lengths
            are uniform on 1..train_length.
        test_lengths: Lengths of test problems; null for 1 to twice ``train_length``.
        batch_size: Number of problems in a training batch on each device.
        eval_batch_size: Largest number of problems in a batch of the validation or the test.
        examples: Number of training problems. After all of them have been used, they are repeated in a new order.
            Some short ones may be equal. null draws a new problem for each sample of the run.
        validation_examples: Largest number of validation problems. Their lengths are 1..train_length, as in training.
        test_examples: Largest number of test problems of each length.
        held_out: Fraction of the problems up to ``train_length`` that belong to the test split. The validation split
            has the same fraction.
        seed: Seed of the training problems; null for the seed of the run (``seed_everything``).
        workers: Number of processes that draw training batches ahead; 0 to draw them in the training process.
        vocabulary: Number of rows of the model's embedding, at least the number of characters in
            `kerple.tasks.vocabulary`.

    Raises:
        UserError: An option is out of range, training problems have more inputs than ``length``, or a character of a
            problem is not in the vocabulary.
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
        require(self.test_lengths != [], "data.test_lengths", "none", "one length or more, or null")
        self.lengths = sorted(set(self.test_lengths or range(1, 2 * max(1, self.train_length) + 1)))
        self.sample_seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
        sizes = ("length", "train_length", "batch_size", "eval_batch_size", "validation_examples", "test_examples")
        numbers = {name: getattr(self, name) for name in (*sizes, "examples")}
        for name, value in (numbers | {"test_lengths": self.lengths[0]}).items():
            require(value is None or value >= 1, f"data.{name}", value, "1 or more")
        check_workers("data.workers", self.workers)
        require(0 <= self.sample_seed < 1 << 64, "data.seed", self.sample_seed, "0 to 2^64 - 1")
        self.sampler = Sampler(self.task, self.train_length, self.held_out)
        require(0 < self.held_out < 0.5, "data.held_out", self.held_out, "a fraction above 0 and below 0.5")
        characters, longest = len(CHARACTERS), self.task.longest
        require(self.vocabulary >= characters, "data.vocabulary", self.vocabulary, f"at least {characters}")
        for name, value in (("train_length", self.train_length), ("test_lengths", self.lengths[-1])):
            expected = f"at most {longest} for {self.task.name}"
            require(longest is None or value <= longest, f"data.{name}", value, expected)
        lengths = (len(example.tokens()) - 1 for example in self._longest_problems(100))
        needed = max(self.task.most_inputs(self.train_length) or 0, *lengths)
        expected = f"{needed} or more for problems of the train_length {self.train_length}; a test may have another"
        require(needed <= self.length, "data.length", self.length, expected)

    def _longest_problems(self, count: int) -> list[Example]:
        """Return the first ``count`` training problems of length ``train_length``."""
        return [self.sampler.training_problem(self.sample_seed, i, self.train_length) for i in range(count)]

    def train_dataloader(self) -> TrainingLoader:
        """Return the training batches of this rank.

        If `trainer.max_steps` is set, the loader has one epoch, the whole run. If not, an epoch has as many full
        batches as ``examples`` problems fill. The next epoch starts with the remaining problems, and continues with
        all problems in a new order.

        Raises:
            UserError: Neither `trainer.max_steps` nor ``examples`` is set, or ``examples`` is smaller than
                one batch on every rank.
        """
        rank, world_size = rank_and_world_size(self)
        if self.trainer is not None and self.trainer.max_steps > 0:
            batches = batches_of_run(self.trainer)
        elif self.examples is None:
            raise UserError("trainer.max_steps: is not set; set it, or set data.examples, the size of an epoch")
        else:
            samples = self.batch_size * world_size
            batches = self.examples // samples
            require(batches >= 1, "data.examples", self.examples, f"at least {samples}, a batch on each device")
        read = partial(self.sampler.training_batch, self.sample_seed, self.examples)
        epoch = batches_of_epoch(getattr(self.trainer, "limit_train_batches", None), batches)
        return TrainingLoader(read, self.batch_size, batches, rank, world_size, self.workers, epoch=epoch)

    def val_dataloader(self) -> HeldOutProblems:
        """Return this rank's batches of the validation problems."""
        return HeldOutProblems([self.validation_problems], self.eval_batch_size, *rank_and_world_size(self))

    def test_dataloader(self) -> HeldOutProblems:
        """Return a batch of one test problem, because Lightning skips a test without batches.

        Measures do not use this batch. They read the test problems through `text`.
        """
        first = [group[:1] for group in self.test_problems if group][:1]
        return HeldOutProblems(first, self.eval_batch_size, *rank_and_world_size(self))

    def text(self, split: str) -> Examples:
        """Return the examples of the test split if ``split`` is ``test``, or else those of the validation split."""
        groups = self.test_problems if split == "test" else [self.validation_problems]
        return Examples(self.task, groups, self.eval_batch_size, self.train_length, self.lengths)

    @cached_property
    def validation_problems(self) -> list[Example]:
        """Validation problems of lengths 1..train_length, shortest text first. They do not depend on the seed."""
        problems = self.sampler.distinct("validation", self.validation_examples)
        if not problems:
            raise UserError(f"data.held_out: got {self.held_out}, which leaves no problem for validation; increase it")
        return sorted(problems, key=lambda example: len(example.text))

    @cached_property
    def test_problems(self) -> list[list[Example]]:
        """Test problems of each of ``lengths``, independent of the seed. A short length may have no test problem."""
        groups = [self.sampler.distinct("test", self.test_examples, length) for length in self.lengths]
        given = f"{self.lengths}, which have no test problem"
        require(any(groups), "data.test_lengths", given, "a length with test problems; add longer ones")
        return groups

    def places(self, scheme: str) -> Callable[[Tensor], Tensor]:
        """Return a function that maps token ids (B, T) int64 to the places of the tokens, (B, T) int64.

        Args:
            scheme: ``coupled`` for the places of `Task.places`, or ``abacus`` for the index of each digit, from 1, in
                its number.

        Raises:
            UserError: The task has no such places, or a place depends on later tokens, which do not exist yet during
                generation.
        """
        if scheme == "abacus":
            expected = "a task with numbers for Abacus, such as Addition"
            require(self.task.numbers, "data.task", f"{self.task.name!r}", expected)
            return abacus
        tokens = collate(self._longest_problems(8))["tokens"]
        places = self.task.places(tokens)
        for end in range(1, tokens.shape[1]):
            given = f"{self.task.name!r}, whose method `places` changes places when token {end} is appended"
            equal = torch.equal(self.task.places(tokens[:, :end]), places[:, :end])
            require(equal, "data.task", given, "places that stay; correct the method, or use another model.position")
        return self.task.places

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt such as ``12+34=``. A begin token is put first if the prompt has none."""
        return characters_to_ids(text if text.startswith(BEGIN) else BEGIN + text)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, without padding."""
        return ids_to_characters(tokens)
