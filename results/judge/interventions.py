"""`python -m results.judge.interventions results SHARDS`: the models of results/models with changes at test time.

SHARDS is the folder of the corpus `code` that main read, such as data/code-bpe2048. The program writes tables and the
page interventions/README.md, which is interventions.md with its answers. With ``--report`` in place of SHARDS it writes
the page from the committed tables.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch

from kerple.data.evaluation_text import ShardText, Text
from kerple.measure.far_context import CONTEXTS, counterparts, document_groups, far_context_texts, mean_interval
from kerple.model import Transformer
from kerple.positions import KerpleLog, Shape, Temperature
from results.judge.copying import LENGTH, MODELS, NEAR, TARGETS, answer, parts, write_page
from results.judge.statements import with_interval
from results.judge.weights import RepeatedTokens, blocks_of_validation, temperature_in_global_layers

PAGE = Path(__file__).with_suffix(".md")
PER_PACKAGE, PER_DOCUMENT, VALIDATION_BLOCKS = 12, 2, 16
WITH_FACTOR = ("KERPLE-log", "RNoPE-SWA", "RoPE")
SCALES = (0.05, 0.1, 0.2, 0.4, 0.8)
RULES: dict[str, Sequence[float]] = {  # numbers to choose from: the scale a, but n₀ for SWAN
    "Llama 4": SCALES,
    "log n": SCALES,
    "SWAN": (8, 32, 128, 512, 2048),
}
BIASES = (0.0, -2.5, -6.2, -8.2)  # of the flattest head at distance 2,047
DISTANCE = 1024  # of repeated tokens, by which models are ordered


def temperature(shape: Shape, rule: str, number: float) -> Temperature:
    """Return the factor of a rule of `RULES` with one of its numbers."""
    if rule == "SWAN":
        return Temperature(shape, "swan", length=int(number))
    return Temperature(shape, "llama4" if rule == "Llama 4" else "inkling", number)


@contextmanager
def flattest_head(position: KerpleLog, bias: float) -> Iterator[None]:
    """Context in which r1 of the flattest head is scaled so that its bias at distance `LENGTH` - 1 is ``bias``.

    The flattest head has the largest bias at this distance. All layers share the strategy.
    """
    biases = position.bias(torch.tensor([LENGTH - 1.0], dtype=position.r1.dtype))[:, 0]
    head = int(biases.argmax())
    trained = position.r1.detach().clone()
    with torch.no_grad():
        position.r1[head] *= bias / biases[head]
    try:
        yield
    finally:
        with torch.no_grad():
            position.r1.copy_(trained)


@torch.inference_mode()
def measure(network: Transformer, text: Text, contexts: Sequence[str]) -> pd.DataFrame:
    """Return the number of targets, and the sums of losses in nats by context, for each package."""
    blocks = text.document_blocks(LENGTH, None, 0.5, PER_PACKAGE, PER_DOCUMENT)
    assert blocks.documents is not None
    groups = document_groups(text, blocks.documents.tolist())
    rows = []
    for group, block, other in zip(groups, blocks, counterparts(groups), strict=True):
        texts = far_context_texts(block, blocks[other], LENGTH, NEAR)
        losses = {name: float(network.losses(texts[name][None], TARGETS).double().sum()) for name in contexts}
        rows.append({"package": group, "targets": TARGETS, **losses})
    return pd.DataFrame(rows).groupby("package", as_index=False, sort=False).sum()


@torch.inference_mode()
def factors(network: Transformer, text: ShardText) -> tuple[list[pd.DataFrame], pd.DataFrame]:
    """Return the sums of `measure` for each rule with the best number on validation text, and the validation losses."""
    blocks = blocks_of_validation(text, LENGTH, VALIDATION_BLOCKS)
    tables, rows = [], []
    for rule, numbers in RULES.items():
        for number in numbers:
            with temperature_in_global_layers(network, temperature(network.shape, rule, number)):
                losses = [float(network.losses(block[None], TARGETS).mean()) for block in blocks]
            rows.append({"change": rule, "number": number, "loss": sum(losses) / len(losses)})
        chosen = min(rows[-len(numbers) :], key=lambda row: row["loss"])["number"]
        with temperature_in_global_layers(network, temperature(network.shape, rule, chosen)):
            tables.append(measure(network, text, ["own"]).assign(change=rule, number=chosen))
    return tables, pd.DataFrame(rows)


def losses_of(losses: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the mean losses by package and context, for each model and change; a bias has its number as its name."""
    names = losses["change"].where(losses["change"] != "bias", losses["number"].map("{:g}".format))
    means = losses.assign(change=names).set_index("package")
    means[list(CONTEXTS)] = means[list(CONTEXTS)].div(means["targets"], axis=0)
    return {(str(model), str(change)): rows for (model, change), rows in means.groupby(["model", "change"], sort=False)}


def effects(losses: pd.DataFrame) -> pd.DataFrame:
    """Return loss without distant text, own loss, gain and disturbance by package."""
    none, own = losses["none"], losses["own"]
    return pd.DataFrame({"none": none, "own": own, "gain": none - own, "disturbance": losses["foreign"] - none})


def steps(values: Sequence[pd.Series], above: bool) -> str:
    """Return the answer to the question whether each value but the first is above, or below, the one before it."""
    answers = [answer(after - before, above) for before, after in pairwise(values)]
    words = [text.split("**")[1] for text in answers]
    word = next((word for word in ("No", "Inconclusive") if word in words), "Yes")
    return f"**{word}**, {'; '.join(text.partition('**, ')[2] for text in answers)}"


