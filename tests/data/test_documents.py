"""Documents in training and validation batches, against loops over the tokens of shards."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.data import TokenShards
from kerple.data.documents import Documents, mean_visible_keys
from kerple.data.shards import Folder
from kerple.model.network import Batch
from tests.data.test_datamodule import module, shards  # noqa: F401 (a fixture)
from tests.toy import small_model, trainer

LENGTH = 90  # longer than many documents


def boundaries(batch: Batch) -> torch.Tensor:
    """Return where the number of the document rises, (B, T) bool. It never changes otherwise."""
    steps = batch["documents"].diff()
    assert ((steps == 0) | (steps == 1)).all()
    return steps == 1


@pytest.mark.parametrize("score_first", [True, False])
def test_an_end_of_text_token_is_the_first_input_of_the_next_document(module, score_first):  # noqa: F811
    options = {"length": LENGTH, "batch_size": 4, "score_first_targets": score_first}
    data, stream = module(mask_documents=True, **options), module(length=LENGTH, batch_size=4)
    end, seen = data.manifest.end_of_text, 0
    for kind in ("train_dataloader", "val_dataloader"):
        loader, plain = getattr(data, kind)(), getattr(stream, kind)()
        for batch, as_today in zip(loader, plain, strict=True):
            assert torch.equal(batch["tokens"], as_today["tokens"])
            assert "documents" not in as_today
            is_end = batch["tokens"] == end
            text = batch.get("index", torch.zeros(4)) >= 0  # rows that only pad a batch have no text
            assert torch.equal(boundaries(batch)[text], is_end[text, 1:])
            expected = as_today.get("scored", torch.ones(4, LENGTH, dtype=torch.bool))
            expected = expected if score_first else expected & ~is_end[:, :-1]
            assert torch.equal(batch.get("scored", torch.ones(4, LENGTH, dtype=torch.bool)), expected)
            seen += int(is_end.sum())
        if kind == "val_dataloader":  # as the measures read it
            blocks = data.text("validation").blocks(LENGTH)
            expected = blocks.document_options(3)["documents"][0].diff()
            (row,) = (b["documents"][i] for b in data.val_dataloader() for i in range(4) if b["index"][i] == 3)
            assert torch.equal(row.diff(), expected)
    assert seen > 20
    if score_first:
        assert set(next(iter(data.train_dataloader()))) == {"tokens", "documents"}


def test_documents_of_folders_of_format_4_are_those_of_their_lengths(prepared, tmp_path):
    manifest = json.loads((prepared / "manifest.json").read_text()) | {"format": 4}
    for split in manifest["splits"].values():
        del split["lengths"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for path in prepared.glob("*.tar"):
        (tmp_path / path.name).symlink_to(path)
    for split in manifest["splits"]:
        expected = Folder(prepared).documents(split)
        assert len(expected) > 5
        np.testing.assert_array_equal(Folder(tmp_path).documents(split), expected)


# tokens before the first document are in none
@pytest.mark.parametrize("begins", [np.array([3, 4, 5, 20, 21, 40]), np.array([5]), np.array([], np.int64)])
def test_documents_of_segments_are_those_of_a_loop_over_tokens(begins):
    length = 7
    segments = np.random.default_rng(0).permutation(41)
    expected = [[sum(s < begin <= s + row + 1 for begin in begins) for row in range(length)] for s in segments]
    entries = Documents(begins, score_first=False).entries(segments, length)
    assert entries["documents"].tolist() == expected
    scored = [[s + row + 1 not in begins for row in range(length - 1)] for s in segments]
    assert entries["scored"].tolist() == scored


def test_mean_visible_keys_are_those_of_a_loop_over_samples():
    lengths, length = np.array([3, 1, 12, 7, 5, 20, 8]), 8
    starts = np.repeat(lengths.cumsum() - lengths, lengths)  # first input of the document of each input
    counts = [
        p - max(sample, starts[p]) + 1
        for offset in range(length)  # the stream is repeated, so that every offset has whole samples
        for sample in range(offset - length, lengths.sum(), length)
        for p in range(max(sample, 0), min(sample + length, lengths.sum()))
    ]
    assert len(counts) == length * lengths.sum()
    assert mean_visible_keys(lengths, length, packed=False) == pytest.approx(np.mean(counts))
    pieces = [min(length, n - first) for n in lengths for first in range(0, n, length)]
    packed = [row + 1 for size in pieces for row in range(size)]
    assert mean_visible_keys(lengths, length, packed=True) == pytest.approx(np.mean(packed))
    assert mean_visible_keys(np.array([10**6]), length, packed=True) == pytest.approx((length + 1) / 2, rel=1e-5)


def test_lengths_that_do_not_fit_the_manifest_are_refused(prepared, tmp_path):
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["splits"]["train"]["documents"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "lengths-train.u32").symlink_to(prepared / "lengths-train.u32")
    with pytest.raises(UserError, match=r"lengths-train.u32: does not fit the manifest"):
        Folder(tmp_path).documents("train")


def test_positions_continue_only_within_masks():
    with pytest.raises(UserError, match=r"data.restart_positions: got false, expected true, because data.mask_doc"):
        TokenShards(None, directory=str(Path("any")), restart_positions=False)
    with pytest.raises(UserError, match=r"data.repeat_parts: got false, expected true, because there is no data.mix"):
        TokenShards(None, directory=str(Path("any")), repeat_parts=False)


@pytest.mark.parametrize(("restart", "score_first"), [(True, True), (False, False)])
def test_a_step_has_the_mean_loss_of_each_document_as_a_separate_input(prepared, tmp_path, restart, score_first):
    """With a bias by distance, the loss does not depend on `restart_positions`, which the network gets."""
    options = {"mask_documents": True, "restart_positions": restart, "score_first_targets": score_first}
    data = shards(prepared, length=LENGTH, batch_size=4, **options)
    model = small_model("KerpleLog", vocabulary=300)
    data.setup()
    (batch, *_) = data.train_dataloader()
    losses = []
    with torch.no_grad():
        for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
            for number in documents[:-1].unique():
                inputs = (documents[:-1] == number).nonzero().flatten()
                part = model.network.losses(tokens[inputs[0] : inputs[-1] + 2][None])[0]
                # the end-of-text token before a document predicts its first target
                losses.append(part if score_first or tokens[inputs[0]] != data.manifest.end_of_text else part[1:])
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    run.fit(model, data)
    assert run.logged_metrics["train/loss"].item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert model.network.restart_positions == restart
