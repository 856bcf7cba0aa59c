"""Speed of preparing and loading shards: `python -m benchmarks.data`, about three minutes on two cores for 500 MB.

`prepare` against `tokenizers` alone on the same text with the same number of cores, and loading against what a training
step eats.
"""

import argparse
import json
import os
import random
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import zstandard

from benchmarks.measure import RECORDS, record
from kerple.base.resources import cores
from kerple.data import TokenShards
from kerple.data.options import ShardOptions
from kerple.data.prepare.build import prepare
from kerple.data.prepare.corpora import standard_library
from kerple.data.prepare.readers import Document
from kerple.data.tokenizer import train_tokenizer

WORD = re.compile(r"[A-Za-z_]{4,}")
# 6 x 162e6 = 1e9 FLOP a token of the paper's model; 4e14 FLOP/s is what the fastest single accelerators sustain on it
FASTEST_STEP = 400_000  # tokens per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="text in the corpus")
    parser.add_argument("--workers", type=int, default=cores(), help="cores to use")
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)  # before the library starts its threads
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.megabytes * 10**6, options.workers)
    content = json.dumps(measured, indent=1) + "\n"
    print(content)
    (RECORDS / "data.json").write_text(content, encoding="utf-8")


def measure(folder: Path, size: int, workers: int) -> dict[str, object]:
    """Write a corpus, tokenise a fifth of it by the library alone before and after preparing all of it, and load it."""
    corpus, tokenizer = folder / "corpus.jsonl.zst", folder / "tokenizer.json"
    with corpus.open("wb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as packed:
        for text in texts(size):
            packed.write(json.dumps({"text": text}).encode() + b"\n")
    tokenizer.write_text(train_tokenizer(texts(20 * 10**6), 2048).to_str(), encoding="utf-8")
    alone = [tokenizers_alone(tokenizer, size // 10)]
    options = ShardOptions(str(corpus), str(tokenizer), directory=str(folder / "shards"), prepare_workers=workers)
    begin, busy = time.perf_counter(), core_seconds()
    manifest = prepare(options)
    seconds, busy = time.perf_counter() - begin, core_seconds() - busy
    alone.append(tokenizers_alone(tokenizer, size // 10))
    tokens = sum(split.tokens for split in manifest.splits.values())
    by_library, by_library_busy = (sum(a[0] for a in alone) / sum(a[i] for a in alone) for i in (1, 2))
    loading = {f"{n} x {t}": load(folder / "shards", t, n) for t, n in ((64, 128), (512, 32), (2048, 8))}
    return record() | {
        "tokenizers": tokenizers.__version__,
        "corpus_bytes_of_text": size,
        "tokens": tokens,
        "workers": workers,
        "prepare_seconds": round(seconds, 1),
        "prepare_tokens_per_second_per_core": round(tokens / seconds / workers),
        "tokenizers_alone_tokens_per_second_per_core": round(by_library / workers),
        "prepare_over_tokenizers_alone": round(tokens / seconds / by_library, 3),
        # seconds a core really worked: comparable on a machine that others use too
        "prepare_over_tokenizers_alone_busy": round(tokens / busy / by_library_busy, 3),
        "loading_tokens_per_second": loading,
        "loading_over_fastest_step": {k: round(v / FASTEST_STEP, 1) for k, v in loading.items()},
    }


def texts(size: int) -> Iterator[str]:
    """Documents of the built-in corpus, over and over, a tenth of their longer words changed each time."""
    draw, total = random.Random(0), 0
    while True:
        for document in standard_library().documents():
            if isinstance(document, Document):
                text = WORD.sub(lambda m: m[0][::-1] if draw.random() < 0.1 else m[0], document.text)
                total += len(text.encode())
                yield text
                if total >= size:
                    return


def tokenizers_alone(tokenizer: Path, size: int) -> tuple[int, float, float]:
    """Tokens, seconds and busy core seconds of the library on ``size`` bytes of text, in large batches."""
    library, everything = tokenizers.Tokenizer.from_file(str(tokenizer)), list(texts(size))
    begin, busy, tokens = time.perf_counter(), core_seconds(), 0
    for first in range(0, len(everything), 500):  # enough for all cores to be busy
        batch = library.encode_batch_fast(everything[first : first + 500], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in batch)
    return tokens, time.perf_counter() - begin, core_seconds() - busy


def core_seconds() -> float:
    """Processor time of this process, its threads and its finished children."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))


def load(directory: Path, length: int, batch_size: int) -> int:
    """Tokens per second out of the training loader, in this process."""
    data = TokenShards(None, directory=str(directory), length=length, batch_size=batch_size)
    begin, tokens = time.perf_counter(), 0
    for batch in data.train_dataloader():
        tokens += batch["tokens"].numel() - batch_size
        if time.perf_counter() - begin > 4:
            break
    return round(tokens / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