def page(losses: pd.DataFrame, repeated: pd.DataFrame, copied: pd.DataFrame) -> str:
    """Return the page from its tables of losses and of repeated tokens, and the table of `results.judge.copying`."""
    of = losses_of(losses)
    change = {
        (model, rule): of[model, rule]["own"] - of[model, "trained"]["own"] for model in WITH_FACTOR for rule in RULES
    }
    slopes = {bias: effects(of["KERPLE-log", bias]) for bias in ("-8.2", "-6.2", "trained", "-2.5", "0")}
    flatter = [slopes[bias] for bias in ("trained", "-2.5", "0")]
    distant = pd.DataFrame({model: parts(rows, "own")["distant"] for model, rows in copied.groupby("model")})
    repetition = repeated.assign(fall=repeated["first"] - repeated["repeated"]).pivot_table(
        "fall", "model", "distance", sort=False
    )
    return PAGE.read_text().format(
        factor=answer(change["RNoPE-SWA", "Llama 4"], above=False),
        log=answer(change["RNoPE-SWA", "log n"] - change["RNoPE-SWA", "Llama 4"], above=False),
        swan=answer(change["RNoPE-SWA", "SWAN"] - change["RNoPE-SWA", "Llama 4"], above=False),
        kerple=answer(change["KERPLE-log", "Llama 4"], above=False),
        rope=answer(change["RoPE", "Llama 4"], above=False),
        more=answer(change["RNoPE-SWA", "Llama 4"] - change["KERPLE-log", "Llama 4"], above=False),
        gain=steps([each["gain"] for each in flatter], above=False),
        disturbance=steps([each["disturbance"] for each in slopes.values()], above=True),
        by_repetition=ordered(repetition[DISTANCE]),
        by_copying=ordered(distant.mean()),
        factors="\n".join(_factor_rows(of, change)),
        slopes="\n".join(_slope_rows(slopes)),
        repeated="\n".join(_repetition_rows(repetition, distant)),
    )


def ordered(values: pd.Series) -> str:
    """Return the names of the values in descending order."""
    return ", ".join(values.sort_values(ascending=False).index)


def _factor_rows(of: dict[tuple[str, str], pd.DataFrame], change: dict[tuple[str, str], pd.Series]) -> Iterable[str]:
    """Yield the lines of the table of factors."""
    yield "| model | rule | chosen a or n₀ | own loss | own loss, with minus without factor |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for model in WITH_FACTOR:
        yield f"| {model} | no factor | | {of[model, 'trained']['own'].mean():.3f} | |"
        for rule in RULES:
            losses = of[model, rule]
            difference = with_interval(*mean_interval(change[model, rule].to_numpy()))
            yield f"| {model} | {rule} | {losses['number'].iloc[0]:g} | {losses['own'].mean():.3f} | {difference} |"


def _slope_rows(slopes: dict[str, pd.DataFrame]) -> Iterable[str]:
    """Yield the lines of the table of biases."""
    yield "| bias at distance 2,047 | loss without distant text | own loss | gain | disturbance |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for bias, values in slopes.items():
        cells = [f"{values[name].mean():.3f}" for name in ("none", "own")]
        cells += [with_interval(*mean_interval(values[name].to_numpy())) for name in ("gain", "disturbance")]
        yield f"| {bias.replace('-', '−')} | {' | '.join(cells)} |"


def _repetition_rows(repetition: pd.DataFrame, distant: pd.DataFrame) -> Iterable[str]:
    """Yield the lines of the table of repeated tokens."""
    yield f"| model |{'|'.join(f' distance {distance:,} ' for distance in repetition)}| part *distant* |"
    yield f"| --- |{' ---: |' * len(repetition.columns)} ---: |"
    for model, falls in repetition.iterrows():
        cells = [f"{fall:+.3f}".replace("-", "−") for fall in falls]
        yield f"| {model} | {' | '.join(cells)} | {with_interval(*mean_interval(distant[model].to_numpy()))} |"


def run(root: Path, text: ShardText) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield names of tables, and parts of these tables, by model."""
    # kerple.hf imports transformers, which takes seconds
    from kerple.hf.pretrained_model_reader import read_network

    for folder, model in MODELS.items():
        print(model, file=sys.stderr, flush=True)
        network = read_network(str(root / "models" / folder))
        table = RepeatedTokens().run(network, text).tables["repeated_tokens"]
        yield "repeated", pd.DataFrame(table).assign(model=model)
        if model in WITH_FACTOR:
            contexts = CONTEXTS if model == "KERPLE-log" else ["own"]
            yield "losses", measure(network, text, contexts).assign(model=model, change="trained")
            tables, validation = factors(network, text)
            yield "losses", pd.concat(tables).assign(model=model)
            yield "validation", validation.assign(model=model)
        if model == "KERPLE-log":
            for bias in BIASES:
                with flattest_head(network.positions[0], bias):
                    sums = measure(network, text, CONTEXTS)
                yield "losses", sums.assign(model=model, change="bias", number=bias)


def committed_page(root: Path) -> str:
    """Return the page from the tables in the folder of results."""
    losses, repeated = (pd.read_csv(root / f"interventions/{name}.csv") for name in ("losses", "repeated"))
    return page(losses, repeated, pd.read_csv(root / "copying/parts.csv"))


if __name__ == "__main__":
    write_page(sys.argv[1:], "interventions", run, committed_page)
