"""Speed of preparing and loading shards: `python -m benchmarks.data`, about three minutes on two cores for 500 MB.

Three figures of one run on one machine: `prepare` against `tokenizers` alone on the same text with the same number of
cores, the largest memory `prepare` and its processes take together, and loading against what a training step eats.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import tokenizers
import zstandard

from kerple.base.cluster import cores

RECORDS = Path(__file__).parent / "records"
WORD = re.compile(r"[A-Za-z_]{4,}")
# 6 x 162e6 = 1e9 FLOP a token of the paper's model; 4e14 FLOP/s is what the fastest single accelerators sustain on it
FASTEST_STEP = 400_000  # tokens per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="text in the corpus")
    parser.add_argument("--workers", type=int, default=cores(), help="cores to use")
    given = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(given.workers)  # before the library starts its threads
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder), given.megabytes, given.workers)
    print(json.dumps(record, indent=1))
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / "data.json").write_text(json.dumps(record, indent=1) + "\n")


def measure(folder: Path, megabytes: int, workers: int) -> dict[str, object]:
    """Make the corpus, tokenise a fifth of it with the library alone before and after preparing all of it, load it."""
    from kerple.data.prepare.build import build
    from kerple.data.prepare.settings import Recipe
    from kerple.data.tokenizer import train_tokenizer

    corpus = folder / "corpus.jsonl.zst"
    size = write_corpus(corpus, megabytes * 10**6)
    (folder / "tokenizer.json").write_text(train_tokenizer(texts(20 * 10**6), 2048).to_str())
    alone = [tokenizers_alone(folder / "tokenizer.json", corpus, size // 10)]
    recipe = Recipe(str(corpus), str(folder / "tokenizer.json"))
    begin, busy = time.perf_counter(), core_seconds()
    with PeakMemory() as memory:
        manifest = build(folder / "shards", recipe, workers, progress=False)
    seconds, busy = time.perf_counter() - begin, core_seconds() - busy
    alone.append(tokenizers_alone(folder / "tokenizer.json", corpus, size // 10))
    tokens = sum(split.tokens for split in manifest.splits.values())
    by_library = sum(t for t, _, _ in alone) / sum(s for _, s, _ in alone)
    by_library_busy = sum(t for t, _, _ in alone) / sum(b for _, _, b in alone)
    loading = {f"{n} x {t}": load(folder / "shards", t, n) for t, n in ((64, 128), (512, 32), (2048, 8))}
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "corpus_bytes_of_text": size,
        "tokens": tokens,
        "workers": workers,
        "prepare_seconds": round(seconds, 1),
        "prepare_tokens_per_second_per_core": round(tokens / seconds / workers),
        "tokenizers_alone_tokens_per_second_per_core": round(by_library / workers),
        "prepare_over_tokenizers_alone": round(tokens / seconds / by_library, 3),
        # seconds a core really worked: comparable on a machine that others use too
        "prepare_tokens_per_busy_core_second": round(tokens / busy),
        "tokenizers_alone_tokens_per_busy_core_second": round(by_library_busy),
        "prepare_over_tokenizers_alone_busy": round(tokens / busy / by_library_busy, 3),
        "load_average_at_end": os.getloadavg()[0],
        "prepare_peak_bytes_all_processes": memory.peak,
        "loading_tokens_per_second": loading,
        "loading_over_fastest_step": {k: round(v / FASTEST_STEP, 1) for k, v in loading.items()},
    }


def texts(size: int) -> Iterator[str]:
    """Documents of the built-in corpus, over and over, a tenth of their longer words changed each time."""
    from kerple.data.prepare.packages import standard_library

    draw, total = random.Random(0), 0
    while True:
        for record in standard_library().records((0, 0), 1 << 26):
            try:
                text = record.raw.decode()
            except UnicodeDecodeError:
                continue
            text = WORD.sub(lambda m: m[0][::-1] if draw.random() < 0.1 else m[0], text)
            total += len(text.encode())
            yield text
            if total >= size:
                return


def write_corpus(path: Path, size: int) -> int:
    """Write texts as the Pile's files have them; their UTF-8 bytes."""
    total = 0
    with path.open("wb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as packed:
        for text in texts(size):
            total += len(text.encode())
            packed.write(json.dumps({"text": text}).encode() + b"\n")
    return total


def tokenizers_alone(tokenizer: Path, corpus: Path, size: int) -> tuple[int, float, float]:
    """Tokens, seconds and busy core seconds of the library on the first `size` bytes of text, in large batches."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    batches: list[list[str]] = [[]]
    taken = in_batch = 0
    with corpus.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        rest = b""
        while taken < size:
            *lines, rest = (rest + stream.read(1 << 20)).split(b"\n")
            for line in lines:
                text = json.loads(line)["text"]
                batches[-1].append(text)
                taken, in_batch = taken + len(text), in_batch + len(text)
                if in_batch > 8 << 20:  # enough for all cores to be busy
                    batches.append([])
                    in_batch = 0
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    begin, busy, tokens = time.perf_counter(), core_seconds(), 0
    for batch in batches:
        tokens += sum(len(e.ids) for e in library.encode_batch_fast(batch, add_special_tokens=False))
    return tokens, time.perf_counter() - begin, core_seconds() - busy


def core_seconds() -> float:
    """Processor time of this process, its threads and its finished children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def load(directory: Path, length: int, batch_size: int) -> int:
    """Tokens per second out of the training loader, in this process, checksums passed once before."""
    from kerple.data import TokenShards

    data = TokenShards(None, directory=str(directory), length=length, batch_size=batch_size)
    loader: Any = data.train_dataloader()  # whose dataset has more than the type says
    for run in range(len(loader.batches.streams[0].split.checksums)):
        loader.batches.streams[0].run(run)
    begin, tokens = time.perf_counter(), 0
    for batch in loader:
        tokens += batch["tokens"].numel() - batch_size
        if time.perf_counter() - begin > 4:
            break
    return round(tokens / (time.perf_counter() - begin))


class PeakMemory:
    """Largest sum of the resident memory of this process and its children, looked at every 50 ms."""

    peak = 0

    def __enter__(self) -> "PeakMemory":
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self.stop.wait(0.05):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


if __name__ == "__main__":
    main()
