"""Reading of what transformers does not read from GGUF files: the scaling of RoPE, and options of attention."""

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError

DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that divide the frequencies of RoPE: one list for all lengths (Llama 3), or two lists (LongRoPE)."""
SCALING = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned")
"""Names of the entries ``<architecture>.rope.scaling.…`` that are accepted; any other is an error."""

LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers by which llama.cpp recognises the models with 27B parameters."""


def gguf_rope(path: Path, config: Any) -> dict[str, Any] | None:
    """Return the ``rope_parameters`` of transformers for the RoPE in a GGUF file, or None if the model has no RoPE.

    The names of entries and the defaults of missing entries are those of llama.cpp.

    Args:
        path: The file.
        config: The `transformers.PreTrainedConfig` that transformers reads from the file.

    Raises:
        UserError: If ``rope_parameters`` cannot express the scaling.
    """
    from transformers.integrations.gguf import read_gguf_metadata  # an optional package

    if not (rope := deepcopy(getattr(config, "rope_parameters", None))):
        return None
    metadata, tensors = read_gguf_metadata(str(path))
    entries = _below(f"{metadata['general.architecture']}.", metadata)
    scaling = _below("rope.scaling.", entries)
    divisors = [name for name in DIVISORS if name in tensors]
    kind = "divisors" if divisors else scaling.get("type", "linear")
    factor = scaling.get("factor") or entries.get("rope.scale_linear") or 1.0
    length = scaling.get("original_context_length", entries.get("context_length"))
    changes = _rope_entries(kind, factor, length, scaling, _read_lists(path, divisors)) if factor > 0 else None
    # llama.cpp scales only the global layers of Gemma 3
    target = rope["full_attention"] if config.model_type == "gemma3_text" else rope
    known = changes is not None and scaling.keys() <= set(SCALING) and not (divisors and factor != 1)
    if not known or (changes and "rope_theta" not in target):
        listed = ", ".join([*(f"{key} {value}" for key, value in scaling.items()), *divisors])
        given = f"got {path.name}, whose RoPE has a scaling of type {kind} ({listed})"
        raise UserError(f"model: {given}; it cannot be read from GGUF; use the safetensors of the model")
    if "rope_theta" in target:
        base = {"rope_theta": entries["rope.freq_base"]} if "rope.freq_base" in entries else {}
        target.update(base, **(changes or {}))
    return rope


def gguf_attention(path: Path, config: Any) -> dict[str, Any]:
    """Return the entries of a configuration for the attention in a GGUF file that transformers does not read from it.

    They are the softmax scale of Gemma 2 and 3, which llama.cpp derives from the sizes, and the window of Phi-3.

    Args:
        path: The file.
        config: The `transformers.PreTrainedConfig` that transformers reads from the file.
    """
    from transformers.integrations.gguf import read_gguf_metadata  # an optional package

    if config.model_type == "phi3":
        metadata, _ = read_gguf_metadata(str(path))
        return {"sliding_window": metadata.get("phi3.attention.sliding_window") or None}  # 0 stands for no window
    if (layers := LAYERS_OF_27B.get(config.model_type)) is None:
        return {}
    is_27b = config.num_hidden_layers == layers
    return {"query_pre_attn_scalar": config.hidden_size // config.num_attention_heads if is_27b else config.head_dim}


def _below(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose keys begin with a prefix, without the prefix."""
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}


def _read_lists(path: Path, names: list[str]) -> list[list[float]]:
    """Return the numbers of some tensors of a GGUF file, in the order of their names."""
    if not names:
        return []
    from gguf import GGUFReader  # an optional package

    lists = {tensor.name: tensor.data.tolist() for tensor in GGUFReader(path).tensors if tensor.name in names}
    return [lists[name] for name in names]


def _rope_entries(
    kind: str, factor: float, length: int | None, scaling: Mapping[str, Any], divisors: list[list[float]]
) -> dict[str, Any] | None:
    """Return the entries of ``rope_parameters`` for a scaling, except ``rope_theta``; None for an unknown kind.

    Args:
        kind: ``none``, ``linear``, ``yarn``, or ``divisors`` for lists of divisors.
        factor: Scaling factor.
        length: Training length in tokens, or None if the file does not state it.
        scaling: The entries ``<architecture>.rope.scaling.…``.
        divisors: One or two lists that divide the frequencies.
    """
    original = {"original_max_position_embeddings": length, "attention_factor": scaling.get("attn_factor", 1.0)}
    if kind == "divisors":
        factors = {"short_factor": divisors[0], "long_factor": divisors[-1]}
        return {"rope_type": "longrope", "factor": 1.0, **factors, **original}
    if kind == "yarn":
        original["attention_factor"] *= 0.1 * math.log(factor) + 1
        betas = {name: scaling[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in scaling}
        return {"rope_type": "yarn", "factor": factor, **original, **betas}
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    return {} if kind in ("none", "linear") else None
