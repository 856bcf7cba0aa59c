"""Draws docs/figures/document-lengths.svg: how long the documents of the fetched corpora are, beside the paper's.

`python docs/lengths.py` reads data/code-bpe2048 and data/rfc-bpe2048, which `prepare` makes.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from kerple.data.manifest import SPLITS
from kerple.data.shards import Folder
from kerple.data.tokenizer import token_bytes

PAPERS = {"OpenWebText2": 3.85, "GitHub": 5.25, "ArXiv": 46.61}  # mean KiB (Gao et al. 2020, The Pile, Table 1)


def document_bytes(location: str) -> np.ndarray:
    """Bytes of text of each document of a prepared folder, (documents,)."""
    folder, sizes = Folder(location), []
    of_token = np.array(token_bytes(folder.tokenizer()))
    for split in SPLITS:
        stream = folder.stream(split)
        sizes.append(np.add.reduceat(of_token[stream.read(0, len(stream))], folder.documents(split)))
    return np.concatenate(sizes)


def main() -> None:
    """Draw the share of the text that stands in documents of each length, and the paper's means as lines."""
    mpl.rcParams["svg.hashsalt"] = "lengths"
    figure = Figure((7, 3), layout="constrained")
    axes = figure.subplots()
    edges = np.geomspace(0.1, 2000, 50)
    for name, colour in (("code", "#2a78d6"), ("rfc", "#d6552a")):
        sizes = document_bytes(f"data/{name}-bpe2048") / 1024
        label = f"{name}: {len(sizes):,} documents, {sizes.mean():.1f} KiB in the mean"
        axes.hist(
            sizes, edges, weights=sizes / sizes.sum(), histtype="stepfilled", alpha=0.35, color=colour, label=label
        )
        axes.axvline(sizes.mean(), color=colour)
        quarters = np.quantile(sizes, [0.25, 0.5, 0.75]).round(1)
        print(label, f"quarters {quarters}, text in documents above 16 KiB {sizes[sizes > 16].sum() / sizes.sum():.2f}")
    for name, mean in PAPERS.items():
        axes.axvline(mean, color="#666666", linestyle="--", linewidth=1)
        axes.text(mean * 0.97, axes.get_ylim()[1], name, rotation=90, ha="right", va="top", fontsize=8, color="#444444")
    axes.set(xscale="log", xlabel="length of a document in KiB", ylabel="share of the text")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=2)
    figure.savefig(Path(__file__).parent / "figures/document-lengths.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
