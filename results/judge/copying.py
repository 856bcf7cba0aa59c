"""`python -m results.judge.copying results SHARDS`: parts of the gain from distant text, by what could be copied.

SHARDS is the folder of the corpus `code` that main read, such as data/code-bpe2048. The program measures the models of
results/models, writes the table copying/parts.csv and the page copying/README.md, which is copying.md with its answers.
With ``--report`` in place of SHARDS it writes the page from the committed table.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from kerple.base.errors import require
from kerple.config.files import read_mapping
from kerple.data.evaluation_text import ShardText, Text
from kerple.data.shards import Folder
from kerple.measure.far_context import document_groups, far_context_texts, mean_interval
from kerple.model.network import Network
from results.judge.statements import with_interval

PAGE = Path(__file__).with_suffix(".md")
MODELS = {"kerple-log": "KERPLE-log", "alibi": "ALiBi", "rnope-swa": "RNoPE-SWA", "rope": "RoPE"}
LENGTH, NEAR, TARGETS = 2048, 128, 64  # tokens of a block, of its near text, and scored targets
CONTEXTS = ("none", "own", "shuffled")
CATEGORIES = ("near", "distant", "new")


def categories(tokens: NDArray[np.int64], near: int, targets: int) -> list[str]:
    """Return the category of each of the last targets of a block, as copying.md defines it.

    Args:
        tokens: The inputs of the block and its last target, (N + 1,).
        near: Number of last inputs that are near text.
        targets: Number of last targets.
    """
    last_seen: dict[tuple[int, int], int] = {}  # index of the first token of the last occurrence of each pair
    found = []
    first_near = len(tokens) - 1 - near
    for i in range(2, len(tokens)):
        pair = (int(tokens[i - 2]), int(tokens[i - 1]))
        if i >= len(tokens) - targets:
            start = last_seen.get(pair, -1)
            found.append("new" if start < 0 else "near" if start >= first_near else "distant")
        last_seen[pair] = i - 2
    return found


def contexts(block: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the texts by the names of `CONTEXTS`, which end in the same targets.

    Args:
        block: `LENGTH` inputs and the last target, (LENGTH + 1,) int64.
        generator: Source of the random order of the shuffled text.
    """
    distant = block[: -NEAR - 1]
    shuffled = distant[torch.randperm(len(distant), generator=generator)]
    texts = far_context_texts(block, shuffled, LENGTH, NEAR)
    return {"none": texts["none"], "own": texts["own"], "shuffled": texts["foreign"]}


@torch.inference_mode()
def measure(network: Network, text: Text, per_group: int | None = 40, per_document: int | None = 4) -> pd.DataFrame:
    """Return the number of targets, and the sums of losses in nats by context, for each package and category."""
    blocks = text.document_blocks(LENGTH, None, 0.5, per_group, per_document)
    assert blocks.documents is not None
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group, block in zip(document_groups(text, blocks.documents.tolist()), blocks, strict=True):
        losses = {
            name: network.losses(tokens[None], TARGETS)[0].double().numpy()
            for name, tokens in contexts(block, generator).items()
        }
        kinds = categories(block.numpy(), NEAR, TARGETS)
        rows.append(pd.DataFrame({"package": group, "category": kinds, "targets": 1, **losses}))
    return pd.concat(rows).groupby(["package", "category"], as_index=False, sort=False).sum()


def parts(sums: pd.DataFrame, context: str) -> pd.DataFrame:
    """Return the parts of the gain by package and category, in nats per target; 0 for a category without targets.

    Args:
        sums: The result of `measure`.
        context: The text with which the loss without distant text is compared: ``own`` or ``shuffled``.
    """
    gains = sums.assign(gain=sums["none"] - sums[context]).pivot_table(
        "gain", "package", "category", "sum", fill_value=0
    )
    return gains.reindex(columns=list(CATEGORIES), fill_value=0).div(sums.groupby("package")["targets"].sum(), axis=0)


def answer(values: pd.Series, above: bool) -> str:
    """Return the answer to the question whether the mean over packages is above 0, or below 0, and the interval."""
    mean, low, high = mean_interval(values.to_numpy())
    yes, no = (low > 0, high < 0) if above else (high < 0, low > 0)
    return f"**{'Yes' if yes else 'No' if no else 'Inconclusive'}**, {with_interval(mean, low, high)}"


