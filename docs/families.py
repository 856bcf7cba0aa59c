"""Writes results/families/converted.md from tiny random models: ``python -m docs.families``."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kerple.hf.exporter import export
from kerple.hf.pretrained_model_reader import read_network
from kerple.hf.translation_from_transformers import read_family
from kerple.model.stored_model import build_transformer, copy_weights
from kerple.positions import ALiBi
from tests.hf.tiny import CONFIGS, LENGTH, hf, text, tiny

PAGE = Path(__file__).parents[1] / "results/families/converted.md"


@torch.inference_mode()
def main() -> None:
    """Write a row for each family: errors of the logits after conversion and export. Read each model with ALiBi too.

    The text above the table is kept.
    """
    lines = [
        "| family | strategy | error of the logits | exported as | error after export |",
        "|---|---|---:|---|---:|",
    ]
    for family in CONFIGS:
        model, tokens = tiny(family), text(2, 3 * LENGTH)
        expected, stored = model(tokens).logits, read_family(model.config, model.state_dict())
        network = build_transformer(stored.model).eval()
        copy_weights(network, stored)
        with TemporaryDirectory() as folder:
            model.save_pretrained(f"{folder}/theirs")
            architecture = export(stored, Path(folder) / "ours", None, None)
            exported = hf.AutoModelForCausalLM.from_pretrained(f"{folder}/ours").eval()
            other = read_network(f"{folder}/theirs", position=ALiBi)
        assert other.losses(tokens).isfinite().all()
        errors = [(logits - expected).abs().max() for logits in (network(tokens), exported(tokens).logits)]
        cells = [type(model).__name__, network.name, f"{errors[0]:.0e}", architecture, f"{errors[1]:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    page = "\n".join([PAGE.read_text("utf-8").partition("\n| ")[0], *lines, ""])
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
