"""`measure_pretrained`: measures a pretrained model of Hugging Face transformers, without Lightning."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from kerple.base.atomic import write
from kerple.base.errors import require
from kerple.base.run_progress import FILE, Progress
from kerple.config.files import read_mapping
from kerple.config.options import listed
from kerple.data.evaluation_text import ShardText
from kerple.data.prepare.build import prepare
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder
from kerple.data.tokenizer import MODEL_PREFIX, end_of_text
from kerple.measure.measure import check_names
from kerple.measure.pretrained_options import ModelOptions, TrainerOptions


def measure_pretrained(
    path: str, model: ModelOptions, data: ShardOptions, trainer: TrainerOptions, directory: Path, config: str
) -> None:
    """Load a model, prepare the text, measure, and write the results and the configuration into a folder.

    Args:
        path: The model, see `kerple.hf.pretrained_files.find_model`.
        model: Options for reading the model.
        data: Options of the text, whose test split is measured.
        trainer: Options of the measurements.
        directory: Folder of the results.
        config: The configuration as YAML.

    Raises:
        UserError: If the model or the text cannot be read, or does not support a measurement.
    """
    # kerple.hf imports transformers, which takes seconds
    from kerple.hf.exporter import TRAINED_ON
    from kerple.hf.pretrained_files import find_model
    from kerple.hf.pretrained_model_reader import read_network
    from kerple.hf.pretrained_tokenizer import check_tokenizer, read_tokenizer

    measures = listed(trainer.callbacks)
    require(bool(measures), "trainer.callbacks", "none", "one measurement or more, as in configs/hf.yaml")
    check_names(measures)
    runner = trainer.runner()
    if runner.rank == 0:  # only this rank has the right folder: other ranks never add a suffix such as _v1
        runner = replace(runner, progress=Progress(directory / FILE).count)
        if not (directory / "config.yaml").exists():
            write(directory / "config.yaml", config)
    source = find_model(path)
    if data.corpus is not None:
        end_of_text(read_tokenizer(source), f"{MODEL_PREFIX}{path}")  # an error before the weights are read
    network = read_network(path, **vars(model)).to(runner.device)
    if data.corpus is not None and runner.rank == 0:
        prepare(data)
    if runner.processes > 1:
        torch.distributed.barrier()
    folder = Folder(data.location, data.cache, data.cache_gb)
    check_tokenizer(folder, source)
    file = Path(source.location) / "config.json"
    exported = read_mapping(file).get(TRAINED_ON) if file.is_file() else None
    if isinstance(exported, dict) and exported.get("test") != folder.manifest.splits["test"].sha256:
        text = f"the test text of the exported run ({exported.get('corpus')})"
        print(f"warning: the test text in {folder.location} differs from {text}")
    shards = ShardText(folder, "test", data.mask_documents)
    network.restart_positions = data.restart_positions
    for measure in measures:
        measure.check(network, shards)
    with ExitStack() as stack:
        writers = []
        if trainer.logger and runner.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

            writers.append(stack.enter_context(SummaryWriter(str(directory))))
        for measure in measures:  # results are written at once, because a later measure may fail
            result = measure.run(network, shards, runner)
            if runner.rank == 0:
                if result.about:
                    result.about = {**result.about, "bos": network.bos}
                result.publish(directory, writers)
                for writer, (name, value) in product(writers, result.scalars.items()):
                    writer.add_scalar(f"test/{name}", value, 0)
