import json
import random
from pathlib import Path
from typing import Any

import pytest

from kerple.data.manifest import Manifest
from kerple.data.prepare import build
from kerple.data.prepare import corpus_reader as reader
from kerple.data.prepare.workers import tokenise_parts
from kerple.data.shard_options import ShardOptions

SENTENCE = "the cat sat on a mat while seven grey wolves sang long songs of résumé naïveté 猫 42 , . ; \n"
WORDS = SENTENCE.split(" ")


@pytest.fixture(scope="session")
def documents():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + f" #{i}" for i in range(300)]


@pytest.fixture(scope="session")
def json_lines(documents, tmp_path_factory):
    """A folder of three files, each with every third document."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(3):
        write_lines(folder / f"part{part}.jsonl", documents[part::3])
    return folder


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(documents)))
    return path


def small_build(
    directory: Path, corpus: Path | str, part: int = 3000, tokenise_all: Any = tokenise_parts, **options: object
) -> Manifest:
    """Prepare a corpus in parts of `part` characters, so that a small corpus has many parts."""
    settings = {"vocabulary": 300, "split_fractions": (0.8, 0.1, 0.1), "prepare_workers": 1} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "part_size", lambda number: part)
        return build.prepare(ShardOptions(str(corpus), directory=str(directory), **settings), tokenise_all)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder, except hidden ones."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


@pytest.fixture(scope="session")
def prepared(json_lines, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    small_build(directory, json_lines)
    return directory
