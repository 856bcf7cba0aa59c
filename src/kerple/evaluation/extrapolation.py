"""`Extrapolation`: perplexity at several evaluation lengths, in `test` and, on a few blocks, after each validation.

The file has more than 300 lines because one class has all the options, each with its sentence and its check.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from rich.console import Console
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation import results
from kerple.evaluation.analysis import log_directory, publish, text_of
from kerple.evaluation.context_gain import ContextGain
from kerple.evaluation.options import checked_lengths, chosen_protocols
from kerple.evaluation.progress_lines import with_progress, within
from kerple.evaluation.protocols import TOKENS_PER_FORWARD, Name, Protocol
from kerple.evaluation.results import Measurement
from kerple.evaluation.segments import DocumentBlocks, shuffled
from kerple.evaluation.typed import data_of, network_of, refuse_shards, untyped


class Extrapolation(Callback):
    """Measures perplexity by several protocols and at several lengths, on the same targets.

    A test batch is one block of ``block_length`` targets. For each length the block is cut into segments, so that every
    target is scored exactly once at every length. Writes ``extrapolation.json`` and a figure into the run's log
    directory, prints a table, and logs ``test/ppl/<protocol>/<length>`` and ``test/bits_per_byte/<protocol>/<length>``.
    The latter divides by the bytes of the scored targets, which the data module's ``token_bytes`` gives. Lengths that
    the strategy cannot represent are reported as skipped. Where the protocols have ``full`` and then ``windowed``,
    ``context_gain.csv`` says what text beyond the window is worth, by position in segments of the longest length.

    After each validation of `fit`, ``val/ppl/full/<length>`` is measured on the first blocks of the validation split.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest.
        block_length: Targets in a block, a multiple of the longest length; None for the longest length itself.
        blocks: Number of blocks of the test split that all devices together score, counted from its beginning; None for
            all. It replaces `limit_test_batches`, which counts for each device: results would depend on their number.
        protocols: Any of full, windowed, sliding, last, per_position.
        window: Number of keys that a query sees in windowed; None for the training length.
        stride: Number of new targets in each step of sliding; at most the shortest length.
        skip: Number of targets at the start of a block that sliding uses as context only, so that all scored targets
            have a full window: at least the longest length minus the stride, or 0.
        k: Number of targets that last scores at the end of each segment; at most the shortest length.
        sampling: ``blocks`` scores the same targets at every length. ``paper`` scores ``segments`` shuffled segments at
            each length, as the paper's code does; the text then differs between lengths, so this is only for
            comparison with the paper's tables.
        segments: Number of segments at each length with ``sampling: paper``.
        seed: Chooses the shuffle of ``sampling: paper``.
        documents: Whether only blocks inside one document are scored, cut from its first token on. Documents shorter
            than a block are left out. It needs a data module with ``stream`` and ``documents``. The file then says
            which blocks are of one document, because reports take documents as independent of each other, not blocks.
        validation_blocks: Largest number of blocks that are scored after each validation; 0 for none.
        tokens_per_forward: Largest number of tokens in one forward pass; a longer segment runs alone.

    Raises:
        UserError: If an option is out of range or two contradict each other. In `setup`, also if the trainer has two of
            these callbacks or limits the batches of several devices, or a split has too few blocks or segments.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        protocols: Sequence[Name] = ("full", "windowed"),
        block_length: int | None = None,
        blocks: int | None = None,
        window: int | None = None,
        stride: int | None = None,
        skip: int = 0,
        k: int | None = None,
        sampling: Literal["blocks", "paper"] = "blocks",
        segments: int = 320,
        seed: int = 0,
        documents: bool = False,
        validation_blocks: int = 4,
        tokens_per_forward: int = TOKENS_PER_FORWARD,
    ) -> None:
        super().__init__()
        self.lengths = checked_lengths(lengths)
        self.block = self.lengths[-1] if block_length is None else block_length
        if self.block < 1 or self.block % self.lengths[-1]:
            raise UserError(
                f"block_length: got {block_length}, expected a multiple of {self.lengths[-1]}, the longest length"
            )
        self.names = tuple(protocols)
        self.options: dict[str, Any] = {"window": window, "stride": stride, "skip": skip, "k": k}
        self.protocols = chosen_protocols(self.names, self.lengths, block=self.block, **self.options)
        for name, number, least in (
            ("blocks", 1 if blocks is None else blocks, 1),
            ("segments", segments, 1),
            ("validation_blocks", validation_blocks, 0),
            ("tokens_per_forward", tokens_per_forward, 1),
        ):
            if number < least:
                raise UserError(f"{name}: got {number}, expected at least {least}")
        if sampling not in ("blocks", "paper"):
            raise UserError(f"sampling: got {sampling!r}, expected 'blocks' or 'paper'")
        if sampling == "paper" and (documents or "sliding" in protocols):
            raise UserError(
                "sampling: got 'paper', whose segments ignore documents and have no text before them for sliding; "
                "use sampling: blocks, or neither documents nor sliding"
            )
        if sampling == "paper" and blocks is not None:
            raise UserError(
                f"blocks: got {blocks}, expected null with sampling: paper; use segments, or sampling: blocks"
            )
        self.sampling, self.segments, self.seed = sampling, segments, seed
        self.blocks, self.documents = blocks, documents
        self.validation_blocks = validation_blocks
        self.tokens_per_forward = tokens_per_forward
        self.measurements: list[Measurement] = []
        self.token_bytes: Tensor | None = None
        self.gain: ContextGain | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = text_of(trainer, self)
        if self.documents and not (getattr(datamodule, "documents", None) and getattr(datamodule, "stream", None)):
            raise UserError(
                f"Extrapolation: documents: got true, but {type(datamodule).__name__} does not know where documents "
                "begin; use TokenShards, or documents: false"
            )
        if sum(isinstance(callback, Extrapolation) for callback in untyped(trainer).callbacks) > 1:
            raise UserError(
                "trainer.callbacks: got more than one Extrapolation, expected one, as they would share the test "
                "batches and their file; test once for each, with another --run_dir"
            )
        datamodule.evaluation_length, datamodule.evaluation_blocks = self.block, self.blocks
        self.protocols = chosen_protocols(
            self.names,
            self.lengths,
            **self.options,
            block=self.block,
            training_length=network_of(pl_module).shape.length,
        )
        # raise now, not after hours of tests, if there is too little text
        if stage == "test":
            if trainer.world_size > 1 and _limited(trainer):
                raise UserError(
                    f"trainer.limit_test_batches: got {trainer.limit_test_batches} for each of {trainer.world_size} "
                    "devices, so that their number would decide what is scored; use the option blocks of Extrapolation"
                )
            if _limited(trainer) and (self.documents or self.sampling == "paper"):
                instead = "segments" if self.sampling == "paper" else "blocks"
                raise UserError(
                    f"trainer.limit_test_batches: got {trainer.limit_test_batches}, but with "
                    f"{'documents: true' if self.documents else 'sampling: paper'} Extrapolation reads no test "
                    f"batches; use its option {instead}"
                )
            for length in self.lengths if self.sampling == "paper" else [self.block]:
                self._text(trainer, length)
        elif stage == "fit" and self.validation_blocks:
            refuse_shards(trainer, "Extrapolation", "set its validation_blocks to 0")
            _blocks(trainer, "validation", self.block)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = self.segments if self.sampling == "paper" else len(self._text(trainer, self.block)[1])
        self.measurements = self._plan(pl_module, self.protocols, groups)
        self.gain = _gain(self.measurements, self.lengths[-1], pl_module) if self.sampling == "blocks" else None
        if hasattr(data_of(trainer), "token_bytes"):
            self.token_bytes = data_of(trainer).token_bytes().to(pl_module.device)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.sampling == "blocks" and not self.documents:
            self._measure(trainer, pl_module, batch, self.measurements, self.gain)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sampling == "paper":
            for length in self.lengths:
                at_length = [m for m in self.measurements if m.length == length]
                self._measure_all(trainer, pl_module, *self._text(trainer, length), at_length)
        elif self.documents:
            self._measure_all(trainer, pl_module, *self._text(trainer, self.block), self.measurements, self.gain)
        _synchronise(self.measurements)
        rows: list[dict[str, Any]] = [] if self.gain is None else self.gain.compute()  # of all devices
        partly = self.sampling == "blocks" and not self.documents and _limited(trainer)
        for m in self.measurements:
            results.check_counts(m, m.length if self.sampling == "paper" else self.block, partly)
            if m.skipped is None and m.protocol.name != "per_position":
                name = f"{m.protocol.label}/{m.length}"
                pl_module.log(f"test/ppl/{name}", m.loss.perplexity(), sync_dist=True)
                if self.token_bytes is not None:
                    pl_module.log(f"test/bits_per_byte/{name}", m.loss.bits_per_byte(), sync_dist=True)
        directory = log_directory(trainer)
        if trainer.is_global_zero:
            self._report(trainer, pl_module, directory)
        publish(trainer, "context_gain", None, rows)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.validation_blocks or trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.state.stage == RunningStage.SANITY_CHECKING:
            return
        blocks = _blocks(trainer, "validation", self.block, self.validation_blocks)
        measurements = self._plan(pl_module, [Protocol("full")], len(blocks))
        self._measure_all(trainer, pl_module, blocks, range(len(blocks)), measurements)
        _synchronise(measurements)
        for m in measurements:
            results.check_counts(m, self.block, partly=False)
            if m.skipped is None:
                pl_module.log(f"val/ppl/full/{m.length}", m.loss.perplexity(), sync_dist=True)

    def _plan(self, pl_module: LightningModule, protocols: Sequence[Protocol], groups: int) -> list[Measurement]:
        return results.plan(
            protocols,
            self.lengths,
            groups=groups,
            reach=results.reach(network_of(pl_module)),
            device=pl_module.device,
        )

    def _measure(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: dict[str, Any],
        measurements: Sequence[Measurement],
        gain: ContextGain | None = None,
    ) -> None:
        index = int(batch["index"])
        if index < 0:  # a filler, because another rank has one block more
            return
        with trainer.precision_plugin.forward_context():
            results.measure(
                network_of(pl_module),
                batch["tokens"],
                index,
                within(trainer, measurements),
                self.tokens_per_forward,
                self.token_bytes,
                gain,
            )

    def _measure_all(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        blocks: Any,
        order: Sequence[int],
        measurements: Sequence[Measurement],
        gain: ContextGain | None = None,
    ) -> None:
        for i in with_progress(trainer, range(trainer.global_rank, len(order), trainer.world_size)):
            tokens = blocks[order[i]]["tokens"].to(pl_module.device)[None]
            self._measure(trainer, pl_module, {"tokens": tokens, "index": i}, measurements, gain)

    def _text(self, trainer: Trainer, length: int) -> tuple[Any, Sequence[int]]:
        """The blocks that `test` reads at a length, and the indices of those it scores, in order."""
        if self.documents:
            blocks = DocumentBlocks(data_of(trainer).stream("test"), data_of(trainer).documents("test"), length)
        else:
            blocks = _blocks(trainer, "test", length)
        if self.sampling == "paper":
            return blocks, shuffled(len(blocks), self.segments, self.seed).tolist()
        if self.blocks is not None and len(blocks) < self.blocks:
            raise UserError(
                f"blocks: got {self.blocks}, but the test split has only {len(blocks)} of {length} targets; lower it, "
                "or use a larger split"
            )
        return blocks, range(len(blocks) if self.blocks is None else self.blocks)

    def _report(self, trainer: Trainer, pl_module: LightningModule, directory: Path) -> None:
        network = network_of(pl_module)
        strategy = results.strategy(network)
        about: dict[str, Any] = {}
        if self.documents:
            blocks, order = self._text(trainer, self.block)
            about["block_document"] = blocks.documents[list(order)].tolist()
        results.write(
            directory / "extrapolation.json",
            self.measurements,
            strategy=strategy,
            training_length=network.shape.length,
            split="test",
            block=self.block,
            sampling=self.sampling,
            documents=self.documents,
            precision=str(trainer.precision),
            **about,
        )
        drawn = results.figure(self.measurements, network.shape.length, f"{strategy}: perplexity by evaluation length")
        drawn.savefig(directory / "extrapolation.png", dpi=150)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("test/extrapolation", drawn, global_step=trainer.global_step)
        Console().print(results.table(self.measurements, network.shape.length))


def _limited(trainer: Trainer) -> bool:
    # to Lightning, 1.0 means all batches and 1 means one
    return trainer.limit_test_batches != 1 or isinstance(trainer.limit_test_batches, int)


def _blocks(trainer: Trainer, split: str, length: int, limit: int | None = None) -> Any:
    blocks = data_of(trainer).blocks(split, length, limit)
    if not len(blocks):
        raise UserError(
            f"lengths: got {length}, but the {split} split has no block of that many targets; use a larger split or "
            "shorter lengths"
        )
    return blocks


def _gain(measurements: Sequence[Measurement], length: int, pl_module: LightningModule) -> ContextGain | None:
    """For the length, if it is measured in full and then with a window that takes something away."""
    names = [m.protocol.name for m in measurements if m.length == length and m.skipped is None]
    window = max((m.protocol.window or 0 for m in measurements), default=0)
    if "windowed" not in names or "full" not in names[: names.index("windowed")] or window >= length:
        return None
    return ContextGain(length, window).to(pl_module.device)


def _synchronise(measurements: Sequence[Measurement]) -> None:
    for m in measurements:
        m.loss.sync()
        if m.by_position is not None:
            m.by_position.sync()
