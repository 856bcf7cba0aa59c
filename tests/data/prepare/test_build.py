import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kerple.data.manifest import Manifest, read_manifest
from kerple.data.prepare import build as builder
from kerple.data.prepare.build import Recipe
from kerple.data.prepare.encode import digest_of

Build = Callable[..., Manifest]
Contents = Callable[[Path], dict[str, bytes]]

KILLED = """
import os, signal, sys, threading
from pathlib import Path
from kerple.data.prepare import build as builder
builder.BATCH_RECORDS = 5
threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
builder.build(Path(sys.argv[1]), builder.Recipe(sys.argv[2], vocabulary=300, shares=(0.8, 0.1, 0.1)), workers=1,
              progress=False, run_tokens=1000, runs_per_shard=3, commit_seconds=0.0)
os._exit(0)
"""


def kill_and_go_on(corpus: Path, directory: Path, delays: list[float], small_build: Build) -> int:
    """Prepare with a kill -9 after each delay in turn, then undisturbed; how many kills found it at work."""
    kills = 0
    for delay in delays:
        command = [sys.executable, "-c", KILLED, str(directory), str(corpus), str(delay)]
        kills += subprocess.run(command, env={"PYTHONPATH": "src"}, timeout=60, check=False).returncode == -9
    small_build(directory, corpus)
    return kills


def test_kills_leave_no_trace(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents
) -> None:
    assert kill_and_go_on(json_lines, tmp_path, [0.03, 0.1, 0.06], small_build) >= 1

    assert contents(tmp_path) == contents(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(20))
def test_a_kill_at_any_moment_leaves_no_trace(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents, moment: int
) -> None:
    kill_and_go_on(json_lines, tmp_path, [random.Random(moment).uniform(0, 0.6)], small_build)

    assert contents(tmp_path) == contents(prepared)


@pytest.mark.parametrize("commit", range(0, 60, 12))
def test_going_on_after_any_commit(
    json_lines: Path,
    prepared: Path,
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
    commit: int,
) -> None:
    monkeypatch.setattr(builder, "BATCH_RECORDS", 5)
    done, original = 0, builder.ShardWriter.sync

    def stop_after(self: builder.ShardWriter) -> None:
        nonlocal done
        original(self)
        done += 1
        if done > 3 * commit:  # between what is written and what the journal knows
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(builder.ShardWriter, "sync", stop_after)
        with pytest.raises(KeyboardInterrupt):
            small_build(tmp_path, json_lines)
    small_build(tmp_path, json_lines)

    assert contents(tmp_path) == contents(prepared)


@pytest.mark.parametrize("where", ["close", "checksums"])
def test_a_stop_while_the_last_files_are_closed(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents, where: str
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    original = builder.ShardWriter.close
    with pytest.MonkeyPatch.context() as context:
        if where == "close":
            context.setattr(builder.ShardWriter, "close", lambda self: (original(self), stop()))
        else:
            context.setattr(builder, "checksums", stop)
        with pytest.raises(KeyboardInterrupt):
            small_build(tmp_path, json_lines)
    small_build(tmp_path, json_lines)

    assert contents(tmp_path) == contents(prepared)


def test_a_prepared_directory_is_left_alone_and_other_settings_are_refused(
    json_lines: Path, prepared: Path, small_build: Build
) -> None:
    before = (prepared / "train-00000.tar").stat().st_mtime_ns
    small_build(prepared, json_lines)
    assert (prepared / "train-00000.tar").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"other settings: vocabulary was 300, is 400"):
        small_build(prepared, json_lines, vocabulary=400)


def test_an_interrupted_directory_does_not_take_another_corpus(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder.ShardWriter, "close", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        small_build(tmp_path, json_lines)
    with pytest.raises(ValueError, match="interrupted preparation with other settings"):
        small_build(tmp_path, json_lines, drop_duplicates=True)


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.mark.parametrize("drop", [False, True])
def test_duplicates_are_counted_and_dropped_by_option(
    documents: list[str], tmp_path: Path, small_build: Build, drop: bool
) -> None:
    corpus = write_lines(tmp_path / "twice.jsonl", documents + documents[:40] + documents[:10])

    manifest = small_build(tmp_path / "out", corpus, drop_duplicates=drop)

    assert manifest.counts == {"duplicates": 50}
    assert sum(s.documents for s in manifest.splits.values()) == len(documents) + (0 if drop else 50)


def test_documents_go_to_splits_by_their_text_and_in_the_shares_asked_for() -> None:
    recipe = Recipe("", shares=(0.949, 0.05, 0.001))
    splits = [recipe.split_of(digest_of(str(i).encode())) for i in range(40_000)]

    assert abs(splits.count("train") / 40_000 - 0.949) < 0.005
    assert abs(splits.count("test") / 40_000 - 0.001) < 0.0008
    assert recipe.split_of(digest_of(b"7")) == splits[7]


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"), 0.5, 0.5)])
def test_shares_that_are_none(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        Recipe("", shares=shares)


BAD_LINES = {
    "broken JSON": b'{"text": "abc',
    "JSON too deep": b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "no text": b'{"text": 7}',
    "not Unicode": b'{"text": "\\ud800 alone"}',
    "more than 500000 bytes": b'{"text": "' + b"x" * 500_000 + b'"}',
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_bad_lines_are_counted_or_fatal(documents: list[str], tmp_path: Path, small_build: Build, fault: str) -> None:
    corpus = write_lines(tmp_path / "bad.jsonl", documents)
    corpus.write_bytes(BAD_LINES[fault] + b"\n\n" + corpus.read_bytes() + BAD_LINES[fault])
    good = small_build(tmp_path / "good", write_lines(tmp_path / "good.jsonl", documents))

    with pytest.warns(UserWarning, match=f"2 × {fault}"):
        manifest = small_build(tmp_path / "skip", corpus, largest_document=500_000)

    assert manifest.counts == {fault: 2, "empty": 1}
    assert manifest.splits == good.splits
    with pytest.raises(ValueError, match=rf"bad\.jsonl:1: {fault}"):
        small_build(tmp_path / "raise", corpus, largest_document=500_000, on_fault="raise")


def test_a_tokenizer_with_too_many_entries(
    prepared: Path, json_lines: Path, tmp_path: Path, small_build: Build
) -> None:
    with pytest.raises(ValueError, match=r"vocabulary: 299, but tokenizer .* has 300"):
        small_build(tmp_path, json_lines, tokenizer=str(prepared / "tokenizer.json"), vocabulary=299)
    manifest = small_build(tmp_path / "fits", json_lines, tokenizer=str(prepared), vocabulary=512)
    assert manifest.vocabulary == 300
    assert manifest.splits == read_manifest(prepared).splits
