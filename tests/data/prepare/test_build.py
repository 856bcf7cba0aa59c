import gzip
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.data import shards
from kerple.data.manifest import Manifest, read_manifest
from kerple.data.prepare import build as builder
from kerple.data.prepare import settings as recipes
from kerple.data.prepare import sources as sourcing
from kerple.data.prepare.encode import digest_of
from kerple.data.prepare.settings import Recipe

ROOT = Path(__file__).parents[3]
FORK = multiprocessing.get_context("fork")
Build = Callable[..., Manifest]
Contents = Callable[[Path], dict[str, bytes]]

KILLED = """
import os, signal, sys, threading
from pathlib import Path
from kerple.data.prepare import build as builder
from kerple.data.prepare.settings import Recipe
builder.PORTION_RECORDS = 5
threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
builder.build(Path(sys.argv[1]), Recipe(sys.argv[2], vocabulary=300, shares=(0.8, 0.1, 0.1)), workers=1,
              progress=False, run_tokens=1000, runs_per_shard=3, commit_seconds=0.0)
os._exit(0)
"""


def kill_and_go_on(corpus: Path, directory: Path, delays: list[float], small_build: Build) -> int:
    """Prepare with a kill -9 after each delay in turn, then undisturbed; how many kills found it at work."""
    kills = 0
    for delay in delays:
        command = [sys.executable, "-c", KILLED, str(directory), str(corpus), str(delay)]
        done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, timeout=60, check=False)
        assert done.returncode in (0, -9)
        kills += done.returncode == -9
    small_build(directory, corpus)
    return kills


def test_kills_leave_no_trace(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents
) -> None:
    assert kill_and_go_on(json_lines, tmp_path, [0.03, 0.1, 0.06], small_build) >= 1

    assert contents(tmp_path) == contents(prepared)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_trace(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents
) -> None:
    kills = 0
    for moment in range(20):
        folder = tmp_path / str(moment)
        kills += kill_and_go_on(json_lines, folder, [random.Random(moment).uniform(0, 0.6)], small_build)
        assert contents(folder) == contents(prepared), moment
    assert kills >= 10


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
    monkeypatch.setattr(builder, "PORTION_RECORDS", 5)
    done, original = 0, shards.ShardWriter.sync

    def stop_after(self: shards.ShardWriter) -> None:
        nonlocal done
        original(self)
        done += 1
        if done > 3 * commit:  # between what is written and what the journal knows
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(shards.ShardWriter, "sync", stop_after)
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

    original = shards.ShardWriter.close
    with pytest.MonkeyPatch.context() as context:
        if where == "close":
            context.setattr(shards.ShardWriter, "close", lambda self: (original(self), stop()))
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
    with pytest.raises(ValueError, match=r"prepared otherwise: vocabulary was 300, is 400"):
        small_build(prepared, json_lines, vocabulary=400)


