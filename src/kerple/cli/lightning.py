"""`python run.py fit`, `validate` and `test`: LightningCLI with a folder for each run and checks of checkpoints."""

import traceback
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from kerple.base.errors import UserError, machine_error, require
from kerple.base.run_folder import LAST, fit_directory, last_checkpoint, test_directory, unlock
from kerple.config import DESCRIPTION, PROGRAM
from kerple.config.checkpoint_agreement import check_resumption, check_tested_model
from kerple.config.class_errors import as_user_error, original_errors
from kerple.config.flat_configuration import flat
from kerple.config.options import listed
from kerple.config.parsing import parse
from kerple.config.untrusted_checkpoints import CONFIG, load, not_a_checkpoint
from kerple.config.user_code_digests import SOURCE_DIGESTS, source_digests
from kerple.data.datamodule import TokenShards
from kerple.data.prepare.build import check_corpus
from kerple.data.shard_options import ShardOptions
from kerple.model.stored_model import check_wrapped
from kerple.positions import names
from kerple.training.checkpoint_io import AtomicCheckpointIO
from kerple.training.config_callback import StoreConfig, samples_per_step
from kerple.training.feasibility import check_memory, check_nodes, machine_memory
from kerple.training.fit_options import SEED, add_run_arguments, check_data_arguments, link_model_to_data
from kerple.training.language_model import LanguageModel
from kerple.training.next_commands import mention_earlier_fit, resume_command, test_command
from kerple.training.required_callbacks import callback_options
from kerple.training.stored_options import insert_stored_config, load_initial_weights
from kerple.training.torch_settings import configure_torch
from kerple.training.trainer import AutoTrainer, print_once, resolve_auto
from kerple.training.trainer_access import is_restoring, spawns_processes, untyped

LIBRARIES = ("pytorch_lightning.", "kerple.training.")  # packages whose callbacks make no measurements


def run(arguments: list[str]) -> None:
    """Run `fit`, `validate` or `test`.

    Args:
        arguments: The command and its arguments.

    Raises:
        UserError: If an option is wrong, so that the model, its data or the Trainer cannot be built.
    """
    configure_torch()
    if arguments[0] != "fit":  # a test needs no callbacks of the fit; Lightning warns that they are missing
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
    names_folder = any(argument.startswith("--trainer.default_root_dir") for argument in arguments)
    expected = "--output, the folder of the run, or --logs, that of all runs"
    require(not names_folder, "trainer.default_root_dir", "a folder", expected)
    classes = {"--data.help": ("TokenShards", "TaskData"), "--model.position.help": names()}
    if (option := arguments[-1]) in classes:  # without a class, the parser would show no options
        raise UserError(f"{option}: got no class, expected one of {', '.join(classes[option])}")
    CLI(insert_stored_config(arguments))


