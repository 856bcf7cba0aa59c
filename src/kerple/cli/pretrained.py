"""`python run.py test --hf PATH`: the command that tests a pretrained model, `kerple.hf.pretrained.Pretrained`."""

from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from kerple.base.atomic import write
from kerple.base.directories import test_directory
from kerple.base.errors import UserError
from kerple.cli.lightning import CLI
from kerple.cli.parser import add_folder_arguments, peek
from kerple.compare.runs import model_name
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.hf import need
from kerple.hf.adapter import training_length
from kerple.hf.source import locate, read_model_config, read_tokenizer


class PretrainedCLI(CLI):
    """The command line of `test` for a pretrained model of transformers."""

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
        label += f"-{model.position.class_path.rpartition('.')[2]}" if model.position else ""
        run = Path(config.logs) / config.experiment / label
        directory = test_directory(config.run_dir, str(run / "checkpoints" / "none"), "test")
        self.write_to(directory)
        run_config = directory.parent / "config.yaml"  # where a report looks for the configuration of a run
        if directory.parent.resolve() != Path.cwd() and not run_config.exists():
            write(run_config, self._parser("test").dump(config, skip_none=False))


class ParseOnly(PretrainedCLI):
    """The same command line, which is parsed only: no data, model or trainer is built."""

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


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
    cli = _call(ParseOnly, arguments)
    return cli._parser("test").dump(cli.config.test, skip_none=False)


def _call(cli: type[PretrainedCLI], arguments: list[str]) -> PretrainedCLI:
    need()
    from kerple.hf.pretrained import Pretrained

    options, rest = peek(arguments[1:], "hf")
    if not options.hf:
        raise UserError("hf: got nothing, expected a folder, a .gguf file or a name on the hub")
    return cli(Pretrained, ["test", "--config", yaml.safe_dump(_defaults(options.hf)), *rest], __doc__ or "")


def _defaults(path: str) -> dict[str, Any]:
    """Defaults that follow from the model: its tokenizer, and the vocabulary and length of the data."""
    source = locate(path)
    length = training_length(read_model_config(source))
    data: dict[str, Any] = {
        "tokenizer": f"{MODEL_PREFIX}{source.name}",
        "vocabulary": vocabulary_size(read_tokenizer(source)),
    }
    if length is not None:
        data["length"] = length
    return {"model": {"path": source.name}, "data": {"class_path": "kerple.data.TokenShards", "init_args": data}}
