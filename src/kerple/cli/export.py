"""`python run.py export --ckpt_path … --to FOLDER`: exports a checkpoint as a model of Hugging Face transformers."""

import json
from pathlib import Path
from typing import Literal

from kerple.base.atomic import new_folder, write
from kerple.config.files import read_mapping
from kerple.config.parsing import add_checkpoint_arguments, command_parser, parse

CARD = """# {name}

A language model of {parameters:,} parameters with the positional strategy {position}, for research on length
extrapolation. It was trained on {corpus} for {steps:,} steps with a training length of {length} tokens. Its weights
are {dtype}, but those of the strategy are float32.
"""


def main(arguments: list[str]) -> None:
    """Write the weights of a checkpoint as safetensors, with config.json, tokenizer and README.md.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the checkpoint cannot be read, the folder is not empty, or the strategy embeds numbers that a task
            assigns to tokens, such as the index of a digit (`kerple.positions.position_coupling`).
    """
    parser = command_parser("export", __doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument("--to", type=str, required=True, help="new or empty folder, for AutoModelForCausalLM")
    dtype = Literal["float32", "float16"]
    parser.add_argument("--dtype", type=dtype, default="float32", help="dtype of all weights except the strategy's")
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    from kerple.config import untrusted_checkpoints
    from kerple.data import TokenShards
    from kerple.data.tokenizer import load_tokenizer
    from kerple.hf import need
    from kerple.training.allowed_classes import allowed_classes
    from kerple.training.trained_model import end_token, load_trained

    need()
    from kerple.hf.exporter import TRAINED_ON, export
    from kerple.hf.pretrained_model_reader import read_stored_model

    language_model, data = load_trained(options.ckpt_path, options.trust)
    tokenizer = load_tokenizer(str(data.folder.directory)) if isinstance(data, TokenShards) else None
    model = read_stored_model(options.ckpt_path, allowed_classes(options.trust))
    card = {"name": Path(options.to).name, "dtype": options.dtype, "length": model.model["length"], "corpus": "a task"}
    card |= {"parameters": sum(p.numel() for p in language_model.parameters()), "position": language_model.network.name}
    steps = untrusted_checkpoints.load(options.ckpt_path)["global_step"]
    with new_folder("to", Path(options.to)) as folder:
        name = export(model, folder, tokenizer, end_token(data), options.dtype)
        if isinstance(data, TokenShards):
            card["corpus"] = data.corpus or data.location
            text = {"corpus": card["corpus"], "test": data.manifest.splits["test"].sha256}
            config = read_mapping(folder / "config.json") | {TRAINED_ON: text}
            write(folder / "config.json", json.dumps(config, indent=2))
        write(folder / "README.md", CARD.format(steps=steps, **card))
    needs = {"KerpleForCausalLM": "import kerple.hf first", "KerpleRemoteForCausalLM": "with trust_remote_code=True"}
    condition = needs.get(name, "without the package kerple")
    print(f"{options.to}: {name}; AutoModelForCausalLM.from_pretrained loads it ({condition})")
