"""`python run.py test --hf MODEL`: measures a pretrained model of transformers, without Lightning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from kerple.base.atomic import write
from kerple.base.directories import test_directory
from kerple.base.errors import UserError
from kerple.base.imports import import_modules
from kerple.base.mapping import read_mapping
from kerple.base.progress import FILE, Progress
from kerple.cli.arguments import parse
from kerple.data.options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.measure.measure import Measure
from kerple.positions import Position, Shape

SHARDS = "TokenShards"


@dataclass
class ModelOptions:
    """How to read a causal language model of transformers.

    Args:
        length: Training length in tokens; null for that in the model's configuration.
        scaling: Scaling of RoPE: ``none``, ``pi``, ``ntk``, ``dynamic_ntk``, ``yarn`` or ``llama3``; null for its own.
        factor: Length for which the scaling is meant, as a multiple of the training length.
        position: Strategy in place of the model's own, without weights that the model lacks. The model is then tested
            as our own network, in fp32, as is one that this project has exported.
        dtype: Dtype of the weights in memory. Scores and losses are fp32 or better.
        trust_remote_code: Whether code that comes with the model may run.
        bos: Whether every segment begins with a BOS token, if the model's tokenizer adds one to a text. The token is
            not scored, every window keeps it, and lengths do not count it.
    """

    length: int | None = None
    scaling: Literal["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"] | None = None
    factor: float | None = None
    position: Callable[[Shape], Position] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False
    bos: bool = True


@dataclass
class RunnerOptions:
    """Where measurements run, in the words of Lightning's Trainer.

    Args:
        accelerator: Device; ``auto`` takes a GPU if there is one.
        devices: Number of devices of this process, 1. Several processes share the work under torchrun.
        precision: Precision of arithmetic; ``auto`` takes what suits the device.
        callbacks: The measurements.
        logger: Whether TensorBoard's file is written.
        use_distributed_sampler: Has no effect; configurations of Lightning may have it.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    devices: Literal["auto", 1] = "auto"
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", 32] = "32-true"
    callbacks: list[Measure] | Measure | None = None
    logger: bool = True
    use_distributed_sampler: bool = True


def main(arguments: list[str]) -> None:
    """Measure a pretrained model.

    Args:
        arguments: Arguments after the command, ``--hf MODEL`` among them.

    Raises:
        UserError: If there is no such model, or it does not support an option.
    """
    options = _parse(arguments)
    from kerple.cli.torch_settings import configure_torch

    configure_torch()
    parser = _parser()
    built = parser.instantiate_classes(options)
    measures = built.trainer.callbacks or []
    measures = measures if isinstance(measures, list) else [measures]
    directory = test_directory(options.run_dir or str(_run_folder(options) / "test"), "", "test")
    _measure(options, built.model, measures, directory)
    print(f"written to {directory}")


def configuration(arguments: list[str]) -> str:
    """The configuration, as YAML, that `main` would use; nothing is built.

    Raises:
        UserError: If there is no such model, or it does not support an option.
    """
    return _dump(_parse(arguments))


def _measure(options: Namespace, model: ModelOptions, measures: list[Measure], directory: Path) -> None:
    """Prepare the text, load the model, measure, and write what was found into the folder."""
    from kerple.data.prepare.build import prepare
    from kerple.data.shards import Folder
    from kerple.data.text import ShardText
    from kerple.hf.exporter import TRAINED_ON
    from kerple.hf.model_tokenizer import check_tokenizer
    from kerple.hf.pretrained import read_network
    from kerple.hf.source import find_model
    from kerple.measure.runner import Runner

    trainer, data = options.trainer, ShardOptions(**options.data.as_dict())
    device = {"auto": None, "gpu": "cuda"}.get(trainer.accelerator, trainer.accelerator)
    precision = "32-true" if trainer.precision == 32 else trainer.precision
    runner = Runner.detect(device, precision)
    if runner.rank == 0:  # other processes do not know the version of the folder
        runner = replace(runner, progress=Progress(directory / FILE).over)
        for path in (directory / "config.yaml", directory.parent / "config.yaml"):  # a report reads that of the run
            if path.parent.resolve() != Path.cwd() and not path.exists():
                write(path, _dump(options))
    network = read_network(options.hf, **vars(model)).to(runner.device)
    if data.corpus is not None and runner.rank == 0:
        prepare(data)
    if runner.processes > 1:
        torch.distributed.barrier()
    folder, source = Folder(data.location), find_model(options.hf)
    check_tokenizer(folder, source)
    config = Path(source.location) / "config.json"
    trained = read_mapping(config).get(TRAINED_ON) if config.is_file() else None
    if isinstance(trained, dict) and trained.get("test") != folder.manifest.splits["test"].sha256:
        print(f"the text of {folder.directory} is not that of the run that was exported: {trained.get('corpus')}")
    shards = ShardText(folder, "test")
    for measure in measures:
        measure.check(network, shards)
    found = [measure.run(network, shards, runner) for measure in measures]
    if runner.rank:
        return
    from torch.utils.tensorboard import SummaryWriter

    writers = [SummaryWriter(str(directory))] if trainer.logger and found else []
    for result in found:
        if result.about:
            result.about = {**result.about, "bos": network.bos}
        result.publish(directory, writers)
        for writer in writers:
            for name, value in result.scalars.items():
                writer.add_scalar(f"test/{name}", value, 0)
    for writer in writers:
        writer.close()


