"""Parity of transformers and llama.cpp, which read the same GGUF files: ``python -m benchmarks.llama_cpp``.

The table of results/probe/llama-cpp.md and the figure of its first row are written. It requires cyllama, a package that
contains llama.cpp, and the package of SmolLM2-135M-Instruct (requirements-pretrained.txt).
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from cyllama.llama import llama_cpp

from kerple.hf.pretrained_files import find_model
from kerple.hf.pretrained_model_reader import read_fp32_model
from kerple.hf.pretrained_tokenizer import read_tokenizer
from kerple.probe.parity import Parity, Side, parity, read_outputs
from kerple.probe.text_measurements import first_tokens

FOLDER = Path(__file__).parents[1] / "results/probe"
LENGTH = 128  # tokens
F32, F16 = 0, 1  # types of llama.cpp
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8192}


def in_fp32(source: Path, path: Path, **changes: Any) -> Path:
    """Copy a GGUF file with all tensors in fp32, and with changed entries of its architecture."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    for name, value in changes.items():
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(f"{architecture}.{name}", value, kind)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class EngineModel(llama_cpp.LlamaModel):
    """A model of llama.cpp, with the attribute that cyllama 0.2.18 reads to return logits, but does not define."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


def engine_log_probs(path: Path, tokens: torch.Tensor, cache: int) -> torch.Tensor:
    """Return the log-probabilities (T, V) of llama.cpp, with keys and values in the type ``cache``."""
    options = llama_cpp.LlamaContextParams()
    options.n_ctx = options.n_batch = options.n_ubatch = len(tokens)
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    options.type_k = options.type_v = cache
    options.flash_attn_type = 0
    context = llama_cpp.LlamaContext(EngineModel(str(path), llama_cpp.LlamaModelParams()), options)
    batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    for i, token in enumerate(tokens.tolist()):
        batch.add(token, i, [0], True)
    context.decode(batch)
    return torch.tensor([context.get_logits_ith(i) for i in range(len(tokens))]).log_softmax(-1)


def compare(path: Path, tokens: torch.Tensor, cache: int, folder: Path) -> Parity:
    """Return the parity of transformers, which reads the weights of a GGUF file in fp32, and llama.cpp."""
    file = folder / "engine.npz"
    np.savez(file, tokens=tokens.numpy(), log_probs=engine_log_probs(path, tokens, cache).numpy())
    model, config = read_fp32_model(str(path))
    outputs = read_outputs(str(file), "B")
    return parity(Side(model, "A (transformers)", config=config), Side(outputs, "B (llama.cpp)"), tokens)


def main() -> None:
    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    source = find_model("smollm2-135m")
    q4 = Path(source.location, str(source.gguf))
    tokens = first_tokens("modules", LENGTH, [read_tokenizer(source)])[0]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, path, cache in (
            ("fp32, keys and values in fp32", in_fp32(q4, folder / "fp32.gguf"), F32),
            ("fp32, keys and values in fp16 (llama.cpp's default)", folder / "fp32.gguf", F16),
            ("fp32 with YaRN, factor 4; keys and values in fp32", in_fp32(q4, folder / "yarn.gguf", **YARN), F32),
            ("Q4_1, keys and values in fp32", q4, F32),
        ):
            found = compare(path, tokens, cache, folder)
            print(label, found.summary(), sep="\n", file=sys.stderr, flush=True)
            if not rows:
                found.figure().savefig(FOLDER / "llama-cpp.png", dpi=100)
            assert found.kl is not None
            worst = int((found.difference / found.band).argmax())
            numbers = [found.difference[worst], found.band[worst], found.kl.mean(), found.kl.max()]
            verdict = f"differs from position {found.first_position}" if found.differs else "equal within rounding"
            rows.append([label, *(f"{float(x):.2g}" for x in numbers), verdict])
    lines = ["| weights | difference | band | mean KL | largest KL | verdict |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    page = FOLDER / "llama-cpp.md"
    before = page.read_text(encoding="utf-8").split("| weights |")[0] if page.exists() else ""
    after = f"\ncyllama {version('cyllama')}, SmolLM2-135M-Instruct, {LENGTH} tokens of the corpus modules.\n"
    page.write_text(before + "\n".join(lines) + "\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
