"""`python run.py export --ckpt_path … --output FOLDER`: exports a checkpoint as a model of transformers."""

from pathlib import Path
from typing import Literal

from kerple.config.options import add_checkpoint_arguments, command_parser, rename_options
from kerple.config.parsing import parse

CARD = """# {name}

A language model of {parameters:,} parameters with the positional strategy {position}, for research on length
extrapolation. It was trained on {corpus} for {steps:,} steps with a training length of {length} tokens. Its weights
are {dtype}.
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
    parser.add_argument("--output", type=str, required=True, help="new or empty folder, for AutoModelForCausalLM")
    dtype = Literal["float32", "float16"]
    parser.add_argument("--dtype", type=dtype, default="float32", help="dtype of all weights except the strategy's")
    rename_options(parser, to="output")
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    from kerple.config import untrusted_checkpoints
    from kerple.data import TokenShards
    from kerple.hf import need
    from kerple.training.allowed_classes import allowed_classes
    from kerple.training.trained_model import end_token, load_trained

    need()
    from kerple.hf.exporter import export  # needs transformers
    from kerple.hf.pretrained_model_reader import read_stored_model

    language_model, data = load_trained(options.ckpt_path, options.trust)
    stored = read_stored_model(options.ckpt_path, allowed_classes(options.trust))
    tokenizer, corpus, trained_on = None, "a task", {}
    if isinstance(data, TokenShards):
        tokenizer, corpus = data.folder.tokenizer(), data.corpus or data.location
        trained_on = {"corpus": corpus, "test": data.manifest.splits["test"].sha256}
    card = CARD.format(
        name=Path(options.output).name,
        parameters=sum(p.numel() for p in language_model.parameters()),
        position=language_model.network.name,
        corpus=corpus,
        steps=untrusted_checkpoints.load(options.ckpt_path)["global_step"],
        length=stored.model["length"],
        dtype="float32" if options.dtype == "float32" else f"{options.dtype}, but those of the strategy are float32",
    )
    end = end_token(data)
    name = export(stored, Path(options.output), tokenizer, end, options.dtype, trained_on, card)
    needs = {"KerpleForCausalLM": "import kerple.hf first", "KerpleRemoteForCausalLM": "with trust_remote_code=True"}
    condition = needs.get(name, "without the package kerple")
    print(f"{options.output}: {name}; AutoModelForCausalLM and AutoTokenizer load it ({condition})")
