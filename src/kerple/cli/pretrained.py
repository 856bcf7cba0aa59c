"""`python run.py test --hf PATH`: the command that tests a pretrained model, `kerple.hf.pretrained.Pretrained`."""

from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import TensorBoardLogger

from kerple.base.directories import test_directory
from kerple.base.errors import UserError
from kerple.base.precision import AutoTrainer
from kerple.cli.lightning import CLI, StoreConfig
from kerple.cli.parser import SEED, add_folder_arguments
from kerple.compare.collect import model_name
from kerple.data.tokenizer import OF_A_MODEL, vocabulary_size
from kerple.hf import need
from kerple.hf.adapter import training_length
from kerple.hf.source import locate, read_model_config, read_tokenizer


class StoreRunConfig(StoreConfig):
    """Writes the configuration beside the results, and into the folder above, where a report expects that of a run."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        above = Path(trainer.log_dir or trainer.default_root_dir).parent / "config.yaml"
        in_a_run = above.parent.resolve() != Path.cwd()  # not where a folder in the working folder was asked for
        if trainer.is_global_zero and in_a_run and not above.exists():
            above.write_text(self._text)


class PretrainedCLI(CLI):
    """The command line of `test` for a model that is not trained here."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"test": LightningCLI.subcommands()["test"]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_folder_arguments(
            parser,
            "pretrained",
            "Folder of the results; null: <logs>/<experiment>/<model>/test, or a new version of it.",
        )

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        model = config.model
        label = model_name(model.path) + (f"-{model.scaling}{model.factor or ''}" if model.scaling else "")
        run = Path(config.logs) / config.experiment / label
        directory = test_directory(config.run_dir, str(run / "checkpoints" / "none"), "test")
        config.trainer.default_root_dir = str(directory)
        if config.trainer.logger in (None, True):
            self._logger = TensorBoardLogger(str(directory), name="", version="", default_hp_metric=False)


def main(arguments: list[str]) -> None:
    """Run `test` on a pretrained model.

    Args:
        arguments: Arguments of the command line: ``test``, and ``--hf PATH`` among the others.

    Raises:
        UserError: If there is no such model, or it does not support an option.
    """
    _call(PretrainedCLI, arguments)


def configuration(arguments: list[str]) -> str:
    """The configuration, as YAML, that `main` would use; nothing is built.

    Raises:
        UserError: If there is no such model, or it does not support an option.
    """
    cli = _call(Parsed, arguments)
    return cli._parser("test").dump(cli.config.test, skip_none=False)


class Parsed(PretrainedCLI):
    """The command line, which stops before data, model and trainer are built."""

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def _call(cli: type[PretrainedCLI], arguments: list[str]) -> PretrainedCLI:
    need()
    from kerple.hf.pretrained import Pretrained

    path, rest = _take(arguments[1:], "--hf")
    return cli(
        Pretrained,
        LightningDataModule,
        trainer_class=AutoTrainer,
        subclass_mode_data=True,
        save_config_callback=StoreRunConfig,
        seed_everything_default=SEED,
        parser_kwargs={"description": __doc__, "exit_on_error": False},
        auto_configure_optimizers=False,
        args=["test", "--config", yaml.safe_dump(_defaults(path)), *rest],
    )


def _defaults(path: str) -> dict[str, Any]:
    """Defaults that follow from the model: its tokenizer, and the vocabulary and length of the data."""
    source = locate(path)
    length = training_length(read_model_config(source))
    data: dict[str, Any] = {
        "tokenizer": f"{OF_A_MODEL}{source.name}",
        "vocabulary": vocabulary_size(read_tokenizer(source)),
    }
    if length is not None:
        data["length"] = length
    return {"model": {"path": source.name}, "data": {"class_path": "kerple.data.TokenShards", "init_args": data}}


def _take(arguments: list[str], name: str) -> tuple[str, list[str]]:
    """The value of an option, and the arguments without it."""
    for i, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given == name and equals:
            return value, arguments[:i] + arguments[i + 1 :]
        if given == name and i + 1 < len(arguments):
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    raise UserError(f"{name.lstrip('-')}: got nothing, expected a folder, a .gguf file or a name on the hub")
