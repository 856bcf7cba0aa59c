"""Reading of the scaling of RoPE from GGUF files, from which transformers reads only the base of RoPE."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError

DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that divide the frequencies of RoPE: one list for all lengths (Llama 3), or two lists (LongRoPE)."""
SCALING = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned")
"""Names of the entries ``<architecture>.rope.scaling.…`` that are accepted; any other is an error."""


def gguf_rope(path: Path, config: Any) -> dict[str, Any] | None:
    """Return the ``rope_parameters`` of transformers for the RoPE in a GGUF file, or None if the model has no RoPE.

    The names of entries and the defaults of missing entries are those of llama.cpp.

    Args:
        path: The file.
        config: The `transformers.PreTrainedConfig` that transformers reads from the file.

    Raises:
        UserError: If ``rope_parameters`` cannot express the scaling.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(path))
    prefix = f"{metadata['general.architecture']}."
    entries = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    scaling = {key.removeprefix("rope.scaling."): v for key, v in entries.items() if key.startswith("rope.scaling.")}
    if not (rope := deepcopy(getattr(config, "rope_parameters", None))):
        return None
    # llama.cpp scales only the global layers of Gemma 3
    target = rope["full_attention"] if config.model_type == "gemma3_text" else rope
    factor = scaling.get("factor") or entries.get("rope.scale_linear") or 1.0
    divisors = [name for name in DIVISORS if name in tensors]
    kind = "divisors" if divisors else scaling.get("type", "linear")
    length = scaling.get("original_context_length", entries.get("context_length"))
    changes = {"rope_theta": entries["rope.freq_base"]} if "rope.freq_base" in entries else {}
    original = {"original_max_position_embeddings": length, "attention_factor": scaling.get("attn_factor", 1.0)}
    if kind == "divisors":
        from gguf import GGUFReader

        lists = {tensor.name: tensor.data.tolist() for tensor in GGUFReader(path).tensors if tensor.name in divisors}
        factors = {"short_factor": lists[divisors[0]], "long_factor": lists[divisors[-1]]}
        changes |= {"rope_type": "longrope", "factor": 1.0, **factors, **original}
    elif kind == "yarn":
        original["attention_factor"] *= 0.1 * math.log(factor) + 1
        betas = {name: scaling[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in scaling}
        changes |= {"rope_type": "yarn", "factor": factor, **original, **betas}
    elif kind == "linear" and factor != 1:
        changes |= {"rope_type": "linear", "factor": factor}
    unknown = kind not in ("none", "linear", "yarn", "divisors") or not scaling.keys() <= set(SCALING)
    if unknown or ("rope_type" in changes and "rope_theta" not in target) or (kind == "divisors" and factor != 1):
        listed = ", ".join([*(f"{key} {value}" for key, value in scaling.items()), *divisors])
        given = f"got {path.name}, whose RoPE has a scaling of type {kind} ({listed})"
        raise UserError(f"model: {given}; it cannot be read from GGUF; use the safetensors of the model")
    if "rope_theta" in target:
        target.update(changes)
    return rope
