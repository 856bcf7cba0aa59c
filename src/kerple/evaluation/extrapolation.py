"""`Extrapolation`: perplexity at several evaluation lengths, in `test` and, on a few blocks, after each validation."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from torch.utils.data import Subset

from kerple.base.errors import UserError
from kerple.evaluation import results
from kerple.evaluation.analysis import Analysis, device_blocks, publish, synchronise
from kerple.evaluation.context_gain import ContextGain
from kerple.evaluation.extrapolation_figures import figure, gain_figure, table
from kerple.evaluation.measurement import Measurement, measure
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.protocols import Name, Protocol, choose_protocols, ordered_lengths
from kerple.evaluation.segments import DocumentBlocks, shuffled
from kerple.evaluation.typed import (
    data_of,
    log_directory,
    max_positions,
    network_of,
    refuse_shards,
    strategy_name,
    trained_with,
)


class Extrapolation(Analysis):
    """Measures perplexity by several protocols and at several lengths, on the same targets.

    Blocks of ``block_length`` targets are read. For each length a block is cut into segments, so that every target is
    scored exactly once at every length. Writes the sums of the losses and a figure into the run's log directory, prints
    a table, and logs ``test/ppl/<protocol>/<length>`` and ``test/bits_per_byte/<protocol>/<length>``. The latter
    divides by the bytes of the scored targets, which the data module's ``token_bytes`` gives. Lengths that the strategy
    cannot represent are reported as skipped. If the protocols are ``full`` and then ``windowed``,
    ``context_gain.csv`` has the fall in loss that text beyond the window brings, by position in segments of the longest
    length.

    After each validation of `fit`, ``val/ppl/full/<length>`` is measured on the first blocks of the validation split.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest.
        protocols: Any of full, windowed, keep_first, sliding, last, per_position.
        block_length: Targets in a block, a multiple of the longest length; None for the longest length itself.
        blocks: Number of blocks of the test split that all devices together score, counted from its beginning; None for
            all.
        window: Number of keys that a query sees in windowed and keep_first; None for the training length.
        keep_first: Number of first tokens of a segment that a query sees beside its window in keep_first; at most the
            shortest length.
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
            than a block are left out. It needs a data module with ``stream`` and ``documents``. Reports treat
            documents, not blocks, as independent of each other.
        overlap: With ``documents``, the largest share of a document's runs of 32 tokens that may also be in the
            training text. Documents with more are left out, and reports give their number. Only a data module with
            ``test_documents`` knows these shares.
        validation_blocks: Largest number of blocks that are scored after each validation; 0 for none.

    Raises:
        UserError: If an option is out of range or two contradict each other. In `setup`, if the data is not text or too
            little. In `test`, if a loss is not finite.
    """

    name = "extrapolation"
    one_length = False

    def __init__(
        self,
        lengths: Sequence[int],
        protocols: Sequence[Name] = ("full", "windowed"),
        block_length: int | None = None,
        blocks: int | None = None,
        window: int | None = None,
        keep_first: int | None = None,
        stride: int | None = None,
        skip: int = 0,
        k: int | None = None,
        sampling: Literal["blocks", "paper"] = "blocks",
        segments: int = 320,
        seed: int = 0,
        documents: bool = False,
        overlap: float = 0.5,
        validation_blocks: int = 4,
    ) -> None:
        self.lengths = ordered_lengths(lengths)
        self.block_length = self.lengths[-1] if block_length is None else block_length
        super().__init__(self.block_length, blocks)
        if self.block_length % self.lengths[-1]:
            raise UserError(f"block_length: got {block_length}, expected a multiple of {self.lengths[-1]}, the longest")
        if sampling == "paper" and (documents or blocks is not None or "sliding" in protocols):
            raise UserError(
                "sampling: got 'paper', which takes the option segments in place of blocks, ignores documents and has "
                "no text before its segments for sliding; use sampling: blocks, or drop these"
            )
        self.names = tuple(protocols)
        self.options: dict[str, Any] = {"window": window, "keep_first": keep_first}
        self.options |= {"stride": stride, "skip": skip, "k": k}
        choose_protocols(self.names, self.lengths, self.block_length, **self.options)  # an error now, not in `setup`
        self.sampling, self.segments, self.seed = sampling, segments, seed
        self.documents, self.overlap = documents, overlap
        self.validation_blocks = validation_blocks
        self.measurements: list[Measurement] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "test":
            if trainer.limit_test_batches != 1:  # 1.0, Lightning's default, is no limit
                raise UserError(
                    f"trainer.limit_test_batches: got {trainer.limit_test_batches}, but Extrapolation reads blocks, "
                    "not batches; use its option blocks, or segments with sampling: paper"
                )
            for length in self.lengths if self.sampling == "paper" else []:
                self.text(trainer, length)
        elif stage == "fit" and self.validation_blocks:
            refuse_shards(trainer, "Extrapolation", "set its validation_blocks to 0")
            self._validation_text(trainer)

    def text(self, trainer: Trainer, length: int) -> Any:
        if self.documents:
            data = data_of(trainer)
            if not (getattr(data, "documents", None) and getattr(data, "stream", None)):
                raise UserError(
                    f"Extrapolation: documents: got true, but {type(data).__name__} does not know where documents "
                    "begin; use TokenShards, or documents: false"
                )
            tested = self._test_documents(trainer)
            allowed = None if tested is None else tested["overlap"].to_numpy() <= self.overlap
            return DocumentBlocks(data.stream("test"), data.documents("test"), length, self.blocks, allowed)
        blocks = super().text(trainer, length)
        return Subset(blocks, shuffled(len(blocks), self.segments, self.seed)) if self.sampling == "paper" else blocks

    def _test_documents(self, trainer: Trainer) -> Any:
        """Name, group and overlap of each test document, if the data module knows them."""
        return data.test_documents() if hasattr(data := data_of(trainer), "test_documents") else None

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training_length, data = trained_with(pl_module), data_of(trainer)
        protocols = choose_protocols(
            self.names, self.lengths, self.block_length, **self.options, training_length=training_length
        )
        token_bytes = data.token_bytes().to(pl_module.device) if hasattr(data, "token_bytes") else None
        gain = self._context_gain(protocols, pl_module)
        self.measurements = []
        about: dict[str, Any] = {}
        for length in self.lengths if self.sampling == "paper" else [self.block_length]:
            text, lengths = self.text(trainer, length), [length] if self.sampling == "paper" else self.lengths
            self.measurements += self._measure(trainer, pl_module, text, protocols, lengths, token_bytes, gain)
            if self.documents:
                about |= {"block_document": text.documents.tolist(), "overlapping": text.left_out}
                if (tested := self._test_documents(trainer)) is not None:
                    about["groups"] = tested["group"][list(dict.fromkeys(text.documents.tolist()))].tolist()
        synchronise(*(m.loss for m in self.measurements))
        for m in self.measurements:
            if not m.skip_reason and m.protocol.name != "per_position":
                name = f"{m.protocol.label}/{m.length}"
                pl_module.log(f"test/ppl/{name}", m.loss.perplexity(), sync_dist=True)
                if token_bytes is not None:
                    pl_module.log(f"test/bits_per_byte/{name}", m.loss.bits_per_byte(), sync_dist=True)
        strategy, directory = strategy_name(pl_module), log_directory(trainer)
        if trainer.is_global_zero:
            skipped = [
                {"protocol": m.protocol.label, "length": m.length, "reason": m.skip_reason}
                for m in self.measurements
                if m.skip_reason
            ]
            about |= {
                "strategy": strategy,
                "training_length": training_length,
                "split": "test",
                "block": self.block_length,
            }
            about |= {"sampling": self.sampling, "documents": self.documents, "skip": self.options["skip"]}
            about |= {"precision": str(trainer.precision), "skipped": skipped}
            rows = [row for m in self.measurements if not m.skip_reason for row in m.rows()]
            results.write(directory, self.name, rows, about)
            print(table(self.measurements, training_length))
        title = f"{strategy}: perplexity by evaluation length"
        publish(trainer, self.name, figure(self.measurements, training_length, title), [])
        gains = gain.compute() if gain is not None else []
        publish(trainer, "context_gain", gain_figure(gains, f"{strategy}: context gain by distance"), gains)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and trainer.state.stage != RunningStage.SANITY_CHECKING
        if not self.validation_blocks or not fitting:
            return
        text = self._validation_text(trainer)
        for m in self._measure(trainer, pl_module, text, [Protocol("full")], self.lengths):
            m.loss.sync()
            if not m.skip_reason:
                pl_module.log(f"val/ppl/full/{m.length}", m.loss.perplexity(), sync_dist=True)

    def _measure(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        text: Any,
        protocols: Sequence[Protocol],
        lengths: Sequence[int],
        *context: Any,
    ) -> list[Measurement]:
        """Sums over the blocks that this device reads; ``context`` holds the last two arguments of `measure`."""
        network, limit = network_of(pl_module), max_positions(network_of(pl_module))
        measurements = []
        for protocol, length in product(protocols, lengths):
            loss = TokenLoss(length if protocol.name == "per_position" else len(text)).to(pl_module.device)
            reason = None if length <= limit else f"the strategy has only {limit} positions"
            measurements.append(Measurement(protocol, length, loss, reason))
        for i, tokens in device_blocks(trainer, pl_module, text):
            with trainer.precision_plugin.forward_context():
                measure(network, tokens, i, measurements, *context)
        return measurements

    def _validation_text(self, trainer: Trainer) -> Any:
        blocks = data_of(trainer).blocks("validation", self.block_length, self.validation_blocks)
        if not len(blocks):
            raise UserError(
                f"lengths: got {self.block_length}, but the validation split has no block of that many targets; use a "
                "larger split, shorter lengths, or validation_blocks: 0"
            )
        return blocks

    def _context_gain(self, protocols: Sequence[Protocol], pl_module: LightningModule) -> ContextGain | None:
        """The metric for the longest length, or None unless it is measured in full and then with a shorter window."""
        length, limit = self.lengths[-1], max_positions(network_of(pl_module))
        names = [protocol.name for protocol in protocols]
        window = next((protocol.window for protocol in protocols if protocol.name == "windowed"), None) or length
        possible = window < length <= limit and self.sampling == "blocks"
        if not possible or "full" not in names[: names.index("windowed")]:
            return None
        return ContextGain(length, window).to(pl_module.device)