def _parse(arguments: list[str]) -> Namespace:
    """The options; those that follow from the model (tokenizer, vocabulary, length) are defaults."""
    import_modules("kerple.measure", skip=("metrics", "task_accuracy"))  # they need torchmetrics and a task
    parser = _parser()
    options = parse(parser, arguments)  # mistakes are reported before anything else is imported
    if not options.hf:
        raise UserError("hf: got nothing, expected a folder, a .gguf file or a name on the hub")
    from kerple.hf import need
    from kerple.hf.adapter import config_length
    from kerple.hf.model_tokenizer import read_tokenizer
    from kerple.hf.source import find_model, read_model_config

    source = find_model(options.hf)
    need()
    length = config_length(read_model_config(source, options.model.trust_remote_code))
    data: dict[str, Any] = {
        "tokenizer": f"{MODEL_PREFIX}{source.name}",
        "vocabulary": vocabulary_size(read_tokenizer(source)),
    }
    if length is not None:
        data["length"] = length
    return parse(parser, ["--config", yaml.safe_dump({"data": data}), *arguments])


def _parser() -> ArgumentParser:
    set_loader("kerple", _load, (yaml.YAMLError, UserError))
    parser = ArgumentParser(prog="run.py test", description=__doc__, exit_on_error=False, parser_mode="kerple")
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--hf", default="", help="A folder, a .gguf file, smollm2-135m or a name on the hub.")
    parser.add_class_arguments(ModelOptions, "model")
    parser.add_class_arguments(ShardOptions, "data")
    parser.add_class_arguments(RunnerOptions, "trainer")
    parser.add_argument("--experiment", default="pretrained", help="First folder below --logs: what belongs together.")
    parser.add_argument("--logs", default="logs", help="Root of all runs.")
    parser.add_argument(
        "--run_dir",
        type=str | None,
        default=None,
        help="Folder of the results; null: <logs>/<experiment>/<model>/test, or a new version of it.",
    )
    return parser


def _load(text: str) -> Any:
    """YAML in which the data may be given as a class, as for `fit`: only `TokenShards` has text."""
    content = yaml.safe_load(text)
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(data, dict) and "class_path" in data:
        if str(data["class_path"]).rpartition(".")[2] != SHARDS:
            raise UserError(f"data.class_path: got {data['class_path']}, expected {SHARDS}, which has text")
        content["data"] = data.get("init_args") or {}
    return content


def _dump(options: Namespace) -> str:
    """The resolved configuration, with the keys that a run of `test` has."""
    config = yaml.safe_load(_parser().dump(options, skip_none=False))
    config["model"] = {"path": config.pop("hf")} | config["model"]
    config["data"] = {"class_path": f"kerple.data.{SHARDS}", "init_args": config["data"]}
    return yaml.safe_dump(config, sort_keys=False)


def _run_folder(options: Namespace) -> Path:
    from kerple.hf.source import model_name

    model = options.model
    label = model_name(options.hf) + (f"-{model.scaling}{model.factor or ''}" if model.scaling else "")
    label += f"-{model.position.class_path.rpartition('.')[2]}" if model.position else ""
    return Path(options.logs) / options.experiment / label
