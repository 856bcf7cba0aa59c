"""`fit`, `validate` and `test`: LightningCLI with a directory for each run.

The file has more than 300 lines because LightningCLI's hooks are methods of one class, and what they call is short.
"""

import logging
import os
import sys
import warnings
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

import kerple.positions
from kerple.base.checkpoint_io import AtomicCheckpointIO
from kerple.base.directories import fit_directory, test_directory
from kerple.base.errors import UserError
from kerple.base.precision import FAST, SAFE, AutoTrainer, settle
from kerple.base.progress import VARIABLE
from kerple.base.trust import CONFIG_KEY, check, read_config
from kerple.cli import ranges
from kerple.cli.agreement import agree, stored_length
from kerple.cli.allowed_classes import know_old_names, offer
from kerple.cli.parser import SEED, add_run_arguments, link_model_to_data, mistake_in
from kerple.cli.reading import read
from kerple.data.datamodule import TokenShards
from kerple.evaluation.progress_lines import ProgressLines
from kerple.training.health import Finite
from kerple.training.language_model import LanguageModel
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.progress_bar import SteadyProgress
from kerple.training.provenance import Provenance
from kerple.training.random_state import RandomState

# warnings of every run that no user has to act on
HARMLESS = (
    "The dirpath has changed",  # a test writes into a folder of its own
    r"`isinstance\(treespec, LeafSpec\)`",
    ".*does not have many workers",  # memory-mapped shards need none
    ".*is not supported by the model summary",  # about an estimate of megabytes that is not used
)
UNMONITORED = "Early stopping conditioned on metric"  # a RuntimeError of Lightning's: nothing of that name is logged


class StoreConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run's folder, without overwriting one, and into each checkpoint."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # on every rank, because log_dir broadcasts
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        directory.mkdir(parents=True, exist_ok=True)
        text, path, resumption = self._text, directory / "config.yaml", 0
        while path.exists() and path.read_text() != text:
            resumption += 1
            path = directory / f"config-resumed-{resumption}.yaml"
        path.write_text(text)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG_KEY] = self._text

    @cached_property
    def _text(self) -> str:
        return self.parser.dump(self.config, skip_none=False)


