import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kerple.data.manifest import Manifest
from kerple.data.prepare.build import build
from kerple.data.prepare.settings import Recipe

SENTENCE = "the cat sat on a mat while seven grey wolves sang long songs of résumé naïveté 猫 42 , . ; \n"
WORDS = SENTENCE.split(" ")


def make_documents(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + f" #{i}" for i in range(count)]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture(scope="session")
def json_lines(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(3):  # three files, so that a place is more than a line number
        lines = [json.dumps({"text": text, "meta": {"n": i}}) for i, text in enumerate(documents)][part::3]
        (folder / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def small_build() -> Callable[..., Manifest]:
    """Prepare with runs of 1,000 tokens, 3 a shard, so that a small corpus has many of both."""

    def run(directory: Path, corpus: Path | str, **options: object) -> Manifest:
        recipe = {"vocabulary": 300, "shares": (0.8, 0.1, 0.1)}
        recipe |= {key: options.pop(key) for key in list(options) if key in Recipe.__dataclass_fields__}
        sizes = {"workers": 1, "progress": False, "run_tokens": 1000, "runs_per_shard": 3, "commit_seconds": 0.0}
        return build(directory, Recipe(str(corpus), **recipe), **{**sizes, **options})  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="session")
def prepared(json_lines: Path, small_build: Callable[..., Manifest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared")
    small_build(directory, json_lines)
    return directory


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    return lambda folder: {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".")}