def page(table: pd.DataFrame) -> str:
    """Return the content of the page from the sums of all models, a table with the column ``model``."""
    of = {name: rows.drop(columns="model") for name, rows in table.groupby("model", sort=False)}
    own = {name: parts(sums, "own") for name, sums in of.items()}
    shuffled = {name: parts(sums, "shuffled") for name, sums in of.items()}
    cost = {name: found["near"] + found["new"] for name, found in own.items()}
    copies = [name for name in of if mean_interval(own[name]["distant"].to_numpy())[1] > 0]
    falsified = "; ".join(f"{name}: {answer(shuffled[name]['distant'], above=True)}" for name in copies)
    return PAGE.read_text().format(
        copying=answer(own["KERPLE-log"]["distant"], above=True),
        shuffled=falsified or "No model has one.",
        dilution=answer(cost["RNoPE-SWA"], above=False),
        more=answer(cost["RNoPE-SWA"] - cost["KERPLE-log"], above=False),
        table="\n".join(_rows(of, own, shuffled)),
    )


def _rows(
    of: dict[str, pd.DataFrame], own: dict[str, pd.DataFrame], shuffled: dict[str, pd.DataFrame]
) -> Iterable[str]:
    """Yield the lines of the table of all parts."""
    yield "| model | category | targets | gain of a target | part of the gain | part, shuffled |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, sums in of.items():
        totals = sums.groupby("category")[["targets", *CONTEXTS]].sum()
        for category in CATEGORIES:
            row = totals.loc[category]
            cells = [f"{row['targets'] / totals['targets'].sum():.1%}"]
            cells.append(f"{(row['none'] - row['own']) / row['targets']:+.3f}".replace("-", "−"))
            cells += [with_interval(*mean_interval(each[name][category].to_numpy())) for each in (own, shuffled)]
            yield f"| {name} | {category} | {' | '.join(cells)} |"
        sums_of = [with_interval(*mean_interval(each[name].sum(axis=1).to_numpy())) for each in (own, shuffled)]
        yield f"| {name} | all | 100% | | {' | '.join(sums_of)} |"


def main_test_text(root: Path, shards: str) -> ShardText:
    """Return the test text in a folder of shards, which must be that of main."""
    from kerple.hf.exporter import TRAINED_ON  # imports transformers

    text = ShardText(Folder(shards), "test")
    expected = read_mapping(root / "models/kerple-log/config.json")[TRAINED_ON]["test"]
    require(text.digest == expected, "SHARDS", f"test text {text.digest}", f"{expected}, the test text of main")
    return text


def write_page(
    arguments: list[str],
    name: str,
    measure_models: Callable[[Path, ShardText], Iterable[tuple[str, pd.DataFrame]]],
    page_of: Callable[[Path], str],
) -> None:
    """Measure the models unless ``--report`` is given, write tables and page, and print the page.

    Args:
        arguments: The folder of results, and a folder of shards or ``--report``.
        name: Name of the folder of tables and page.
        measure_models: Yields names of tables and parts of these tables, from the folder of results and the test text.
        page_of: Returns the page from the tables in the folder of results.
    """
    require(len(arguments) == 2, "arguments", arguments, "the folder of results, and a folder of shards or --report")
    root, shards = Path(arguments[0]), arguments[1]
    folder = root / name
    if shards != "--report":
        tables: dict[str, list[pd.DataFrame]] = {}
        for table, rows in measure_models(root, main_test_text(root, shards)):
            tables.setdefault(table, []).append(rows)
        folder.mkdir(exist_ok=True)
        for table, found in tables.items():
            pd.concat(found).round(9).to_csv(folder / f"{table}.csv", index=False)
    (folder / "README.md").write_text(text_of_page := page_of(root))
    print(text_of_page)


def run(root: Path, text: ShardText) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield ``parts`` and the rows of this table, by model."""
    # kerple.hf imports transformers, which takes seconds
    from kerple.hf.pretrained_model_reader import read_network

    for model, name in MODELS.items():
        print(name, file=sys.stderr, flush=True)
        yield "parts", measure(read_network(str(root / "models" / model)), text).assign(model=name)


def committed_page(root: Path) -> str:
    """Return the page from the table in the folder of results."""
    return page(pd.read_csv(root / "copying/parts.csv"))


if __name__ == "__main__":
    write_page(sys.argv[1:], "copying", run, committed_page)
