"""`python run.py probe MODEL`: checks the position encoding of a model, and writes a page and JSON."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from kerple.cli.arguments import command_parser, parse


def main(arguments: list[str]) -> None:
    """Check a model.

    Args:
        arguments: Arguments of the command.

    Raises:
        SystemExit: With status 1 if a check fails.
        UserError: If the model does not exist, cannot be read, or does not fit into memory.
    """
    parser = command_parser("probe", __doc__)
    parser.add_argument("model", type=str, help="a folder, a .gguf file, a name on the hub or a checkpoint of `fit`")
    parser.add_argument("--layers", type=bool, default=True, help="compare configuration and forward pass of layers")
    parser.add_argument("--invariances", type=bool, default=True, help="shift, prefix, cache, padding, batch, sdpa")
    parser.add_argument("--gap", type=bool, default=False, help="loss after a jump of positions, in about a minute")
    parser.add_argument("--window", type=bool, default=False, help="distance beyond which text does not lower the loss")
    parser.add_argument("--length", type=int | None, default=None, help="longest length; null: twice that of training")
    parser.add_argument("--blocks", type=int, default=4, help="number of documents that --window reads")
    parser.add_argument("--text", type=str, default="modules", help="the text: a name, file or folder, as data.corpus")
    parser.add_argument("--to", type=str, default="", help="folder of the page; default: logs/probe/<model>")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run code in the model's folder")
    parser.add_argument("--trust", default="", help="packages whose classes a checkpoint may use: a,b,c")
    options = parse(parser, arguments)
    from kerple.hf import need
    from kerple.hf.source import model_name

    need()
    folder = Path(options.to or f"logs/probe/{model_name(options.model)}")
    model, config = read_fp32_model(options.model, options.trust_remote_code, options.trust)
    from kerple.probe.report import probe_model

    report = probe_model(model, config, model_name(options.model), options.layers, options.invariances)
    if parts := [name for name in ("gap", "window") if options[name]]:
        from kerple.probe.on_text import measure_on_text

        network, text = network_and_text(model, options.model, options.text)
        report.results = measure_on_text(network, text, parts, options.length, options.blocks)
        report.text = f"{text.name}, sha256 of its tokens {text.digest}"
    report.write(folder)
    print(report.summary())
    print(f"written to {folder}/probe.html and probe.json")
    if report.faults:
        raise SystemExit(1)


def read_fp32_model(path: str, trust_remote_code: bool = False, trust: str = "") -> tuple[Any, Any]:
    """Read a model as a `transformers.PreTrainedModel` in fp32, and the configuration of its text model.

    Args:
        path: Folder, GGUF file, name on the hub, or a checkpoint of `fit`.
        trust_remote_code: Whether code in the model's folder may run.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Raises:
        UserError: If the model does not exist, cannot be read, or does not fit into memory.
    """
    if is_zipfile(path):
        from kerple.cli.classes import classes
        from kerple.hf.exporter import hugging_face_model
        from kerple.hf.pretrained import read_stored_model

        model = hugging_face_model(read_stored_model(path, classes(trust)))
        return model, model.config
    from kerple.hf.memory import check_memory
    from kerple.hf.source import find_model, read_model, read_model_config

    source = find_model(path)
    config = read_model_config(source, trust_remote_code)
    check_memory(config, trust_remote_code=trust_remote_code)
    return read_model(source, config, trust_remote_code=trust_remote_code), config.get_text_config()


def network_and_text(model: Any, path: str, corpus: str) -> tuple[Any, Any]:
    """The model as a `Network`, and a corpus in its tokens; for a checkpoint, its test text."""
    from kerple.hf.adapter import hugging_face_network

    network = model.network if hasattr(model, "network") else hugging_face_network(model)
    if is_zipfile(path):
        from kerple.cli.trained import load_trained
        from kerple.data.text import ShardText

        data = load_trained(path)[1]
        return network, ShardText(data.folder, "test") if hasattr(data, "folder") else data
    from kerple.hf.source import bos_token, find_model, read_tokenizer
    from kerple.probe.on_text import corpus_text

    source = find_model(path)
    network.bos = bos_token(source)
    return network, corpus_text(corpus, read_tokenizer(source))
