"""`python run.py test --hf MODEL`: measures a pretrained model of Hugging Face transformers, without Lightning."""

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from kerple.base.errors import UserError
from kerple.base.run_folder import test_directory
from kerple.config.files import config_path
from kerple.config.parsing import MODEL_FORMS, add_folder_arguments, import_modules, name_in_errors, parse
from kerple.data.shard_options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.measure.pretrained import ModelOptions, TrainerOptions, measure_pretrained

SHARDS = "TokenShards"


@name_in_errors("hf")
def main(arguments: list[str]) -> None:
    """Measure a pretrained model and write the results.

    Args:
        arguments: Arguments after the command, including ``--hf MODEL``.

    Raises:
        UserError: If the model does not exist, or it does not support an option.
    """
    options = _parse(arguments)
    from kerple.training.torch_settings import configure_torch

    configure_torch()
    objects = _parser().instantiate_classes(options)
    directory = test_directory(options.output or str(_run_folder(options) / "test"), "", "test")
    data = ShardOptions(**options.data.as_dict())
    measure_pretrained(options.hf, objects.model, data, objects.trainer, directory, _dump(options))
    print(f"written to {directory}")


@name_in_errors("hf")
def configuration(arguments: list[str]) -> str:
    """Return the configuration that `main` resolves, as YAML, without loading the model.

    Raises:
        UserError: If the model does not exist, or it does not support an option.
    """
    return _dump(_parse(arguments))


def _parse(arguments: list[str]) -> Namespace:
    """Return the options. The model's tokenizer, vocabulary and length are the defaults of the options ``data``.

    Without a configuration, the options are those of ``configs/hf.yaml``, because the options of a command line have no
    measurements.
    """
    if not any(argument.startswith(("--config", "-c")) for argument in arguments):
        arguments = ["--config", config_path("configs/hf.yaml"), *arguments]
    import_modules("kerple.measure", skip=("loss_metrics", "task_accuracy"))  # these need torchmetrics and a task
    parser = _parser()
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    if not options.hf:
        raise UserError(f"hf: got none, expected {MODEL_FORMS}")
    from kerple.hf import need
    from kerple.hf.adapter import config_length
    from kerple.hf.pretrained_files import find_model, read_model_config, read_tokenizer

    source = find_model(options.hf)
    need()
    length = config_length(read_model_config(source, options.model.trust_remote_code))
    data = {"tokenizer": f"{MODEL_PREFIX}{source.name}", "vocabulary": vocabulary_size(read_tokenizer(source))}
    data |= {} if length is None else {"length": length}
    return parse(parser, ["--config", yaml.safe_dump({"data": data}), *arguments])


def _parser() -> ArgumentParser:
    set_loader("kerple", _load, (yaml.YAMLError, UserError))
    parser = ArgumentParser(prog="run.py test", description=__doc__, exit_on_error=False, parser_mode="kerple")
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--hf", default="", help=f"Model: {MODEL_FORMS}.")
    parser.add_class_arguments(ModelOptions, "model")
    parser.add_class_arguments(ShardOptions, "data")
    parser.add_class_arguments(TrainerOptions, "trainer")
    add_folder_arguments(parser, "pretrained", "<model>/test")
    return parser


def _load(text: str) -> Any:
    """Load YAML. A section ``data`` with ``class_path``, as for `fit`, is replaced by its ``init_args``."""
    content = yaml.safe_load(text)
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(data, dict) and "class_path" in data:
        if str(data["class_path"]).rpartition(".")[2] != SHARDS:
            reason = "because pretrained models are tested on text"
            raise UserError(f"data.class_path: got {data['class_path']}, expected {SHARDS}, {reason}")
        content["data"] = data.get("init_args") or {}
    return content


def _dump(options: Namespace) -> str:
    """Return the resolved configuration as YAML, with the keys of a configuration of `fit`."""
    config = yaml.safe_load(_parser().dump(options, skip_none=False))
    config["model"] = {"path": config.pop("hf")} | config["model"]
    config["data"] = {"class_path": f"kerple.data.{SHARDS}", "init_args": config["data"]}
    return yaml.safe_dump(config, sort_keys=False)


def _run_folder(options: Namespace) -> Path:
    from kerple.hf.pretrained_files import model_name

    model, label = options.model, model_name(options.hf)
    label += f"-{model.scaling}{model.factor or ''}" if model.scaling else ""
    label += f"-{model.position.class_path.rpartition('.')[2]}" if model.position else ""
    return Path(options.logs) / options.experiment / label