class CLI(LightningCLI):
    """LightningCLI with the folders, callbacks and checkpoints of this project.

    Args:
        arguments: The command and its arguments, as `kerple.training.stored_options.insert_stored_config` returns them.
    """

    subcommand: str
    checkpoint: dict[str, Any] | None = None
    logger: TensorBoardLogger | None = None

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            LanguageModel,
            LightningDataModule,
            trainer_class=AutoTrainer,
            subclass_mode_data=True,
            save_config_callback=StoreConfig,
            seed_everything_default=SEED,
            parser_kwargs={"prog": PROGRAM, "description": DESCRIPTION, "exit_on_error": False},
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
        seed = self.config[self.config.subcommand].seed_everything
        require(0 <= seed < 2**32, "seed_everything", seed, f"a number from 0 to {2**32 - 1}")

    def _parse_ckpt_path(self) -> None:
        """Do nothing. Lightning's method replaces options of the command line by options in the checkpoint."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_data_arguments(config.data)
        check_nodes(config.trainer)
        if self.subcommand == "fit":
            check_memory(config, machine_memory(), "this machine")
            directory = _fit_folder(config)
        else:
            directory = test_directory(config.output, config.ckpt_path, self.subcommand)
        resumed = None
        if config.ckpt_path is not None:
            self.checkpoint = load(config.ckpt_path)
            try:
                stored = self.checkpoint[CONFIG]
                length = self.checkpoint["hyper_parameters"]["length"]
                if self.subcommand == "fit":
                    resumed = str(stored["trainer"]["precision"])
                else:  # a test accepts any data.length, but the training length is that of the checkpoint
                    config.model.length = int(length)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise not_a_checkpoint(config.ckpt_path, error) from error
        resolve_auto(config.trainer, resumed)
        config.weights_only = True  # Lightning then runs no code in a checkpoint
        self.write_to(directory)

    def write_to(self, directory: Path) -> None:
        """Use a folder for the run's configuration, checkpoints, results and events of loggers."""
        trainer = self.config[self.subcommand].trainer
        trainer.default_root_dir = str(directory)
        if trainer.logger in (None, True):
            # empty name and version, so that events are written to the run's folder and not to a subfolder
            self.logger = TensorBoardLogger(str(directory), name="", version="", default_hp_metric=False)
        for logger in listed(trainer.logger):
            options = getattr(logger, "init_args", {})
            # place a relative save_dir in the run's folder; in the config.yaml of a resumed run, it is already there
            save_dir = options.get("save_dir") or ""
            if "save_dir" in options and not Path(save_dir).is_relative_to(directory):
                options["save_dir"] = str(directory / save_dir)

    def instantiate_classes(self) -> None:
        options = self.config[self.subcommand]
        # an error in data.corpus is reported before the model is built, which takes time
        if self.subcommand == "fit" and options.data.class_path.endswith(".TokenShards"):
            check_corpus(ShardOptions(**options.data.init_args.as_dict()))
        with original_errors(self.parser):
            super().instantiate_classes()
        if self.checkpoint is None:
            return
        path = options.ckpt_path
        parser = self._parser(self.subcommand)
        config = yaml.safe_load(parser.dump(options, skip_none=False, skip_validation=True))
        sources = self.checkpoint.get(SOURCE_DIGESTS, {})
        for name, digest in source_digests(flat(config)).items():
            if sources.get(name, digest) != digest:
                print_once(f"warning: the source of {name} has changed since the training of {path}")
        if self.subcommand == "fit":
            check_resumption(path, self.checkpoint, config, samples_per_step(self.trainer, self.datamodule))
            return
        check_tested_model(path, self.checkpoint, config, self.model)
        check_wrapped(self.model.network, self.checkpoint[CONFIG]["model"])
        if isinstance(self.datamodule, TokenShards):
            self.datamodule.reads_only = True  # options from a checkpoint must not determine where shards are written

    def before_fit(self) -> None:
        config = self.config[self.subcommand]
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                _keep_metrics(Path(logger.log_dir, "metrics.csv"))
        if config.weights is not None and config.ckpt_path is None:  # a resumed run has its own weights
            if self.trainer.precision == "64-true":  # Lightning converts the model later, and would round the weights
                self.model.double()
            steps = 0 if untyped(self.trainer).fast_dev_run else self.trainer.max_steps
            warmup = max(2, round(self.model.warmup * steps)) if isinstance(self.model.schedule, str) else 0
            expected = f"more than {warmup} with --weights, the steps of the warm-up"
            require(not 1 <= steps <= warmup, "trainer.max_steps", steps, expected)
            load_initial_weights(self.model.network, self.datamodule, config.weights, config.trust)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        rank_zero_info(f"model: {count:,} parameters, position {config.model.position.class_path.rpartition('.')[2]}")

    def _run_subcommand(self, subcommand: str) -> None:
        directory = Path(self.trainer.default_root_dir)
        config = self.config[subcommand]
        last = directory / LAST
        # Lightning's table of metrics is off after a test, because the measurements of a test print their own tables
        self.config_init[subcommand]["verbose"] = subcommand != "test"
        try:
            super()._run_subcommand(subcommand)
            print_once(f"written to {directory}")
            if subcommand == "fit" and last.is_file():
                print_once(f"to test it: {test_command(last)}")
        except SystemExit as end:  # by a signal
            if subcommand == "fit" and last.is_file():
                print_once(f"to continue this fit: {resume_command(last)}")
            # Lightning's status after Ctrl-C is 1
            raise SystemExit(130 if isinstance(end.__context__, KeyboardInterrupt) else end.code) from end
        except Exception as error:
            if subcommand != "fit" or not self.trainer.global_step:
                unlock(remove_new=True)  # so that the next run gets the same folder
            if machine_error(error):
                if isinstance(error, OSError) and not error.filename:
                    error.filename = str(directory)  # TensorBoard's writer does not set it
                raise
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            # with these classes, Lightning itself also reports options that do not fit the data or the callbacks
            of_options = isinstance(error, ValueError | RuntimeError) and "pytorch_lightning" in Path(raised_in).parts
            if of_options or isinstance(error, UserError | MisconfigurationException):
                raise as_user_error(error) from error
            if is_restoring(self.trainer):
                reason = f"{type(error).__name__}: {error}"
                advice = "give another checkpoint, or start a new training from its weights with --weights"
                raise UserError(f"ckpt_path: {config.ckpt_path} cannot be restored ({reason}); {advice}") from error
            raise

    def instantiate_trainer(self, **options: Any) -> Trainer:
        trainer = self._get(self.config_init, "trainer")
        if self.logger is not None:
            options["logger"] = self.logger
        options["plugins"] = [*listed(trainer["plugins"]), AtomicCheckpointIO()]
        # Lightning's summary is off by default, because `before_fit` prints the number of parameters
        options["enable_model_summary"] = bool(trainer["enable_model_summary"])
        if self.subcommand == "test":  # callbacks of Lightning write no results, and those of a user may
            others = [c for c in listed(trainer["callbacks"]) if not type(c).__module__.startswith(LIBRARIES)]
            require(bool(others), "trainer.callbacks", "none", "one measurement or more, as in configs/demo.yaml")
        options |= callback_options(self.subcommand, trainer)
        try:
            trainer = super().instantiate_trainer(**options)
        except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:  # about options
            raise as_user_error(error) from error
        if spawns_processes(trainer):
            given = self.config[self.subcommand].trainer.strategy
            raise UserError(f"trainer.strategy: got {given}, to whose processes a run cannot be copied; expected ddp")
        return trainer


def _keep_metrics(file: Path) -> None:
    """Rename the file of metrics of an earlier fit with the same version of the logger. Lightning would delete it."""
    if file.exists():
        kept = next(path for n in count(1) if not (path := file.with_stem(f"{file.stem}-{n}")).exists())
        file.rename(kept)
        print_once(f"{file} of the earlier fit is now {kept.name}")


def _fit_folder(config: Namespace) -> Path:
    """Choose the folder of a fit, and replace ``last`` in the option ``ckpt_path`` by the path of its checkpoint."""
    strategy = config.model.position.class_path.rpartition(".")[2]
    preferred = Path(config.output or Path(config.logs, config.experiment, strategy, f"seed-{config.seed_everything}"))
    directory = fit_directory(preferred, config.ckpt_path)
    if config.ckpt_path is None and (earlier := last_checkpoint(preferred)):
        mention_earlier_fit(earlier)
    if config.ckpt_path == "last":
        last = directory / LAST
        config.ckpt_path = str(last) if last.is_file() else None
        if config.ckpt_path is None:  # no error in a new run, so that a requeued job can always use "last"
            print_once(f"ckpt_path: {last} does not exist, so the run starts at step 0")
    return directory
