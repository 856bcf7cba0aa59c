"""Options of the measurement of a pretrained model, ``test --hf``, and the configuration that they resolve to."""

from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from kerple.base.errors import UserError, require
from kerple.config.files import config_path
from kerple.config.options import MODEL_FORMS, add_folder_arguments, import_modules, name_in_errors
from kerple.config.parsing import parse
from kerple.data.shard_options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.measure.pretrained import ModelOptions, TrainerOptions

SHARDS = "TokenShards"


@name_in_errors("hf")
def configuration(arguments: list[str]) -> str:
    """Return the configuration that these arguments of ``test --hf`` resolve to, as YAML, without loading the model.

    Raises:
        UserError: If the model does not exist, or it does not support an option.
    """
    return dump(parse_options(arguments))


def parse_options(arguments: list[str]) -> Namespace:
    """Return the options. The model's tokenizer, vocabulary and length are the defaults of the options ``data``.

    Without a configuration, the options are those of ``configs/hf.yaml``, because the options of a command line have no
    measurements.
    """
    if not any(argument.startswith(("--config", "-c")) for argument in arguments):
        arguments = ["--config", config_path("configs/hf.yaml"), *arguments]
    import_modules("kerple.measure", skip=("loss_metrics", "task_accuracy"))  # these need torchmetrics and a task
    of_command = parser()
    options = parse(of_command, arguments)
    require(bool(options.hf), "hf", "none", MODEL_FORMS)
    from kerple.hf import need  # these imports take seconds, so errors about options are reported first
    from kerple.hf.position_limit import config_length
    from kerple.hf.pretrained_files import find_model, read_model_config
    from kerple.hf.pretrained_tokenizer import read_tokenizer

    source = find_model(options.hf)
    need()
    length = config_length(read_model_config(source, options.model.trust_remote_code))
    data = {"tokenizer": f"{MODEL_PREFIX}{source.name}", "vocabulary": vocabulary_size(read_tokenizer(source))}
    data |= {} if length is None else {"length": length}
    return parse(of_command, ["--config", yaml.safe_dump({"data": data}), *arguments])


def parser() -> ArgumentParser:
    """Return the parser of ``test --hf``."""
    set_loader("kerple", _load, (yaml.YAMLError, UserError))
    about = "Measure a pretrained model of Hugging Face transformers, without Lightning."
    of_command = ArgumentParser(prog="run.py test", description=about, exit_on_error=False, parser_mode="kerple")
    of_command.add_argument("-c", "--config", action="config")
    of_command.add_argument("--hf", default="", help=f"Model: {MODEL_FORMS}.")
    of_command.add_class_arguments(ModelOptions, "model")
    of_command.add_class_arguments(ShardOptions, "data")
    of_command.add_class_arguments(TrainerOptions, "trainer")
    add_folder_arguments(of_command, "pretrained", "<model>/test")
    return of_command


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


def dump(options: Namespace) -> str:
    """Return the resolved configuration as YAML, with the keys of a configuration of `fit`."""
    config = yaml.safe_load(parser().dump(options, skip_none=False))
    config["model"] = {"path": config.pop("hf")} | config["model"]
    config["data"] = {"class_path": f"kerple.data.{SHARDS}", "init_args": config["data"]}
    return yaml.safe_dump(config, sort_keys=False)
