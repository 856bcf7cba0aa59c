import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from tokenizers import Tokenizer
from torch import Tensor

from kerple.compare.resolution import prepare_and_checksum, read_checksum
from kerple.data import TokenShards
from kerple.data.loader import TrainingLoader
from kerple.data.order import Order
from tests.data.conftest import small_build, write_lines
from tests.toy import Line, trainer

LENGTH = 16


def shards(directory: Path, **options: object) -> TokenShards:
    settings = {"directory": str(directory), "vocabulary": 300, "length": LENGTH, "batch_size": 8} | options
    return TokenShards(None, **settings)  # type: ignore[arg-type]


@pytest.fixture
def module(prepared):
    def make(rank: int = 0, ranks: int = 1, max_steps: int = 6, accumulate: int = 1, **options: object) -> TokenShards:
        data, device = shards(prepared, **options), SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            global_rank=rank, world_size=ranks, max_steps=max_steps, accumulate_grad_batches=accumulate, strategy=device
        )
        data.setup()
        return data

    return make


def rows(*loaders: object) -> Tensor:
    """Batches of all ranks in the order of the run, (samples, T + 1)."""
    return torch.cat([batch["tokens"] for step in zip(*loaders, strict=True) for batch in step])  # type: ignore[call-overload]


@pytest.mark.parametrize("data", [{}, {"packing": "best_fit", "mask_documents": True, "length": 90}])
@pytest.mark.parametrize(("ranks", "accumulate", "size", "workers"), [(2, 1, 4, 0), (4, 2, 1, 0), (1, 1, 8, 2)])
def test_samples_have_the_order_of_a_single_device(module, capsys, data, ranks, accumulate, size, workers):
    state, expected = torch.get_rng_state(), rows(module(**data).train_dataloader())
    assert capsys.readouterr().err.count("best fit: ") == bool(data)
    options = {"accumulate": accumulate, "batch_size": size, "workers": workers} | data
    loaders = [module(rank, ranks, **options).train_dataloader() for rank in range(ranks)]
    assert expected.shape == (6 * 8, data.get("length", LENGTH) + 1)
    assert torch.equal(rows(*loaders), expected)
    assert capsys.readouterr().err.count("best fit: ") == bool(data)
    assert not torch.equal(rows(module(seed=3, **data).train_dataloader()), expected)
    assert torch.equal(torch.get_rng_state(), state)  # the model's random numbers do not change


def test_a_run_whose_accumulation_is_scheduled_has_one_epoch_of_different_samples(module):
    data = module(max_steps=6, batch_size=4)  # Lightning requires the option 1 with this callback
    data.trainer.callbacks = [GradientAccumulationScheduler({0: 4, 1: 2})]
    assert torch.equal(rows(data.train_dataloader()), rows(module(accumulate=4, batch_size=4).train_dataloader()))


def test_a_run_of_several_epochs_has_different_samples_unless_their_number_is_given(module):
    for options, expected in (({}, range(30)), ({"samples": 24}, [*range(24), *range(6)])):
        data = module(max_steps=6, batch_size=4, **options)  # a limit or a schedule can make the run longer
        order = Order(len(data.text("train").stream), LENGTH, data.seed, 0)
        starts = data.train_dataloader().locate(np.arange(30))
        assert starts.tolist() == order.starts(np.array(expected)).tolist()


def test_samples_are_located_and_read_for_many_batches_at_once_and_equal_those_of_single_calls(module, monkeypatch):
    monkeypatch.setattr("kerple.data.loader.LOCATED", 20)
    data, calls = module(max_steps=11), []
    order, stream = Order(len(data.text("train").stream), LENGTH, data.seed, 0), data.text("train").stream
    starts = [int(order.starts(np.array([k]))[0]) for k in range(11 * 8)]
    expected = np.stack([stream[start : start + LENGTH + 1] for start in starts]).astype("int64")
    loader = data.train_dataloader()
    assert loader.batches_per_read == 2**17 // (8 * LENGTH)
    loader.batches_per_read, locate, read = 2, loader.locate, loader.read
    loader.locate = lambda samples: calls.append(len(samples)) or locate(samples)
    loader.read = lambda places: calls.append(len(places)) or read(places)
    loader.load_state_dict({"samples_before_epoch": 0, "samples_in_epoch": 16})
    assert torch.equal(rows(loader), torch.from_numpy(expected[16:]))
    # three batches are located at once, the fewest with 20 samples; one batch is read first, and then two or fewer
    assert calls == [24, 8, 16, 24, 16, 8, 24, 16, 8]


