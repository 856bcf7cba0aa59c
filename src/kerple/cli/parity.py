"""`python run.py parity A B`: compares two computations of the same tokens, and writes a page and JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

from kerple.base.errors import UserError, require
from kerple.cli.probe import checkpoint_classes
from kerple.config.options import MODEL_FORMS, add_switch, add_trust_argument, command_parser
from kerple.config.parsing import parse
from kerple.positions.rotary_scaling import AnyScaling


@dataclass
class SideOptions:
    """How one side is computed. A file ignores these options.

    Args:
        dtype: Dtype of the weights and activations.
        attention: Attention implementation of transformers, such as eager or sdpa; empty for the model's own.
        scaling: Scaling of RoPE: none, pi, ntk, dynamic_ntk, yarn or llama3; null keeps that of the model.
        factor: Factor of the scaling.
        cached: Whether the text is read in parts with a cache.
        packed: Whether another document stands before the text in the same row.
        padding: Side on which the text is padded.
        shift: Number that is added to all positions.
        continued: Whether other tokens follow the text.
        batched: Whether the batch contains other texts.
    """

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    attention: str = ""
    scaling: AnyScaling | None = None
    factor: float | None = None
    cached: bool = False
    packed: bool = False
    padding: Literal["none", "left", "right"] = "none"
    shift: int = 0
    continued: bool = False
    batched: bool = False


def main(arguments: list[str]) -> None:
    """Compare two sides, write the results, and print a summary.

    Args:
        arguments: Arguments of the command.

    Raises:
        SystemExit: With status 1 if rounding does not explain the differences.
        UserError: If a side cannot be read, or the sides have other tokens, tokenizers or vocabularies.
    """
    parser = command_parser("parity", __doc__)
    forms = f"a checkpoint of `fit`, {MODEL_FORMS}, or an .npz file of log-probabilities from another engine"
    parser.add_argument("first", type=str, help=f"side A: {forms}")
    parser.add_argument("second", type=str, help="side B, in the same forms")
    parser.add_class_arguments(SideOptions, "a")
    parser.add_class_arguments(SideOptions, "b")
    length = "number of compared tokens; null: 512, or all tokens of an .npz file"
    parser.add_argument("--length", type=int | None, help=length)
    text = (
        "text, as in data.corpus, or random for random tokens; null: modules if both sides have a tokenizer, or random"
    )
    parser.add_argument("--text", type=str | None, help=text)
    parser.add_argument("--output", type=str | None, help="folder of the results; null: logs/parity/<A>-<B>")
    add_switch(parser, "trust_remote_code", False, "run code in the model's folder")
    add_trust_argument(parser)
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    require(options.length is None or options.length > 1, "length", options.length, "2 or more tokens")
    from kerple.base.run_folder import report_directory
    from kerple.hf.pretrained_files import model_name, source_name
    from kerple.probe.parity import Outputs, parity
    from kerple.training.torch_settings import configure_torch

    configure_torch()
    paths = {"A": options.first, "B": options.second}
    sources = [source_name(path) for path in paths.values()]
    preferred = Path(options.output or f"logs/parity/{'-'.join(map(model_name, paths.values()))}")
    folder = report_directory(preferred, "parity.json", sources)  # an error before the comparison if it is unwritable
    models: dict[Any, Any] = {}
    sides = {name: _side(name, path, options, models) for name, path in paths.items()}
    files = {name: side.source for name, side in sides.items() if isinstance(side.source, Outputs)}
    require(len(files) < 2, "B", "a file, as in A", "a model on one side")
    if files:
        ((name, outputs),) = files.items()
        require(options.text is None, "text", options.text, f"null, because the tokens are those of {paths[name]}")
        assert outputs.tokens is not None  # `read_outputs` sets them
        tokens, known = outputs.tokens, len(outputs.tokens)
        require((options.length or known) <= known, name, f"{known} positions", f"--length {options.length}")
        tokens = tokens[: options.length]
        outputs.log_probs = outputs.log_probs[: len(tokens) - (len(outputs.log_probs) < known)]
    else:
        tokens = _tokens(paths, sides["A"].source, options.text, options.length or 512)
    for name, side in sides.items():
        if side.is_model:
            vocabulary, largest = side.source.get_input_embeddings().num_embeddings, int(tokens.max())
            require(largest < vocabulary, name, f"a vocabulary of {vocabulary} tokens", f"more than id {largest}")
    result = parity(sides["A"], sides["B"], tokens)
    result.sources = sources
    result.write(folder)
    print(result.summary())
    print(f"written to {folder}/parity.html and parity.json")
    if result.differs:
        raise SystemExit(1)


def _side(name: str, path: str, options: Any, models: dict[Any, Any]) -> Any:
    """Return side ``name``, A or B, as a `kerple.probe.parity.Side`. Its model is kept in ``models`` for the other."""
    import torch  # takes seconds, as do the imports below

    from kerple.config.options import name_in_errors
    from kerple.hf.pretrained_model_reader import read_fp32_model
    from kerple.probe.parity import Side, read_outputs
    from kerple.probe.reading import Reading

    if path.endswith(".npz"):
        return Side(read_outputs(path, name), f"{name} ({path})")
    chosen = options[name.lower()]
    classes = checkpoint_classes(path, options.trust)
    key = path, chosen.scaling, chosen.factor
    with name_in_errors(name):
        if key not in models:
            models[key] = read_fp32_model(path, classes, options.trust_remote_code, *key[1:])
    model, config = models[key]
    reading = Reading(**{key: value for key, value in vars(chosen).items() if hasattr(Reading, key)})
    changes = [f"{key} {value}" for key, value in vars(chosen).items() if value not in (None, 0, "", "none")]
    return Side(model, f"{name} ({path}, {', '.join(changes)})", reading, getattr(torch, chosen.dtype), config)


def _tokens(paths: dict[str, str], model: Any, corpus: str | None, length: int) -> Any:
    """Return the first tokens of a text, (length,) int64, after a comparison of the tokenizers of the two models."""
    import torch  # takes seconds, as do the imports below

    from kerple.hf.pretrained_files import find_model
    from kerple.hf.pretrained_tokenizer import has_tokenizer, read_tokenizer
    from kerple.probe.text_measurements import first_tokens

    sources = [None if is_zipfile(path) else find_model(path) for path in paths.values()]
    if corpus is None:
        corpus = "modules" if all(source and has_tokenizer(source) for source in sources) else "random"
    if corpus == "random":
        generator = torch.Generator().manual_seed(0)
        return torch.randint(model.get_input_embeddings().num_embeddings, (length,), generator=generator)
    require(None not in sources, "text", corpus, "random for a checkpoint")
    a, b = first_tokens(corpus, length, [read_tokenizer(source) for source in sources if source])
    expected = f"{length}; use a longer text or a smaller --length"
    require(len(a) == length == len(b), "text", f"{len(a)} tokens", expected)
    if other := (a != b).nonzero().flatten().tolist():
        first = f"token {other[0]} of the text is {int(a[other[0]])} in A and {int(b[other[0]])} in B"
        raise UserError(f"B: its tokenizer differs from that of A: {first}; expected models with the same tokenizer")
    return a
