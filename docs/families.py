"""Prints the table of families in docs/how-to/pretrained.md, from tiny random models: ``python -m docs.families``."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kerple.hf.exporter import export
from kerple.hf.pretrained_model_reader import read_network
from kerple.hf.translation_from_transformers import read_family
from kerple.model.stored_model import build_transformer, copy_weights
from kerple.positions import ALiBi
from tests.hf.tiny import CONFIGS, LENGTH, hf, text, tiny


@torch.inference_mode()
def main() -> None:
    """Print a row for each family: errors of the logits after conversion and export. Read each model with ALiBi too."""
    print("| family | strategy | error of the logits | exported as | error after export |")
    print("|---|---|---:|---|---:|")
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
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
