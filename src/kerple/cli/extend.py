"""`python run.py extend MODEL --to N`: selects a context extension for a pretrained model, without training."""

import hashlib
import json
import shutil
from pathlib import Path

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.run_folder import resume_directory
from kerple.base.run_progress import duration
from kerple.base.templates import render_template
from kerple.config.parsing import MODEL_FORMS, command_parser, parse
from kerple.data.shard_options import ShardOptions
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size


def main(arguments: list[str]) -> None:
    """Choose a method on validation text, measure it on test text, and write the results as a page and as JSON.

    If the method is a scaling of RoPE, a folder with the model and its new configuration is written too.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If an option is out of range, the model cannot be read, no method applies to it or meets the bound,
            the text is too short, or the memory is too small.
    """
    parser = command_parser("extend", __doc__)
    parser.add_argument("model", help=f"model to extend: {MODEL_FORMS}")
    parser.add_argument("--to", type=int, required=True, help="context length to reach, in tokens")
    parser.add_argument("--length", type=int | None, help="training length in tokens; null: that of the model")
    parser.add_argument("--bound", type=float, default=0.5, help="largest rise of the loss at --length, in percent")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget; determines the number of text blocks")
    parser.add_argument("--precision", default="auto", help="auto, 32-true, bf16-mixed or 16-mixed")
    parser.add_argument("--run_dir", type=str | None, help="folder of the results; null: logs/extend/<model>-<N>")
    # the tokenizer and its vocabulary are those of the model
    parser.add_class_arguments(ShardOptions, "data", skip={"tokenizer", "vocabulary"}, default={"corpus": "code"})
    options = parse(parser, arguments)
    from kerple.data.evaluation_text import ShardText
    from kerple.data.prepare.build import prepare
    from kerple.data.shards import Folder
    from kerple.extend.comparison import compare_best
    from kerple.extend.methods import methods
    from kerple.extend.search import TEST, VALIDATION, Search
    from kerple.hf.adapter import config_length
    from kerple.hf.memory import check_memory
    from kerple.hf.model_folder import check_links, link, unpack
    from kerple.hf.pretrained_files import (
        check_tokenizer,
        find_model,
        model_name,
        read_model_config,
        read_tokenizer,
        source_digest,
    )
    from kerple.hf.rope import scaled
    from kerple.measure.runner import Runner
    from kerple.training.torch_settings import configure_torch

    configure_torch()
    source = find_model(options.model)
    config = read_model_config(source)
    length = options.length or config_length(config) or 0
    if options.bound < 0:
        raise UserError(f"bound: got {options.bound:g}, expected 0 or more percent")
    if length < 2:
        given = f"got {options.length}" if options.length is not None else "the model's configuration has none"
        raise UserError(f"length: {given}, expected the training length, 2 tokens or more; set --length")
    if options.to <= length:
        raise UserError(f"to: got {options.to}, expected more than the training length, {length}")
    candidates, reasons = methods(config, length, options.to)
    runner = Runner.detect(None, options.precision)
    vocabulary = vocabulary_size(read_tokenizer(source))
    folder = resume_directory(Path(options.run_dir or f"logs/extend/{model_name(options.model)}-{options.to}"), "model")
    check_links(folder / "model", options.model)
    data = ShardOptions(tokenizer=f"{MODEL_PREFIX}{options.model}", vocabulary=vocabulary, **options.data.as_dict())
    if data.corpus is not None:
        prepare(data)
    shards = Folder(data.location)
    check_tokenizer(shards, source)
    texts = {split: ShardText(shards, split) for split in (VALIDATION, TEST)}
    settings = {"model": options.model, "weights": source_digest(source), "precision": runner.precision}
    settings |= {"length": length, "target": options.to, **{split: text.digest for split, text in texts.items()}}
    records = folder / "records" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    unpacked = folder / "unpacked" / settings["weights"][:8]
    path = options.model if source.gguf is None else unpack(source, config, unpacked)
    search = Search(path, candidates, length, options.to, options.bound / 100, records, texts, runner)
    search.network(candidates[0])
    # The weights are already in memory. The check requires memory for a second copy: a method that replaces
    # the model's positional strategy, such as SelfExtend, copies the weights into this project's network.
    check_memory(config, options.to, runner.device.type)
    blocks, seconds = search.plan(options.minutes)
    print(f"{len(candidates)} methods, {blocks} blocks of {options.to:,} tokens: about {duration(seconds)}", flush=True)
    best, *_ = ranked = search.choose(blocks)
    values = {"settings": settings, "found": compare_best(search, ranked, blocks), "reasons": reasons, "blocks": blocks}
    values |= {"bound": options.bound, "k": search.k, "lengths": search.lengths, "effects": search.effects}
    if best.position is None:
        config = scaled(config, best.scaling, best.factor, length, best.rope_options)
        link(path, config, folder / "model")
    else:
        shutil.rmtree(folder / "model", ignore_errors=True)  # the result of an earlier call
    values |= {"folder": str(folder), "rope_parameters": getattr(config, "rope_parameters", None)}
    findings = render_template("kerple.extend", "findings.txt.jinja", **values)
    write(folder / "extend.html", render_template("kerple.extend", "page.html.jinja", **values, findings=findings))
    write(folder / "extend.json", json.dumps(values, indent=1))
    print(f"{findings}written to {folder}")
