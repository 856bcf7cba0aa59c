"""`python run.py probe MODEL`: checks the position encoding of a model, and writes the results as a page and JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from kerple.base.errors import require
from kerple.config.options import MODEL_FORMS, add_switch, add_trust_argument, command_parser, rename_options
from kerple.config.parsing import parse
from kerple.data.tokenizer import MODEL_PREFIX

if TYPE_CHECKING:
    from kerple.config.untrusted_checkpoints import Classes


def main(arguments: list[str]) -> None:
    """Check a model, write the results, and print a summary.

    Args:
        arguments: Arguments of the command.

    Raises:
        SystemExit: With status 1 if a check fails, or with status 2 if no layer could be judged.
        UserError: If the model does not exist, cannot be read, or does not fit into memory.
    """
    parser = command_parser("probe", __doc__)
    parser.add_argument("model", type=str, help=f"model to check: a checkpoint of `fit`, {MODEL_FORMS}")
    add_switch(parser, "layers", True, "compare the forward pass of each layer with the configuration")
    invariances = "check that logits do not depend on shifts, later tokens, cache, padding, batch and attention kernel"
    add_switch(parser, "invariances", True, invariances)
    add_switch(parser, "gap", False, "measure the loss after a position gap; takes a minute")
    add_switch(parser, "far_context", False, "measure perplexity and far context at --length")
    length = "evaluation length of --far_context in tokens, a multiple of the training length; null: twice that length"
    parser.add_argument("--length", type=int | None, help=length)
    number = "number of documents for --far_context, one block of each; null: 4"
    parser.add_argument("--blocks", type=int | None, help=number)
    text = "text for --gap and --far_context of a pretrained model, as in data.corpus; null: modules"
    parser.add_argument("--text", type=str | None, help=text)
    parser.add_argument("--output", type=str | None, help="folder of the results; null: logs/probe/<model>")
    add_switch(parser, "trust_remote_code", False, "run code in the model's folder")
    add_trust_argument(parser)
    rename_options(parser, to="output", window="far_context")
    options = parse(parser, arguments)  # reports wrong options before imports that take seconds
    for name in ("length", "blocks"):
        used = options[name] is None or options.far_context
        require(used, name, f"{options[name]} without far_context", f"--far_context true, or no {name}")
    parts = [name for name in ("gap", "far_context") if options[name]]
    expected = "--gap true or --far_context true, or no text"
    require(options.text is None or bool(parts), "text", f"{options.text} without gap and far_context", expected)
    expected = "null, because a checkpoint is measured on its test text"
    require(options.text is None or not is_zipfile(options.model), "text", options.text, expected)
    from kerple.base.run_folder import report_directory
    from kerple.hf.pretrained_files import model_name, source_name
    from kerple.hf.pretrained_model_reader import read_fp32_model
    from kerple.probe.probe_model import probe_model
    from kerple.training.torch_settings import configure_torch

    configure_torch()
    sources = [source_name(options.model)]
    preferred = Path(options.output or f"logs/probe/{model_name(options.model)}")
    folder = report_directory(preferred, "probe.json", sources)  # an error before the checks if it is unwritable
    classes = checkpoint_classes(options.model, options.trust)
    model, config = read_fp32_model(options.model, classes, options.trust_remote_code)
    if parts:  # wrong options of the measurements are reported before the checks, which take minutes
        from kerple.probe.text_measurements import measure_on_text, text_measures  # most calls measure no text

        network, measured_text = network_and_text(model, options.model, options.text or "modules", options.trust)
        blocks = 4 if options.blocks is None else options.blocks
        measures = text_measures(network, measured_text, parts, options.length, blocks)
    report = probe_model(model, config, model_name(options.model), options.layers, options.invariances)
    report.sources = sources
    report.write(folder)
    if parts:
        report.results = measure_on_text(network, measured_text, measures)
        report.text = f"{measured_text.name}, sha256 of its tokens {measured_text.digest}"
        report.write(folder)
    print(report.summary())
    print(f"written to {folder}/probe.html and probe.json")
    if report.faults or report.inconclusive:
        raise SystemExit(1 if report.faults else 2)


def checkpoint_classes(path: str, trust: str) -> "Classes | None":
    """Return the classes that a checkpoint may use; None if ``path`` is not a checkpoint.

    Args:
        path: Path or name of a model.
        trust: Packages whose classes a checkpoint may use, separated by commas.
    """
    if not is_zipfile(path):
        return None
    from kerple.training.allowed_classes import allowed_classes  # imports Lightning, which other models do not need

    return allowed_classes(trust)


def network_and_text(model: Any, path: str, corpus: str, trust: str = "") -> tuple[Any, Any]:
    """Return a model as a `Network`, and the text on which it is measured.

    Args:
        model: A model that `read_fp32_model` returned. For a checkpoint, the network is that of the fit.
        path: Path from which the model was read.
        corpus: Text for a pretrained model, as ``data.corpus``. For a checkpoint, its test text is used.
        trust: Packages whose classes a checkpoint may use, separated by commas.
    """
    if is_zipfile(path):
        from kerple.training.trained_model import load_trained  # imports Lightning

        # the exported Llama of a checkpoint could not be measured within documents
        trained, data = load_trained(path, trust)
        return trained.network, data.text("test")
    from kerple.hf.adapter import hugging_face_network  # takes seconds, as do the imports below
    from kerple.hf.pretrained_files import find_model
    from kerple.hf.pretrained_tokenizer import bos_token, read_tokenizer
    from kerple.probe.text_measurements import corpus_text

    source = find_model(path)
    network = model.network if hasattr(model, "network") else hugging_face_network(model)
    network.bos = bos_token(source)
    return network, corpus_text(corpus, read_tokenizer(source), f"{MODEL_PREFIX}{path}")
