"""Mixtures: exact fractions, samples of parts, selected documents, checksums, and validation by part."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonargparse import Namespace
from pytorch_lightning.trainer.states import TrainerFn

from kerple.data import TokenShards
from kerple.data.loader import TrainingLoader
from kerple.data.manifest import MANIFEST_FILE
from kerple.data.mixture import Mixture, Part, SelectedDocuments
from kerple.data.order import Order
from kerple.data.shard_options import CACHE, CACHE_GB
from kerple.data.shards import Folder, ShardFetcher, TokenStream
from kerple.training.fit_cost import _visible_fraction
from tests.data.conftest import small_build, write_lines
from tests.toy import small_model, trainer

LENGTH = 16


@pytest.fixture(scope="module")
def second(prepared, documents, tmp_path_factory) -> Path:
    """A folder with other documents and the tokenizer of the first one."""
    folder = tmp_path_factory.mktemp("second")
    lines = write_lines(folder / "lines.jsonl", [" ".join(reversed(text.split(" "))) for text in documents])
    small_build(folder / "shards", lines, tokenizer=str(prepared))
    return folder / "shards"


@pytest.fixture(scope="module")
def divided(prepared, json_lines, tmp_path_factory) -> Path:
    """A folder with the tokens of the first one in fewer shards."""
    folder = tmp_path_factory.mktemp("divided")
    small_build(folder, json_lines, tokenizer=str(prepared), part=12_000)
    return folder


def module(directory: Path, **options: object) -> TokenShards:
    settings = {"directory": str(directory), "vocabulary": 300, "length": LENGTH, "batch_size": 8, "samples": 80}
    return TokenShards(None, **settings | options)  # type: ignore[arg-type]


def rank_loader(data: TokenShards, rank: int, ranks: int) -> TrainingLoader:
    """The loader of one of several ranks, which divide each batch of the data."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, max_steps=-1, strategy=strategy)  # type: ignore
    data.batch_size //= ranks
    return data.train_dataloader()


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ((700, 300), 10),
        ((1000,), 1),
        pytest.param((5, 995), 200, marks=pytest.mark.slow),
        pytest.param((333, 333, 334), 1000, marks=pytest.mark.slow),
    ],
)
def test_every_round_has_exactly_the_weights(weights, size):
    orders = [Order(10_000_000 + i, LENGTH, 3, i) for i in range(len(weights))]
    parts = [SimpleNamespace(order=order) for order in orders]
    mixture = Mixture(parts, weights, 3)
    assert mixture.round == size
    for rounds in (1, 7, 1000):
        counts = Counter((mixture.starts(np.arange(rounds * size)) % len(weights)).tolist())
        assert [counts[part] for part in range(len(weights))] == [rounds * size * w // 1000 for w in weights]
    places = mixture.starts(np.arange(3 * size))
    one_by_one = np.concatenate([mixture.starts(np.array([k])) for k in range(3 * size)])
    assert (places == one_by_one).all()
    for part, order in enumerate(orders):  # every part reads its own samples in its order, without gaps
        starts = places[places % len(parts) == part] // len(parts)
        assert sorted(starts) == sorted(order.starts(np.arange(len(starts))))


def test_selected_documents_equal_their_concatenation(prepared):
    folder = Folder(prepared)
    stream, begins = TokenStream(folder, "train"), folder.documents("train")
    selected = SelectedDocuments(stream, begins, 40, 90)
    ends = [*begins[1:], len(stream)]
    kept = [stream[a:b] for a, b in zip(begins, ends, strict=True) if 40 <= b - a < 90]
    expected = np.concatenate(kept)
    assert 0 < len(kept) < len(begins)
    assert len(selected) == len(expected)
    assert selected.begins.tolist() == np.cumsum([0, *map(len, kept)])[:-1].tolist()
    for start in range(0, len(expected), 37):
        assert (selected[start : start + 101] == expected[start : start + 101]).all()


@pytest.mark.parametrize("long", ["", "[20:]"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mask_documents": True}, {"packing": "best_fit"}, {"sections": 2}, {"packing": "best_fit", "sections": 2}],
)
def test_samples_are_those_of_the_parts_for_any_number_of_ranks(prepared, second, options, long):
    mixture = {str(prepared): 0.25, f"{second}{long}": 0.75}
    data = module(prepared, mixture=mixture, **options)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == 10
    for ranks in (2, 4):  # each batch is divided between the ranks
        loaders = [rank_loader(module(prepared, mixture=mixture, **options), rank, ranks) for rank in range(ranks)]
        for batch, parts in zip(batches, zip(*loaders, strict=True), strict=True):
            for name, values in batch.items():
                assert torch.equal(torch.cat([part[name] for part in parts]), values)
    alone = [data._samples(number, part) for number, part in enumerate(data.parts)]
    expected = [part.read(part.order.starts(np.arange(60))) for part in alone]
    rows = torch.cat([batch["tokens"] for batch in batches])
    found = [of["tokens"].tolist() for of in expected]
    first = [row in found[0] for row in rows.tolist()]
    assert sum(first) == 20
    assert all(row in found[1] for row, is_first in zip(rows.tolist(), first, strict=True) if not is_first)
    if options.get("mask_documents"):
        both = {
            tuple(t): d for of in expected for t, d in zip(of["tokens"].tolist(), of["documents"].tolist(), strict=True)
        }
        documents = torch.cat([batch["documents"] for batch in batches]).tolist()
        assert documents == [both[tuple(row)] for row in rows.tolist()]


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_shards_that_are_fetched_are_those_that_are_read(prepared, second, packing, tmp_path):
    parts = {f"file://{prepared}": 0.25, f"file://{second}[20:]": 0.65, str(second): 0.1}
    options = {"packing": packing, "length": 64, "cache": str(tmp_path), "sections": 4, "samples": 20}
    data = module(prepared, mixture=parts, **options)
    data.setup("fit")
    loader = data.train_dataloader()
    fetcher = ShardFetcher(*loader.fetcher.args, threads=0)
    places = loader.locate(np.arange(20))
    fetcher.request(places)
    fetched = {fetcher.shards.get() for _ in range(fetcher.shards.qsize())}
    loader.read(places.tolist())
    streams = [getattr(stream, "stream", stream) for stream, _ in fetcher.parts]
    assert all(stream.maps for stream in streams)
    assert fetched == {(part, shard) for part in (0, 1) for shard in streams[part].maps}  # the last one is local
    ranks = [rank_loader(module(prepared, mixture=parts, **options), rank, 2) for rank in (0, 1)]
    read = [{(place % 3, np.searchsorted(fetcher.parts[place % 3][1], place // 3, "right"))
             for places in loader._places(range(len(loader))) for place in places} for loader in ranks]  # fmt: skip
    assert len(read[0] & read[1]) < len(read[0] | read[1]) / 2  # each reads its own part of a section


def test_the_checksum_identifies_all_parts(prepared, second):
    parts = [None, {str(prepared): 1.0}, {str(second): 1.0}, {str(prepared): 0.5, str(second): 0.5}]
    parts += [{f"{prepared}[20:]": 1.0}, {f"{prepared}[:20]": 1.0}]
    checksums = [module(prepared, mixture=mixture).checksum() for mixture in parts]
    assert checksums[0] == checksums[1]  # the same tokens
    assert len(set(checksums)) == 5
    states = [module(prepared, mixture=mixture).state_dict()["training"] for mixture in parts]
    assert states[0] == states[1]
    assert len(set(states)) == 5


def test_validation_has_the_blocks_of_each_part(prepared, second):
    mixture = {str(second): 0.5, f"{prepared}[20:]": 0.5}
    data = module(prepared, mixture=mixture, validation_segments=5)
    first, long = data.val_dataloader()
    stream = TokenStream(Folder(second), "validation")
    assert torch.cat([b["tokens"] for b in first])[4, 0] == stream[4 * LENGTH : 4 * LENGTH + 1].item()
    folder = Folder(prepared)
    begins = folder.documents("validation")
    selected = SelectedDocuments(TokenStream(folder, "validation"), begins, 20, 1 << 40)
    assert torch.cat([b["tokens"] for b in long])[0].tolist() == selected[: LENGTH + 1].tolist()


def test_a_test_says_with_which_training_text_its_documents_were_compared(prepared, second, caplog):
    data = module(prepared, mixture={str(second): 1.0})
    caplog.set_level("INFO")
    data.setup("test")
    assert f"only with the training text of {prepared}" in caplog.text


def test_a_prediction_needs_no_part_and_a_continued_fit_the_same_text(prepared, second):
    module(prepared, mixture={"moved": 1.0}).setup("predict")  # only the tokenizer of the folder is used
    data = module(prepared, mixture={str(second): 1.0})
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^data\.mixture: got \[.*second.*\], expected the tokens on which"):
        data.load_state_dict({"training": "another"})


@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.TESTING])
@pytest.mark.parametrize("part", ["", "{}", "{}[20:]"])
@pytest.mark.parametrize("sections", [None, 1])
def test_a_fit_with_sections_continues_only_with_shards_of_the_same_division(
    prepared, divided, second, sections, part, fn
):
    def data(folder: Path) -> TokenShards:
        mixture = {part.format(folder): 0.5, str(second): 0.5} if part else None
        made = module(folder, mixture=mixture, sections=sections)
        made.trainer = SimpleNamespace(state=SimpleNamespace(fn=fn))  # type: ignore[assignment]
        return made

    state = data(prepared).state_dict()
    assert all(state[key] == data(divided).state_dict()[key] for key in ("tokenizer", "training"))
    data(prepared).load_state_dict(state)
    data(divided).load_state_dict({key: state[key] for key in ("tokenizer", "training")})  # of earlier versions
    if sections is None or fn == TrainerFn.TESTING:
        data(divided).load_state_dict(state)
        return
    option = "mixture" if part else "directory"
    with pytest.raises(ValueError, match=rf"^data\.{option}: got .*, expected the shards on which the checkpoint was"):
        data(divided).load_state_dict(state)


@pytest.mark.parametrize(
    "weights", [(0.5, 0.4), (0.5, 0.5, 0.0), (0.4995, 0.5005), (1.5, -0.5), (float("nan"), 1.0), ()]
)
def test_weights_are_thousandths_whose_sum_is_1(prepared, weights):
    with pytest.raises(ValueError, match=r"^data\.mixture: got .*, expected fractions .* whose sum is 1$"):
        module(prepared, mixture={f"part{i}": weight for i, weight in enumerate(weights)})


def test_parts_that_do_not_fit_are_errors(prepared, second, tmp_path, documents):
    def start(directory: Path = prepared, **options: object) -> None:
        data = module(directory, **options)
        data.setup("fit")
        data.train_dataloader()
        data.val_dataloader()

    other = tmp_path / "other"
    small_build(other, write_lines(tmp_path / "lines.jsonl", documents[:150]), vocabulary=290)
    with pytest.raises(ValueError, match=r"^data\.mixture: got .*other with another tokenizer, expected the tokenizer"):
        start(mixture={str(other): 1.0})
    ends = Path(shutil.copytree(prepared, tmp_path / "ends"))  # a file beside the tokenizer had declared another token
    manifest = json.loads((ends / MANIFEST_FILE).read_text())
    (ends / MANIFEST_FILE).write_text(json.dumps(manifest | {"end_of_text": 7}))
    expected = r"^data\.mixture: got .*ends with the end-of-text token 7, expected 0, as in .*; prepare it with "
    with pytest.raises(ValueError, match=expected):
        start(mixture={str(ends): 1.0})
    state = module(prepared).state_dict()
    with pytest.raises(ValueError, match=r"^data\.directory: got .*ends, expected shards with the tokenizer of the "):
        module(ends).load_state_dict(state)
    module(ends).load_state_dict({key: state[key] for key in ("tokenizer", "training")})  # of earlier versions
    fractions = tmp_path / "fractions"
    small_build(fractions, tmp_path / "lines.jsonl", tokenizer=str(prepared), split_fractions=(0.6, 0.2, 0.2))
    with pytest.raises(
        ValueError, match=r"^data\.mixture: got .* with data.split_fractions \[0.6, .* expected \[0.8, "
    ):
        start(mixture={str(fractions): 1.0})
    with pytest.raises(ValueError, match=r"run `python run.py prepare` first, or set the folder as seen from /"):
        start(mixture={str(tmp_path / "none"): 1.0})
    expected = r"^data\.mixture: got .*\[99999:\], which has no tokens for training, expected parts with documents"
    with pytest.raises(ValueError, match=expected):
        start(mixture={f"{prepared}[99999:]": 1.0})
    with pytest.raises(ValueError, match=r"^data\.mixture: got a training with 80000 samples, expected at most \d+, "):
        start(mixture={str(second): 1.0}, samples=80000, repeat_parts=False)
    start(mixture={str(second): 1.0}, samples=80000)


def test_a_fit_logs_the_validation_loss_of_each_part_and_their_weighted_mean(prepared, second, tmp_path):
    mixture = {str(prepared): 0.25, str(second): 0.75}
    data = module(prepared, mixture=mixture, samples=16, validation_segments=11)
    model, fit = small_model("NoPE", vocabulary=300), trainer(tmp_path, max_steps=2)
    fit.fit(model, data)
    logged = {name: float(value) for name, value in fit.callback_metrics.items() if name.startswith("val/")}
    assert logged.keys() == {"val/loss", *(f"val/loss/{folder}" for folder in mixture)}
    for folder in mixture:
        stream = TokenStream(Folder(folder), "validation")
        blocks = [torch.tensor(stream[i * LENGTH : (i + 1) * LENGTH + 1].astype("int64")) for i in range(11)]
        with torch.no_grad():
            loss = float(model.network.losses(torch.stack(blocks)).double().mean())
        assert logged[f"val/loss/{folder}"] == pytest.approx(loss, abs=1e-5)
    mean = sum(weight * logged[f"val/loss/{folder}"] for folder, weight in mixture.items())
    assert logged["val/loss"] == pytest.approx(mean, abs=1e-6)


def test_the_cost_of_a_fit_counts_the_visible_keys_of_each_part(prepared, second):
    mixture = {f"{prepared}[:40]": 0.25, str(second): 0.75}
    options = {"corpus": None, "directory": str(prepared), "length": LENGTH, "packing": "best_fit", "mixture": mixture}
    keys = 0.0
    for name, weight in mixture.items():
        part = Part.open(name, CACHE, CACHE_GB)
        stream = part.stream("train")
        counts = np.diff([*part.begins(stream), len(stream)]).tolist()  # tokens of each document
        seen = [token % LENGTH + 1 for count in counts for token in range(count)]
        keys += weight * float(np.mean(seen))
    fraction, rows = _visible_fraction(Namespace(mask_documents=True, **options))
    assert fraction == pytest.approx(keys / ((LENGTH + 1) / 2))
    assert rows["keys a query"].startswith(f"{keys:.1f} on average")
