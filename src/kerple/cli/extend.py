"""`python run.py extend MODEL --length N`: selects a context extension for a pretrained model, without training."""

import math
from dataclasses import fields
from pathlib import Path

from kerple.base.errors import require
from kerple.base.run_progress import duration
from kerple.config.options import MODEL_FORMS, command_parser, rename_options
from kerple.config.parsing import parse
from kerple.data.shard_options import ShardOptions

# options of the text; the tokenizer and its vocabulary are those of the model, and nothing is trained
TEXT: tuple[str, ...] = ("corpus", "directory", "source", "split_fractions", "text_field", "encoding")
TEXT += ("drop_duplicates", "max_dropped_fraction", "cache", "cache_gb", "prepare_workers")


def main(arguments: list[str]) -> None:
    """Choose a method on validation text, measure it on test text, and write the results to a folder.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: See `kerple.extend.extension.Extension`.
    """
    parser = command_parser("extend", __doc__)
    parser.add_argument("model", help=f"model to extend: {MODEL_FORMS}")
    parser.add_argument("--length", type=int, required=True, help="context length to reach, in tokens")
    trained = "training length in tokens; null: that of the model"
    parser.add_argument("--training_length", type=int | None, help=trained)
    bound = "largest rise of the loss at the training length, in percent"
    parser.add_argument("--bound", type=float, default=0.5, help=bound)
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget; determines the number of text blocks")
    parser.add_argument("--precision", default="auto", help="auto, 32-true, bf16-mixed or 16-mixed")
    parser.add_argument("--output", type=str | None, help="folder of the results; null: logs/extend/<model>-<length>")
    rename_options(parser, run_dir="output")
    rename_options(parser, ", and --length is now --training_length", to="length")
    unused: set[str | int] = {field.name for field in fields(ShardOptions) if field.name not in TEXT}
    parser.add_class_arguments(ShardOptions, "data", skip=unused, default={"corpus": "code"})
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    require(0 <= options.minutes < math.inf, "minutes", options.minutes, "a finite number, 0 or more")
    from kerple.extend.extension import Extension
    from kerple.hf.pretrained_files import model_name
    from kerple.training.torch_settings import configure_torch

    configure_torch()
    folder = Path(options.output or f"logs/extend/{model_name(options.model)}-{options.length}")
    numbers = options.length, options.training_length, options.bound
    extension = Extension.prepare(options.model, *numbers, options.precision, folder, options.data.as_dict())
    blocks, seconds = extension.search.block_budget(options.minutes)
    methods = len(extension.search.methods)
    print(f"{methods} methods, {blocks} blocks of {options.length:,} tokens: about {duration(seconds)}", flush=True)
    print(f"{extension.run(blocks)}written to {folder}")
