"""LightningCLI with a folder for each run; `test` and `validate` take model, data and callbacks from the checkpoint."""

import shlex
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from kerple.base.atomic import write
from kerple.base.directories import LAST, fit_directory, last_checkpoint, test_directory, unlock
from kerple.base.errors import NO_ROOM, UserError
from kerple.base.sources import SOURCE_DIGESTS, own_classes, source_digests
from kerple.base.trust import CONFIG, load, not_a_checkpoint
from kerple.cli import PROGRAM
from kerple.cli.agreement import SAMPLES_PER_STEP, check_resumption, check_tested_model
from kerple.cli.arguments import parse
from kerple.cli.parser import SEED, add_run_arguments, link_model_to_data, mistake, peek, unwrapped
from kerple.compare.runs import flat
from kerple.data.datamodule import TokenShards
from kerple.data.options import ShardOptions
from kerple.data.prepare.build import check_corpus
from kerple.training.checkpoint_io import AtomicCheckpointIO
from kerple.training.health import NonFiniteGuard
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.progress_bar import SteadyProgress
from kerple.training.progress_lines import ProgressLines
from kerple.training.provenance import Provenance
from kerple.training.random_state import RandomState
from kerple.training.trainer import AutoTrainer, print_once, resolve_auto


class StoreConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run's folder, without overwriting one, and into each checkpoint."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # on every rank, because log_dir broadcasts
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        directory.mkdir(parents=True, exist_ok=True)
        path, resumption = directory / "config.yaml", 0
        while path.exists() and path.read_text(encoding="utf-8") != self.text:
            resumption += 1
            path = directory / f"config-resumed-{resumption}.yaml"
        write(path, self.text)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG] = yaml.safe_load(self.text)
        checkpoint[SAMPLES_PER_STEP] = samples_per_step(trainer)
        checkpoint[SOURCE_DIGESTS] = source_digests(flat(checkpoint[CONFIG]))

    @cached_property
    def text(self) -> str:
        """The configuration as YAML."""
        return self.parser.dump(self.config, skip_none=False)


def samples_per_step(trainer: Trainer, data: Any = None) -> int | None:
    """Training samples of a step over all devices and micro-batches, or None if the data has no ``batch_size``."""
    size = getattr(data or cast(Any, trainer).datamodule, "batch_size", None)
    return None if size is None else size * trainer.accumulate_grad_batches * trainer.world_size


