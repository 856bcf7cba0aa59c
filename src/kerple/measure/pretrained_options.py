"""Options of the measurement of a pretrained model, ``test --hf``, and the configuration that they resolve to."""

from dataclasses import dataclass
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from kerple.base.errors import UserError, require
from kerple.config.files import config_path
from kerple.config.options import MODEL_FORMS, add_folder_arguments, import_modules, name_in_errors
from kerple.config.parsing import parse
from kerple.data.shard_options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.measure.measure import Measure
from kerple.measure.runner import Runner
from kerple.positions import StrategyBuilder
from kerple.positions.rotary_scaling import AnyScaling

SHARDS = "TokenShards"


@dataclass
class ModelOptions:
    """Options for reading a causal language model of Hugging Face transformers.

    Args:
        length: Training length in tokens; null for the length in the model's configuration.
        scaling: Scaling of RoPE: ``none``, ``pi``, ``ntk``, ``dynamic_ntk``, ``yarn`` or ``llama3``; null for the
            scaling in the model's configuration.
        factor: Target length of the scaling, as a multiple of the training length.
        position: Strategy that replaces the model's own; it must add no parameters. The model is then converted to
            `kerple.model.Transformer`, with weights in fp32.
        dtype: Dtype of the weights in memory, if the model is not converted. Logits and losses are at least fp32.
        trust_remote_code: Whether code in the model's folder may run.
        bos: Whether to put a BOS token before every segment. Has no effect if the tokenizer adds no BOS token. The
            BOS token is not scored, is visible in every window of a test, and does not count towards lengths.
    """

    length: int | None = None
    scaling: AnyScaling | None = None
    factor: float | None = None
    position: StrategyBuilder | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False
    bos: bool = True


@dataclass
class TrainerOptions:
    """Options of the measurements, with the names of Lightning's Trainer.

    Args:
        accelerator: Device; ``auto`` is a GPU if one is available.
        devices: ``auto`` or 1, because each process uses one device. To use several devices, start several processes
            with torchrun.
        precision: Precision of arithmetic; ``auto`` selects it for the device.
        callbacks: The measurements.
        logger: Whether TensorBoard events are written.
        use_distributed_sampler: Has no effect. It is accepted because configurations for `fit` have it.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    devices: Literal["auto", 1] = "auto"
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", 32] = "32-true"
    callbacks: list[Measure] | Measure | None = None
    logger: bool = True
    use_distributed_sampler: bool = True

    def runner(self) -> Runner:
        """Return the runner for these options."""
        device = {"auto": None, "gpu": "cuda"}.get(self.accelerator, self.accelerator)
        return Runner.detect(device, "32-true" if self.precision == 32 else self.precision)


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
    # these imports take seconds, so errors about options are reported first
    from kerple.hf.position_limit import config_length
    from kerple.hf.pretrained_files import find_model, read_model_config
    from kerple.hf.pretrained_tokenizer import read_tokenizer

    source = find_model(options.hf)
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
        path, expected = str(data["class_path"]), f"{SHARDS}, because pretrained models are tested on text"
        require(path.rpartition(".")[2] == SHARDS, "data.class_path", path, expected)
        content["data"] = data.get("init_args") or {}
    return content


def dump(options: Namespace) -> str:
    """Return the resolved configuration as YAML, with the keys of a configuration of `fit`."""
    config = yaml.safe_load(parser().dump(options, skip_none=False))
    config["model"] = {"path": config.pop("hf")} | config["model"]
    config["data"] = {"class_path": f"kerple.data.{SHARDS}", "init_args": config["data"]}
    return yaml.safe_dump(config, sort_keys=False)