def test_an_interrupted_directory_does_not_take_another_corpus(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards.ShardWriter, "close", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        small_build(tmp_path, json_lines)
    with pytest.raises(ValueError, match="interrupted preparation, and since then drop_duplicates was False, is True"):
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
def test_bad_lines_are_counted_or_fatal(
    documents: list[str], tmp_path: Path, small_build: Build, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(tmp_path / "bad.jsonl", documents)
    corpus.write_bytes(BAD_LINES[fault] + b"\n\n" + corpus.read_bytes() + BAD_LINES[fault])
    good = small_build(tmp_path / "good", write_lines(tmp_path / "good.jsonl", documents))

    with pytest.raises(UserError, match=rf"data\.largest_loss: got .* cannot be used: 2 × .*bad\.jsonl:1: {fault}"):
        small_build(tmp_path / "skip", corpus, largest_document=500_000, largest_loss=0.0)
    manifest = small_build(tmp_path / "skip", corpus, largest_document=500_000, largest_loss=1.0, progress=True)

    told = capsys.readouterr().err
    assert f"{tmp_path / 'skip'}: 0.0M tokens of 300 documents are prepared; left out: 2 × " in told
    assert f"bad.jsonl:1: {fault}" in told
    assert manifest.counts == {fault: 2, "empty": 1}
    assert manifest.splits == good.splits
    with pytest.raises(ValueError, match=rf"bad\.jsonl:1: {fault}"):
        small_build(tmp_path / "raise", corpus, largest_document=500_000, on_fault="raise")


def test_a_tokenizer_with_too_many_entries(
    prepared: Path, json_lines: Path, tmp_path: Path, small_build: Build
) -> None:
    with pytest.raises(ValueError, match=r"vocabulary: got 299, but tokenizer .* has 300"):
        small_build(tmp_path, json_lines, tokenizer=str(prepared / "tokenizer.json"), vocabulary=299)
    manifest = small_build(tmp_path / "fits", json_lines, tokenizer=str(prepared), vocabulary=512)
    assert manifest.vocabulary == 300
    assert manifest.splits == read_manifest(prepared).splits


def good_and_bad(documents: list[str]) -> dict[str, tuple[bytes, bytes]]:
    """Contents of a corpus by the name of its file: as it should be, and what has been found there instead."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    packed = gzip.compress(lines.encode())
    noise = random.Random(0).randbytes(50_000)
    return {
        "truncated.jsonl.gz": (packed, packed[: len(packed) * 9 // 10]),
        "false.jsonl.gz": (packed, lines.encode()),
        "keyless.jsonl": (lines.encode(), lines.replace('"text"', '"body"').encode()),
        "latin.jsonl": (lines.encode(), lines.replace("猫", "").encode("latin-1")),
        "binary.jsonl": (lines.encode(), noise),
        "binary.txt": (lines.encode(), noise),
        "latin.txt": (lines.encode(), lines.replace("猫", "").encode("latin-1")),
        "empty.jsonl": (lines.encode(), b""),
        "spaces.jsonl": (lines.encode(), b"\n \n" * 100),
    }


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        *((name, "given") for name in good_and_bad([])),
        *((name, "bpe") for name in ("truncated.jsonl.gz", "keyless.jsonl", "empty.jsonl")),
    ],
)
def test_a_corpus_that_is_lost_is_an_error_and_the_mended_one_at_the_same_path_is_used(
    documents: list[str], prepared: Path, tmp_path: Path, small_build: Build, name: str, tokenizer: str
) -> None:
    tokenizer = str(prepared) if tokenizer == "given" else tokenizer
    good, bad = good_and_bad(documents)[name]
    corpus, directory = tmp_path / name, tmp_path / "out"
    corpus.write_bytes(bad)
    shares = (1.0, 0.0, 0.0)  # of one document

    with pytest.raises(UserError, match=rf"^data\.[a-z_]*: .*{name}") as complaint:
        small_build(directory, corpus, tokenizer=tokenizer, shares=shares)

    assert "\n" not in str(complaint.value)
    assert not (directory / "manifest.json").exists()
    corpus.write_bytes(good)
    if "largest_loss" in str(complaint.value):  # something was kept, of what is no more
        with pytest.raises(UserError, match=rf"since then .*{name} was .* delete the folder"):
            small_build(directory, corpus, tokenizer=tokenizer, shares=shares)
        shutil.rmtree(directory)
    manifest = small_build(directory, corpus, tokenizer=tokenizer, shares=shares)
    other = small_build(tmp_path / "fresh", corpus, tokenizer=tokenizer, shares=shares)
    assert (manifest.splits, manifest.tokenizer) == (other.splits, other.tokenizer)
    assert manifest.splits["train"].documents == (len(documents) if "jsonl" in name else 1)


def test_the_tokenizer_learns_nothing_of_what_is_held_out(tmp_path: Path, small_build: Build) -> None:
    recipe = Recipe("", shares=(0.5, 0.25, 0.25))
    every = [f"{n}: " + f"{word} " * 30 for n in range(100) for word in ("seen", "kept")]
    texts = [t for t in every if (recipe.split_of(digest_of(t.encode())) == "train") == ("seen" in t)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = small_build(tmp_path / "out", tmp_path / "c.jsonl", shares=recipe.shares)
    learned = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert made.splits["test"].documents > 0
    assert any("seen" in piece for piece in learned)
    assert not any("ep" in piece or "pt" in piece for piece in learned)


def test_the_key_of_the_text_is_an_option(documents: list[str], tmp_path: Path, small_build: Build) -> None:
    for key in ("text", "body"):
        lines = [json.dumps({key: text, "other": "text"}) for text in documents]
        (tmp_path / f"{key}.jsonl").write_text("\n".join(lines) + "\n")
    found = small_build(tmp_path / "b", tmp_path / "body.jsonl", text_field="body")
    assert found.splits == small_build(tmp_path / "a", tmp_path / "text.jsonl").splits


def test_a_loss_that_is_allowed_goes_on_where_it_was_refused_and_a_mended_corpus_is_noticed(
    documents: list[str], tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sourcing, "CHUNK", 1000)
    good, bad = good_and_bad(documents)["truncated.jsonl.gz"]
    corpus = tmp_path / "c.jsonl.gz"
    corpus.write_bytes(bad)
    with pytest.raises(
        UserError,
        match=r"largest_loss: got 0\.01, but 0\.5 of the bytes .*: 1 × .*damaged file.* delete .*out",
    ):
        small_build(tmp_path / "out", corpus)
    manifest = small_build(tmp_path / "out", corpus, largest_loss=0.6)
    assert 0 < sum(split.documents for split in manifest.splits.values()) < len(documents)
    small_build(tmp_path / "out", corpus)

    corpus.write_bytes(good)

    with pytest.raises(UserError, match=rf"c\.jsonl\.gz was 1 files of {len(bad)} bytes, is 1 files of {len(good)}"):
        small_build(tmp_path / "out", corpus)


def test_what_has_changed_in_a_corpus_is_named(documents: list[str], tmp_path: Path, small_build: Build) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    one, two = (write_lines(folder / f"{name}.jsonl", documents) for name in ("one", "two"))
    small_build(tmp_path / "out", folder)

    os.utime(one, (0, 0))  # a copy is the same corpus
    small_build(tmp_path / "out", folder)
    one.write_text(one.read_text().replace("wolves", "wolvez"))
    with pytest.raises(UserError, match=r"the content of .*one\.jsonl was changed\. Give data.directory"):
        small_build(tmp_path / "out", folder)
    two.rename(folder / "three.jsonl")
    with pytest.raises(UserError, match=r"three\.jsonl is new; .*two\.jsonl is gone"):
        small_build(tmp_path / "out", folder)
    shutil.rmtree(folder)  # shards are used where the corpus is not, too
    small_build(tmp_path / "out", folder)


def test_a_large_corpus_is_known_by_its_times(
    documents: list[str], tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "HASHED_BYTES", 100)
    corpus = write_lines(tmp_path / "c.jsonl", documents)
    small_build(tmp_path / "out", corpus)
    small_build(tmp_path / "out", corpus)
    os.utime(corpus, (0, 0))
    with pytest.raises(UserError, match=r"the content of .*c\.jsonl was changed"):
        small_build(tmp_path / "out", corpus)


def test_a_tokenizer_file_that_changes_is_noticed(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    shutil.copy(prepared / "tokenizer.json", tokenizer)
    small_build(tmp_path / "out", json_lines, tokenizer=str(tokenizer))
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|endoftexts|>"))
    with pytest.raises(UserError, match=r"tokenizer\.json was 1 files of"):
        small_build(tmp_path / "out", json_lines, tokenizer=str(tokenizer))


def test_a_tokenizer_left_by_something_else_is_not_taken(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert small_build(tmp_path, json_lines).splits == read_manifest(prepared).splits


def test_shards_that_nobody_may_write_to_can_be_used(json_lines: Path, tmp_path: Path, small_build: Build) -> None:
    directory = tmp_path / "out"
    small_build(directory, json_lines)
    (directory / ".lock").unlink()
    (directory / ".lock").mkdir()  # no lock can be taken here, not even by root
    assert small_build(directory, json_lines).splits["train"].tokens


def test_a_full_disk_is_one_line_and_the_preparation_goes_on(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents
) -> None:
    for limit in (3_000, 9_000, 40_000):  # a kernel refuses files larger than this
        directory = tmp_path / str(limit)
        process = FORK.Process(target=prepare_with_little_room, args=(directory, json_lines, limit, small_build))
        process.start()
        process.join()
        assert process.exitcode == 7, limit
        assert not (directory / "manifest.json").exists()
        small_build(directory, json_lines)
        assert contents(directory) == contents(prepared)


def prepare_with_little_room(directory: Path, corpus: Path, limit: int, small_build: Build) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(UserError, match=r"data\.directory: .* cannot be written to"):
        small_build(directory, corpus)
    os._exit(7)


@pytest.mark.parametrize("name", ["train-00000.tar", "validation-00012.tar", "test.offsets"])
def test_files_that_no_preparation_left_are_not_written_over(
    json_lines: Path, tmp_path: Path, small_build: Build, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"data\.directory: got .*, which holds {name} without a manifest\.json"):
        small_build(tmp_path, json_lines)
    assert (tmp_path / name).read_text() == "mine"


def test_files_whose_names_are_no_shards_stay(json_lines: Path, tmp_path: Path, small_build: Build) -> None:
    names = ("train-small.tar", "train-00000-of-00002.tar", "validation-1.tar")
    for name in names:
        (tmp_path / name).write_text("mine")
    small_build(tmp_path, json_lines)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 3


def test_a_folder_that_cannot_be_is_named(json_lines: Path, tmp_path: Path, small_build: Build) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(UserError, match=r"data\.directory: .*file.* cannot be made or written to"):
            small_build(place, json_lines)


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("stdlib", "stdlib"),
        ("corpora/*.jsonl", "corpora"),
        ("corpora/part-[0-9]*.jsonl", "part--0-9"),
        ("books.d/", "books"),
        ("hf:allenai/c4:en", "en"),
        ("https://zenodo.org/record/7/x.jsonl?download=1", "x"),
        ("/data/[2020] x", "2020- x"),
        ("*", "corpus"),
        ("web+code.jsonl", "web+code"),
    ],
)
def test_folders_are_named_after_the_corpus_and_never_by_a_pattern(corpus: str, name: str) -> None:
    assert recipes.default_directory(corpus, "bpe", 300) == f"data/{name}-bpe300"
