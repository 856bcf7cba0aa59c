"""`python run.py probe MODEL`: checks the position encoding of a model, and writes the results as a page and JSON."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from kerple.config.parsing import MODEL_FORMS, command_parser, parse
from kerple.data.tokenizer import MODEL_PREFIX


def main(arguments: list[str]) -> None:
    """Check a model, write the results, and print a summary.

    Args:
        arguments: Arguments of the command.

    Raises:
        SystemExit: With status 1 if a check fails.
        UserError: If the model does not exist, cannot be read, or does not fit into memory.
    """
    parser = command_parser("probe", __doc__)
    invariances = "check that logits do not depend on shifts, later tokens, cache, padding, batch and attention kernel"
    length = "evaluation length of --window, a multiple of the training length; null: twice the training length"
    parser.add_argument("model", type=str, help=f"model to check: a checkpoint of `fit`, {MODEL_FORMS}")
    layers = "compare the forward pass of each layer with the configuration"
    parser.add_argument("--layers", type=bool, default=True, help=layers)
    parser.add_argument("--invariances", type=bool, default=True, help=invariances)
    parser.add_argument("--gap", type=bool, default=False, help="measure the loss after a position gap; takes a minute")
    parser.add_argument("--window", type=bool, default=False, help="measure perplexity and far context at --length")
    parser.add_argument("--length", type=int | None, default=None, help=length)
    parser.add_argument("--blocks", type=int, default=4, help="number of documents for --window, one block of each")
    parser.add_argument("--text", type=str, default="modules", help="text for --gap and --window, as in data.corpus")
    parser.add_argument("--to", type=str, default="", help="folder of the results; default: logs/probe/<model>")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run code in the model's folder")
    parser.add_argument("--trust", default="", help="packages whose classes a checkpoint may use: a,b,c")
    options = parse(parser, arguments)
    from kerple.hf import need
    from kerple.hf.pretrained_files import model_name
    from kerple.training.torch_settings import configure_torch

    need()
    configure_torch()
    folder = Path(options.to or f"logs/probe/{model_name(options.model)}")
    model, config = read_fp32_model(options.model, options.trust_remote_code, options.trust)
    from kerple.probe.probe_model import probe_model

    report = probe_model(model, config, model_name(options.model), options.layers, options.invariances)
    if parts := [name for name in ("gap", "window") if options[name]]:
        from kerple.probe.text_measurements import measure_on_text

        network, text = network_and_text(model, options.model, options.text, options.trust)
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
        path: A checkpoint of `fit`, or a name that `kerple.hf.pretrained_files.find_model` accepts.
        trust_remote_code: Whether code in the model's folder may run.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Raises:
        UserError: If the model does not exist, cannot be read, or does not fit into memory.
    """
    if is_zipfile(path):
        from kerple.hf.exporter import hugging_face_model
        from kerple.hf.pretrained_model_reader import read_stored_model
        from kerple.training.allowed_classes import allowed_classes

        model = hugging_face_model(read_stored_model(path, allowed_classes(trust)))
        return model, model.config
    from kerple.hf.memory import check_memory
    from kerple.hf.pretrained_files import find_model, read_model, read_model_config

    source = find_model(path)
    config = read_model_config(source, trust_remote_code)
    check_memory(config, trust_remote_code=trust_remote_code)
    return read_model(source, config, trust_remote_code=trust_remote_code), config.get_text_config()


def network_and_text(model: Any, path: str, corpus: str, trust: str = "") -> tuple[Any, Any]:
    """Return a model as a `Network`, and the text on which it is measured.

    Args:
        model: A model that `read_fp32_model` returned.
        path: Path from which the model was read.
        corpus: Text for a pretrained model, as ``data.corpus``. For a checkpoint, its test text is used.
        trust: Packages whose classes a checkpoint may use, separated by commas.
    """
    from kerple.hf.adapter import hugging_face_network

    network = model.network if hasattr(model, "network") else hugging_face_network(model)
    if is_zipfile(path):
        from kerple.data.evaluation_text import ShardText
        from kerple.training.trained_model import load_trained

        data = load_trained(path, trust)[1]
        return network, ShardText(data.folder, "test") if hasattr(data, "folder") else data
    from kerple.hf.pretrained_files import bos_token, find_model, read_tokenizer
    from kerple.probe.text_measurements import corpus_text

    source = find_model(path)
    network.bos = bos_token(source)
    return network, corpus_text(corpus, read_tokenizer(source), f"{MODEL_PREFIX}{path}")