class CLI(LightningCLI):
    """LightningCLI for `fit`, `validate` and `test`, with this project's folders, callbacks and checkpoints."""

    subcommand: str
    checkpoint: dict[str, Any] | None = None
    logger: TensorBoardLogger | None = None

    def __init__(self, model: type[LightningModule], arguments: list[str], description: str, typed: Any = ()) -> None:
        self.typed = list(typed)  # the arguments of the command line, before others were put among them
        super().__init__(
            model,
            LightningDataModule,
            trainer_class=AutoTrainer,
            subclass_mode_data=True,
            save_config_callback=StoreConfig,
            seed_everything_default=SEED,
            parser_kwargs={"prog": PROGRAM, "description": description, "exit_on_error": False},
            auto_configure_optimizers=False,
            args=arguments,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: keys for name, keys in LightningCLI.subcommands().items() if name != "predict"}

    def init_parser(self, **options: Any) -> LightningArgumentParser:
        return super().init_parser(**options, allow_abbrev=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_run_arguments(parser)
        link_model_to_data(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parse(parser, args, self._parser(args[0]))
        if not 0 <= (seed := self.config[self.config.subcommand].seed_everything) < 2**32:
            raise UserError(f"seed_everything: got {seed}, expected a number of 0 to {2**32 - 1}")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let a checkpoint's options win over those of the command line."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if self.subcommand == "fit":
            strategy, seed = config.model.position.class_path.rpartition(".")[2], config.seed_everything
            named = (config.run_dir,) if config.run_dir else (config.logs, config.experiment, strategy, f"seed-{seed}")
            directory = fit_directory(Path(*named), config.ckpt_path)
            last = directory / LAST
            if config.ckpt_path is None and (earlier := last_checkpoint(Path(*named))):
                self._mention(earlier)
            # without a last checkpoint the run starts anew, so that a requeued job can always use this option
            if config.ckpt_path == "last":
                if not last.is_file():
                    print_once(f"ckpt_path: there is no {last} yet, so the run begins at its first step")
                config.ckpt_path = str(last) if last.is_file() else None
        else:
            directory = test_directory(config.run_dir, config.ckpt_path, self.subcommand)
        resumed = None
        if config.ckpt_path is not None:
            self.checkpoint = load(config.ckpt_path)
            try:
                stored = self.checkpoint[CONFIG]
                length = self.checkpoint["hyper_parameters"]["length"]
                if self.subcommand == "fit":
                    resumed = str(stored["trainer"]["precision"])
                else:  # the training length is the checkpoint's, even if data.length is another
                    config.model.length = int(length)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise not_a_checkpoint(config.ckpt_path, error) from error
        resolve_auto(config.trainer, resumed)
        config.weights_only = True  # nothing in a checkpoint may run
        self.write_to(directory)

    def write_to(self, directory: Path) -> None:
        """Set the folder to which the run writes its configuration, checkpoints, results and TensorBoard's events."""
        trainer = self.config[self.subcommand].trainer
        trainer.default_root_dir = str(directory)
        if trainer.logger in (None, True):
            # without name and version, everything is written into the run's folder itself
            self.logger = TensorBoardLogger(str(directory), name="", version="", default_hp_metric=False)
        for logger in _listed(trainer.logger):
            options = getattr(logger, "init_args", {})
            if "save_dir" in options:  # a relative folder is inside the run's folder
                options["save_dir"] = str(directory / (options["save_dir"] or ""))

    def instantiate_classes(self) -> None:
        data = self.config[self.subcommand].data
        if self.subcommand == "fit" and data.class_path.endswith(".TokenShards"):  # before the model is built
            check_corpus(ShardOptions(**data.init_args.as_dict()))
        with unwrapped(self.parser):
            super().instantiate_classes()
        if self.checkpoint is None:
            return
        path = self.config[self.subcommand].ckpt_path
        parser, options = self._parser(self.subcommand), self.config[self.subcommand]
        config = yaml.safe_load(parser.dump(options, skip_none=False, skip_validation=True))
        sources = self.checkpoint.get(SOURCE_DIGESTS, {})
        for name, digest in source_digests(flat(config)).items():
            if sources.get(name, digest) != digest:
                print_once(f"warning: the source of {name} has changed since {path} was trained")
        if self.subcommand == "fit":
            check_resumption(path, self.checkpoint, config, samples_per_step(self.trainer, self.datamodule))
            return
        check_tested_model(path, self.checkpoint, config, self.model)
        if isinstance(self.datamodule, TokenShards):
            self.datamodule.reads_only = True  # a checkpoint must not decide where shards are written

    def before_fit(self) -> None:
        config = self.config[self.subcommand]
        if config.weights is not None and config.ckpt_path is None:  # a resumed run has its weights already
            from kerple.cli.weights import start_from  # needs optional packages

            start_from(self.model.network, self.datamodule, config.weights, config.trust)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        rank_zero_info(f"model: {count:,} parameters, position {config.model.position.class_path.rpartition('.')[2]}")

    def _run_subcommand(self, subcommand: str) -> None:
        directory, config = Path(self.trainer.default_root_dir), self.config[subcommand]
        last = directory / LAST
        # no table by Lightning after a test, where the analyses print theirs
        self.config_init[subcommand]["verbose"] = subcommand != "test"
        try:
            super()._run_subcommand(subcommand)
            print_once(f"written to {directory}")
            if subcommand == "fit" and last.is_file():
                packages = sorted({name.partition(".")[0] for name in own_classes(flat(load(last, "meta")[CONFIG]))})
                trust = ["--trust", ",".join(packages)] if packages else []
                print_once(f"to test it: {PROGRAM} {shlex.join(['test', '--ckpt_path', str(last), *trust])}")
        except (UserError, MisconfigurationException) as error:
            if subcommand != "fit" or not self.trainer.global_step:
                unlock(refused=True)  # so that the next run is not called a second version
            raise mistake(error) from error
        except SystemExit as end:  # by a signal
            if subcommand == "fit" and last.is_file():
                print_once(f"to continue it: {self._continuation(last)}")
            # Lightning ends with 1 on a Ctrl-C that no callback has recorded
            raise SystemExit(130 if isinstance(end.__context__, KeyboardInterrupt) else end.code) from end
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM and not error.filename:
                error.filename = str(directory)  # that of TensorBoard's writer names no file
            if self.trainer._checkpoint_connector._loaded_checkpoint:  # which Lightning forgets when all is restored
                reason = f"{type(error).__name__}: {error}"
                raise UserError(f"ckpt_path: {config.ckpt_path} cannot be taken up: {reason}") from error
            raise

    def _mention(self, earlier: Path) -> None:
        """Print how to continue the fit whose last checkpoint this is, if it was stopped before its last step."""
        with suppress(UserError, LookupError, TypeError):  # of a damaged file, which this run does not need
            content = load(earlier, "meta")
            step, steps = content["global_step"], content[CONFIG]["trainer"]["max_steps"]
            if step < steps:
                where = f"{earlier.parents[1]} holds a fit that was stopped at step {step:,} of {steps:,}"
                print_once(f"{where}. This one begins anew; to continue that one: {self._continuation(earlier)}")

    def _continuation(self, last: Path) -> str:
        """The command that continues a run from its last checkpoint."""
        options = peek(self.typed[1:], "ckpt_path")[1]
        return f"{PROGRAM} {shlex.join(['fit', *options, '--ckpt_path', str(last)])}"

    def instantiate_trainer(self, **options: Any) -> Trainer:
        trainer = self._get(self.config_init, "trainer")
        if self.logger is not None:
            options["logger"] = self.logger
        options["plugins"] = [*_listed(trainer["plugins"]), AtomicCheckpointIO()]
        callbacks = _listed(trainer["callbacks"])
        if self.subcommand == "fit":
            callbacks = _with_safety(callbacks, trainer["enable_checkpointing"])
        # Lightning's summary is off by default, because `before_fit` prints the number of parameters
        options["enable_model_summary"] = bool(trainer["enable_model_summary"])
        shown = trainer["enable_progress_bar"]
        # a file cannot show a bar, and analyses read text that Lightning's bar does not count
        if shown is not False and (self.subcommand == "test" or not sys.stdout.isatty()):
            options["enable_progress_bar"] = False
            callbacks = [*(c for c in callbacks if not isinstance(c, ProgressBar)), ProgressLines()]
        elif self.subcommand == "fit" and shown is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks = [*callbacks, SteadyProgress()]
        try:
            return super().instantiate_trainer(**options, callbacks=callbacks)
        except (MisconfigurationException, ValueError, TypeError) as error:  # all that this call depends on are options
            raise mistake(error) from error


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _with_safety(callbacks: list[Callback], checkpoints: bool | None) -> list[Callback]:
    """The callbacks, and those that every fit needs to be resumed and explained, unless they are configured."""
    safety = [RandomState, NonFiniteGuard, Provenance, *([] if checkpoints is False else [LastCheckpoint])]
    return callbacks + [kind() for kind in safety if not any(isinstance(callback, kind) for callback in callbacks)]