BROKEN = """from kerple.data.loader import TrainingLoader
def read(indices): raise OSError("broken disk")
if __name__ == "__main__": list(TrainingLoader(read, 2, 100, 0, 1, workers=2))
"""


@pytest.mark.slow
def test_a_process_ends_after_an_error_in_a_worker(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    run = subprocess.run([sys.executable, tmp_path / "broken.py"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "OSError: broken disk" in run.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_continues_from_its_state_with_another_number_of_devices(module, workers):
    expected, first = rows(module().train_dataloader()), module(workers=workers).train_dataloader()
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state, again = first.state_dict(), [module(rank, 2, batch_size=4).train_dataloader() for rank in range(2)]
    for loader in again:
        loader.load_state_dict(state)
    assert torch.equal(rows(*again), expected[16:])
    with pytest.raises(ValueError, match=r"got batches of .* over all devices, expected a divisor of 0 and 16, "):
        module(batch_size=5).train_dataloader().load_state_dict(state)


@pytest.mark.parametrize("samples", [None, 50])
@pytest.mark.parametrize("read", [1, 5])
def test_a_run_with_epochs_continues_only_with_as_many_samples_in_an_epoch(module, samples, read):
    """In the first epoch and in a later one."""

    def loader(ranks: int, size: int) -> TrainingLoader:
        return module(0, ranks, max_steps=-1, samples=samples, batch_size=size).train_dataloader()

    available = loader(1, 1).batches
    first, epoch = loader(1, 12), available - available % 12
    first.start, first.done = (read - 1) * len(first), 1
    state = first.state_dict()
    for ranks, size in ((1, 12), (2, 6), (1, 1), (1, 6), (3, 2), (1, 4), (2, 1)):
        again = loader(ranks, size)
        again.load_state_dict({key: value for key, value in state.items() if key != "samples_of_epoch"})  # earlier
        if len(again) * ranks * size == epoch:
            again.load_state_dict(state)
        else:
            expected = rf"^data\.batch_size: got an epoch of \d+ samples, expected {epoch} as in the earlier run; "
            with pytest.raises(ValueError, match=expected):
                again.load_state_dict(state)


def test_the_checksum_of_prepared_shards_is_read_without_preparing_others(prepared, tmp_path):
    data = {"class_path": "kerple.data.TokenShards", "init_args": {"directory": str(prepared), "vocabulary": 300}}
    assert read_checksum(data) == prepare_and_checksum(data | {"init_args": data["init_args"] | {"corpus": None}})
    data["init_args"]["directory"] = str(tmp_path / "missing")
    assert read_checksum(data) is None
    assert not list(tmp_path.iterdir())


def test_few_samples_are_repeated_in_every_epoch(module):
    loader, batches = module(samples=20).train_dataloader(), rows(module().train_dataloader())
    for _ in range(2):
        assert torch.equal(rows(loader), batches[:16])  # the two full batches
    with pytest.raises(ValueError, match=r"expected at most 7 in all; decrease it, or increase data.samples$"):
        module(samples=7).train_dataloader()


def test_every_target_of_a_split_is_in_one_block(module):
    text = module().text("test")
    blocks, stream = text.blocks(40), text.stream
    targets = torch.cat([blocks[i][1:] for i in range(len(blocks))]).tolist()
    assert len(blocks) == (len(stream) - 1) // 40
    assert targets == stream[1 : 1 + len(targets)].tolist()
    assert [len(list(module(rank, 3).test_dataloader())) for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_scores_each_segment_once(module, ranks):
    batches = [b for rank in range(ranks) for b in module(rank, ranks, validation_segments=21).val_dataloader()]
    assert all(batch["tokens"].shape == (8, LENGTH + 1) for batch in batches)
    assert sum(int(batch["scored"].sum()) for batch in batches) == 21 * LENGTH
    assert sorted(torch.cat([batch["index"][batch["scored"][:, 0]] for batch in batches]).tolist()) == list(range(21))


def test_texts_are_decoded_exactly_and_the_bytes_of_tokens_are_those_of_the_split(module):
    data = module()
    assert data.decode(data.encode("grey wolves <|endoftext|>")) == "grey wolves <|endoftext|>"
    sizes = data.text("test").token_bytes
    for name, split in data.manifest.splits.items():  # counted when the documents were read
        assert int(sizes[torch.from_numpy(data.text(name).stream[:].astype("int64"))].sum()) == split.bytes > 0


class Watcher(Line):
    """A model that keeps the tokens of its batches."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen.append(batch["tokens"])
        return self.weight**2

    def validation_step(self, *_: object) -> None: ...

    test_step = validation_step


def test_a_finished_run_continues_with_more_steps(prepared, tmp_path):
    def fit(steps: int, checkpoint: str | None = None) -> Tensor:
        keep, model = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=9), Watcher()
        run = trainer(tmp_path, keep, max_steps=steps, limit_val_batches=0)
        run.fit(model, shards(prepared), ckpt_path=checkpoint, weights_only=True)
        return torch.cat(model.seen)

    assert torch.equal(torch.cat([fit(9), fit(12, str(tmp_path / "step=9.ckpt"))]), fit(12))


def test_truncation_and_padding_of_a_tokenizer_are_disabled(prepared, json_lines, tmp_path):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    whole = tokenizer.encode("grey wolves sang").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = small_build(tmp_path / "out", json_lines, tokenizer=str(tmp_path / "tokenizer.json"))
    assert made.splits == TokenShards(None, directory=str(prepared)).manifest.splits
    assert shards(tmp_path / "out").encode("grey wolves sang") == whole
    again = small_build(tmp_path / "again", json_lines, tokenizer=str(tmp_path / "out/tokenizer.json"))
    assert again.tokenizer == made.tokenizer  # the stored file equals the given one


def test_a_checkpoint_is_refused_with_another_tokenizer_or_other_training_data(prepared, tmp_path):
    limits = {"enable_checkpointing": False, "limit_val_batches": 0, "limit_test_batches": 1}
    first = trainer(tmp_path, max_steps=2, **limits)
    first.fit(Watcher(), shards(prepared))
    first.save_checkpoint(tmp_path / "it.ckpt")
    shutil.copytree(prepared, tmp_path / "copy")
    corpus = write_lines(tmp_path / "other.jsonl", [f"zzz {i} zzz zzz zzz zzz" for i in range(400)])
    small_build(tmp_path / "text", corpus, tokenizer=str(prepared))
    small_build(tmp_path / "tokenizer", corpus)

    def resume(stage: str, directory: Path) -> None:
        run = trainer(tmp_path, max_steps=3, **limits)
        getattr(run, stage)(Watcher(), shards(directory), ckpt_path=str(tmp_path / "it.ckpt"), weights_only=True)

    assert shards(tmp_path / "text").checksum() != shards(prepared).checksum() == shards(tmp_path / "copy").checksum()
    shards(prepared).load_state_dict(None)  # a damaged state, which has no checksums to compare
    resume("fit", tmp_path / "copy")  # the same tokens in another folder
    resume("test", tmp_path / "text")  # another text with the same tokenizer
    with pytest.raises(ValueError, match=r"directory: got .*text, expected the tokens on which the checkpoint was"):
        resume("fit", tmp_path / "text")
    with pytest.raises(ValueError, match=r"directory: got .*tokenizer, expected shards with the tokenizer of"):
        resume("test", tmp_path / "tokenizer")
