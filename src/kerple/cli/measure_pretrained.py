"""`python run.py test --hf MODEL`: measures a pretrained model of Hugging Face transformers, without Lightning."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.run_folder import test_directory
from kerple.base.run_progress import FILE, Progress
from kerple.config.files import config_path, read_mapping
from kerple.config.parsing import MODEL_FORMS, add_folder_arguments, import_modules, listed, name_in_errors, parse
from kerple.data.shard_options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, end_of_text, vocabulary_size
from kerple.measure.measure import Measure, check_names
from kerple.positions import StrategyBuilder

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
    scaling: Literal["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"] | None = None
    factor: float | None = None
    position: StrategyBuilder | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False
    bos: bool = True


@dataclass
class RunnerOptions:
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
    _measure(options, objects.model, listed(objects.trainer.callbacks), directory)
    print(f"written to {directory}")


@name_in_errors("hf")
def configuration(arguments: list[str]) -> str:
    """Return the configuration that `main` resolves, as YAML, without loading the model.

    Raises:
        UserError: If the model does not exist, or it does not support an option.
    """
    return _dump(_parse(arguments))


def _measure(options: Namespace, model: ModelOptions, measures: list[Measure], directory: Path) -> None:
    """Load the model, prepare the text, measure, and write the results into the folder."""
    from kerple.data.evaluation_text import ShardText
    from kerple.data.prepare.build import prepare
    from kerple.data.shards import Folder
    from kerple.hf.exporter import TRAINED_ON
    from kerple.hf.pretrained_files import check_tokenizer, find_model, read_tokenizer
    from kerple.hf.pretrained_model_reader import read_network
    from kerple.measure.runner import Runner

    if not measures:
        raise UserError("trainer.callbacks: got none, expected one measurement or more, as in configs/hf.yaml")
    check_names(measures)
    trainer = options.trainer
    data = ShardOptions(**options.data.as_dict())
    device = {"auto": None, "gpu": "cuda"}.get(trainer.accelerator, trainer.accelerator)
    runner = Runner.detect(device, "32-true" if trainer.precision == 32 else trainer.precision)
    if runner.rank == 0:  # only this rank has the right folder: other ranks never add a suffix such as _v1
        runner = replace(runner, progress=Progress(directory / FILE).count)
        # a report reads the configuration in the parent folder
        for path in (directory / "config.yaml", directory.parent / "config.yaml"):
            if path.parent.resolve() != Path.cwd() and not path.exists():
                write(path, _dump(options))
    source = find_model(options.hf)
    if data.corpus is not None:
        end_of_text(read_tokenizer(source), f"{MODEL_PREFIX}{options.hf}")  # an error before the weights are read
    network = read_network(options.hf, **vars(model)).to(runner.device)
    if data.corpus is not None and runner.rank == 0:
        prepare(data)
    if runner.processes > 1:
        torch.distributed.barrier()
    folder = Folder(data.location)
    check_tokenizer(folder, source)
    config = Path(source.location) / "config.json"
    exported = read_mapping(config).get(TRAINED_ON) if config.is_file() else None
    if isinstance(exported, dict) and exported.get("test") != folder.manifest.splits["test"].sha256:
        text = f"the test text of the exported run ({exported.get('corpus')})"
        print(f"warning: the test text in {folder.directory} differs from {text}")
    shards = ShardText(folder, "test")
    for measure in measures:
        measure.check(network, shards)
    results = [measure.run(network, shards, runner) for measure in measures]
    if runner.rank:
        return
    from torch.utils.tensorboard import SummaryWriter

    writers = [SummaryWriter(str(directory))] if trainer.logger else []
    for result in results:
        if result.about:
            result.about = {**result.about, "bos": network.bos}
        result.publish(directory, writers)
        for writer, (name, value) in product(writers, result.scalars.items()):
            writer.add_scalar(f"test/{name}", value, 0)
    for writer in writers:
        writer.close()


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
    parser.add_class_arguments(RunnerOptions, "trainer")
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