class CLI(LightningCLI):
    """LightningCLI with a folder for each run, whose `test` takes model and data from the checkpoint."""

    checkpoint: dict[str, Any] | None = None
    subcommand: str

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: keys for name, keys in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_run_arguments(parser)
        link_model_to_data(parser)

    def before_fit(self) -> None:
        config = self.config[self.subcommand]
        if config.weights is not None and config.ckpt_path is None:  # a resumed run has its own weights
            from kerple.cli.weights import start_from  # needs optional packages

            start_from(self.model.network, config.weights, tuple(config.trust.split(",")))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = read(parser, cast("list[str]", args))
        model = cast(type, self._model_class)
        ranges.check(self.config[self.config.subcommand], self.config.subcommand, model)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let a checkpoint's options win over flags; `checkpoint_first` lets flags win."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if self.subcommand == "fit":
            strategy = config.model.position.class_path.rpartition(".")[2]
            directory = fit_directory(
                config.run_dir, config.logs, config.experiment, strategy, config.seed_everything, config.ckpt_path
            )
            if config.ckpt_path == "last":  # without one this is a new start, so that a requeued job can use it always
                last = directory / "checkpoints" / "last.ckpt"
                config.ckpt_path = str(last) if last.is_file() else None
            if config.ckpt_path is not None:
                self.checkpoint = check(config.ckpt_path)
                config.auto_precision = _auto_precision(self.checkpoint)
        else:
            directory = test_directory(config.run_dir, config.ckpt_path, self.subcommand)
            self.checkpoint = check(config.ckpt_path, sealed=False)  # `checkpoint_first` has checked all of it
            # the training length is the checkpoint's, even if data.length is another
            config.model.length = stored_length(self.checkpoint) or config.model.length
        settle(config, self.subcommand)
        config.weights_only = True  # nothing in a checkpoint may run
        config.trainer.default_root_dir = str(directory)
        if config.trainer.logger in (None, True):
            # without name and version, checkpoints, events and results are written into the run's folder itself
            self._logger = TensorBoardLogger(str(directory), name="", version="", default_hp_metric=False)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, TypeError) as error:  # the parser's, of what a class said when it was made
            mistake = mistake_in(error)
            if mistake in (None, error):
                raise
            raise mistake from error
        if self.checkpoint is not None:
            fit, config = self.subcommand == "fit", self.config[self.subcommand]
            agree(config.ckpt_path, self.checkpoint, self.model, resume=config.trainer.max_steps if fit else None)
            if isinstance(self.datamodule, TokenShards):
                self.datamodule.reads_only = not fit  # a checkpoint must not decide where files are written

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except (MisconfigurationException, RuntimeError) as error:
            unmonitored = UNMONITORED in str(error)
            if not unmonitored and not isinstance(error, MisconfigurationException):
                raise
            raise UserError(f"trainer{'.callbacks.monitor' if unmonitored else ''}: {error}") from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        logger = getattr(self, "_logger", None)
        if logger is not None:
            kwargs["logger"] = logger
        trainer = self._get(self.config_init, "trainer")
        plugins = trainer["plugins"] or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        callbacks = trainer["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if self.subcommand == "fit":
            callbacks = _with_safety(callbacks, trainer["enable_checkpointing"])
        shown = trainer["enable_progress_bar"]
        # a file cannot show a bar, and analyses read text that Lightning's bar does not count
        if VARIABLE in os.environ or (shown is not False and (self.subcommand == "test" or not sys.stdout.isatty())):
            kwargs["enable_progress_bar"] = False
            callbacks = [*(c for c in callbacks if not isinstance(c, ProgressBar)), ProgressLines()]
        elif self.subcommand == "fit":
            callbacks = _with_bar(callbacks, shown)
        kwargs["callbacks"] = callbacks
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:  # about the options, all that it is given
            if isinstance(error, UserError):
                raise
            # Lightning names the option it means in backquotes, but not always what it was given
            option = next((f".{name}: got {given}" for name, given in trainer.items() if f"`{name}`" in str(error)), "")
            raise UserError(f"trainer{option}: {error}") from error


def _auto_precision(checkpoint: Any) -> str | None:
    """The precision that ``auto`` meant in a fit; None if it was not ``auto``, or is not in the checkpoint."""
    text = checkpoint.get(CONFIG_KEY) if isinstance(checkpoint, dict) else None
    try:
        stored = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError:
        return None
    chosen = stored.get("auto_precision") if isinstance(stored, dict) else None
    return chosen if chosen in (FAST, SAFE) else None


def _with_safety(given: list[Callback], checkpoints: bool | None) -> list[Callback]:
    """The callbacks, and those by which every fit can be resumed and explained, unless they are configured."""
    safety = [RandomState, Finite, Provenance, *([] if checkpoints is False else [LastCheckpoint])]
    return given + [kind() for kind in safety if not any(isinstance(callback, kind) for callback in given)]


def _with_bar(given: list[Callback], shown: bool | None) -> list[Callback]:
    """The callbacks, and a progress bar unless there is one or none is wanted."""
    own = any(isinstance(callback, ProgressBar) for callback in given)
    return given if own or shown is False else [*given, SteadyProgress()]


def run(arguments: list[str], description: str) -> None:
    """Fit, validate or test.

    Args:
        arguments: The command and its arguments.
        description: Description of the program, for its help.

    Raises:
        UserError: If the model, its data or its trainer cannot be built as asked.
        ArgumentError: If the arguments do not parse.
    """
    settle_torch()
    if arguments[:1] in (["test"], ["validate"]):  # it has callbacks of its own
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
    if arguments[:1] == ["test"] and _option(arguments, "--hf"):
        import_module("kerple.cli.pretrained").main(arguments)
        return
    know_old_names()
    _check_position(arguments)
    CLI(
        LanguageModel,
        LightningDataModule,
        trainer_class=AutoTrainer,
        subclass_mode_data=True,
        save_config_callback=StoreConfig,
        seed_everything_default=SEED,
        parser_kwargs={"description": description, "exit_on_error": False},
        auto_configure_optimizers=False,
        args=checkpoint_first(arguments),
    )


def settle_torch() -> None:
    """Settings of torch for all commands that compute: TF32 on a GPU, reproducible products on a CPU, fewer warnings.

    Resumption bit for bit needs matrix products with the same bits each time. MKL gives them only in its reproducible
    mode, and only if it does not choose the number of threads.
    """
    if torch.cuda.is_available():  # TF32; on the CPU "high" is a slower path, four times at width 64
        torch.set_float32_matmul_precision("high")
    os.environ.setdefault("MKL_CBWR", "AUTO")  # read at the first product
    torch.set_num_threads(torch.get_num_threads())  # switches MKL's own choice off
    # what it advertises is not for this run
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(lambda told: "Tip:" not in told.getMessage())
    # at every checkpoint: that it holds more than weights
    logging.getLogger("pytorch_lightning.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    _say_on_the_first_process()


def _say_on_the_first_process() -> None:
    """Show log messages of this package, such as the choice of attention, only on the first process."""
    logger = logging.getLogger("kerple")
    logger.setLevel(logging.WARNING if getattr(rank_zero_only, "rank", 0) else logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())


def _option(arguments: list[str], *names: str) -> list[str]:
    found = []
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found += [value] if equals else arguments[i + 1 : i + 2]
    return found


def _check_position(arguments: list[str]) -> None:
    """Raise an error that names all strategies if one is unknown; the parser's message does not."""
    given: list[Any] = [*_option(arguments, "--model.position")]
    models = [Path(path) for path in _option(arguments, "--model")]
    for path in map(Path, _option(arguments, "--config", "-c")):
        model = _mapping(path).get("model")
        models.append(path.parent / model if isinstance(model, str) else path)
    for path in models:
        content = _mapping(path)
        model = content.get("model", content)
        position = model.get("position") if isinstance(model, dict) else None
        given.append(position.get("class_path") if isinstance(position, dict) else position)
    for name in given:
        if isinstance(name, str) and "." not in name and name.isidentifier() and name not in kerple.positions.names():
            raise UserError(
                f"model.position: got {name!r}, expected one of {', '.join(kerple.positions.names())}, "
                "or the import path of a class of your own"
            )


def _mapping(path: Path) -> dict[str, Any]:
    """Content of a YAML file; empty if it cannot be read, about which the parser will complain."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def checkpoint_first(arguments: list[str]) -> list[str]:
    """Insert the configuration of the checkpoint before the arguments, so that the arguments win."""
    trust = tuple(package for value in _option(arguments, "--trust") for package in value.split(","))
    if arguments[:1] == ["fit"] and (weights := _option(arguments, "--weights")):
        from kerple.cli.weights import architecture_first

        return architecture_first(arguments, weights[-1], trust)
    if arguments[:1] not in (["test"], ["validate"]) or {"-h", "--help"} & set(arguments):
        return arguments
    paths = _option(arguments, "--ckpt_path")
    if not paths:
        raise UserError(f"ckpt_path: got nothing, expected a checkpoint to {arguments[0]}; add --ckpt_path FILE")
    # without devices and strategy, which belong to the machine that trained
    config = read_config(paths[-1], offer(trust))
    if config.get("auto_precision"):
        config["trainer"]["precision"] = "auto"
    return [arguments[0], "--config", yaml.safe_dump(config), *arguments[1:]]
