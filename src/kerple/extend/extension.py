"""`Extension`: selects a context extension for a pretrained model, and writes the results to a folder."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerple.base.atomic import write
from kerple.base.errors import require
from kerple.base.run_folder import resume_directory
from kerple.base.templates import render_template
from kerple.data.evaluation_text import ShardText
from kerple.data.prepare.build import prepare
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder
from kerple.data.tokenizer import MODEL_PREFIX, vocabulary_size
from kerple.extend.comparison import compare_best
from kerple.extend.methods import methods
from kerple.extend.search import TEST, VALIDATION, Search
from kerple.hf.memory import check_memory
from kerple.hf.model_folder import check_links, link, unpack
from kerple.hf.position_limit import known_length
from kerple.hf.pretrained_files import find_model, read_model_config, source_digest
from kerple.hf.pretrained_tokenizer import check_tokenizer, read_tokenizer
from kerple.hf.rope import scaled
from kerple.measure.runner import Runner


@dataclass
class Extension:
    """The search for a context extension of a model, and the content of the folder of its results.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        search: The search, whose network is in memory.
        reasons: Reasons why methods do not apply to the model, by name.
        settings: The settings that identify the results.
        bound: Largest rise of the loss at the training length, in percent.
        folder: Folder of the results.
    """

    config: Any
    search: Search
    reasons: Mapping[str, str]
    settings: Mapping[str, Any]
    bound: float
    folder: Path

    @classmethod
    def prepare(
        cls,
        model: str,
        length: int,
        training_length: int | None,
        bound: float,
        precision: str,
        folder: Path,
        data: Mapping[str, Any],
    ) -> "Extension":
        """Prepare the text and read the model, after checking the options.

        Args:
            model: The model, see `kerple.hf.pretrained_files.find_model`.
            length: Context length to reach, in tokens.
            training_length: Training length in tokens; None for that of the model.
            bound: Largest rise of the loss at the training length, in percent.
            precision: Precision of `Runner.detect`.
            folder: Folder of the results. Results of an earlier call are continued.
            data: Options of `ShardOptions` except ``tokenizer`` and ``vocabulary``, which are those of the model.

        Raises:
            UserError: If an option is out of range, the model cannot be read, no method applies to it, the text is too
                short, or the memory is too small.
        """
        source = find_model(model)
        config = read_model_config(source)
        require(bound >= 0, "bound", f"{bound:g}", "0 or more percent")
        fixed = config.model_type in ("kerple", "kerple_remote")
        trained = known_length(config, training_length, "training_length", fixed) or 0
        reason = "" if trained else ", because the model's configuration has none"
        expected = f"the training length, 4 tokens or more{reason}"
        require(trained >= 4, "training_length", trained or None, expected)
        require(length > trained, "length", length, f"more than the training length, {trained}")
        candidates, reasons = methods(config, trained, length)
        runner = Runner.detect(None, precision)
        vocabulary = vocabulary_size(read_tokenizer(source))
        folder = resume_directory(folder, "model")
        check_links(folder / "model", model)
        options = ShardOptions(tokenizer=f"{MODEL_PREFIX}{model}", vocabulary=vocabulary, **data)
        if options.corpus is not None:
            prepare(options)
        shards = Folder(options.location, options.cache, options.cache_gb)
        check_tokenizer(shards, source)
        texts = {split: ShardText(shards, split) for split in (VALIDATION, TEST)}
        settings: dict[str, Any] = {"model": model, "weights": source_digest(source), "precision": runner.precision}
        settings |= {"length": trained, "target": length, **{split: text.digest for split, text in texts.items()}}
        records = folder / "records" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
        path = model if source.gguf is None else unpack(source, config, folder / "unpacked" / settings["weights"][:8])
        search = Search(path, candidates, trained, length, bound / 100, records, texts, runner)
        search.network(candidates[0])
        # The weights are already in memory. The check requires memory for a second copy: a method that replaces
        # the model's positional strategy, such as SelfExtend, copies the weights into this project's network.
        check_memory(config, length, runner.device.type)
        return cls(config, search, reasons, settings, bound, folder)

    def run(self, blocks: int) -> str:
        """Choose a method on validation text, measure it on test text, and write the results as a page and as JSON.

        If the method is a scaling of RoPE, a folder with the model and its new configuration is written too.

        Args:
            blocks: Number of blocks at the length to reach, see `Search.block_budget`.

        Returns:
            The findings as text.

        Raises:
            UserError: If no method meets the bound.
        """
        search, model = self.search, self.folder / "model"
        best, *_ = ranked = search.choose(blocks)
        found = compare_best(search, ranked, blocks)
        values = {"settings": self.settings, "found": found, "reasons": self.reasons, "blocks": blocks}
        values |= {"bound": self.bound, "k": search.k, "lengths": search.lengths, "effects": search.effects}
        config = self.config
        if best.position is None:
            config = scaled(config, best.scaling, best.factor, search.length, best.rope_options)
            link(search.path, config, model)
        else:
            shutil.rmtree(model, ignore_errors=True)  # the result of an earlier call
        values |= {"folder": str(self.folder), "rope_parameters": getattr(config, "rope_parameters", None)}
        findings = render_template("kerple.extend", "findings.txt.jinja", **values)
        page = render_template("kerple.extend", "page.html.jinja", **values, findings=findings)
        write(self.folder / "extend.html", page)
        write(self.folder / "extend.json", json.dumps(values, indent=1))
        return findings
