"""What a configuration of transformers says about the positions of each layer, by the formulas of the papers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.model import Transformer
from kerple.positions import NoPE, RoPE, Shape
from kerple.positions.rotary_scaling import RotaryFrequencies, Scaling
from kerple.positions.temperature import Temperature
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Wrapper

SCALINGS: dict[str, Scaling | None] = {
    "default": None,
    "linear": "pi",
    "dynamic": "dynamic_ntk",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "proportional": "proportional",
}
LOCAL = ("sliding_attention", "chunked_attention")
NO_POSITIONS_IN_FULL_LAYERS = {"cohere2", "cohere2_moe", "afmoe", "flint"}
UNLESS_NO_WINDOW = {"exaone4", "exaone_moe"}  # the same, if any layer has a window
KNOWN = {
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("olmo", "olmo2", "olmo3", "smollm3", "cohere", "phi", "phi3", "gpt_neox", "gpt2", "opt", "bloom", "granite"),
    *("stablelm", "starcoder2", "ministral", "ministral3", "llama4_text", "gpt_oss", "glm", "glm4", "nemotron"),
    *NO_POSITIONS_IN_FULL_LAYERS,
    *UNLESS_NO_WINDOW,
}
"""Families whose configurations `layers` was compared with the code of; of others, differences are not judged."""


@dataclass(frozen=True)
class Layer:
    """What the configuration says about one layer.

    Args:
        kind: Kind of the layer in the configuration, such as ``sliding_attention``.
        frequencies: Frequencies of RoPE, or None if the layer does not rotate.
        attention_factor: Factor of the rotated queries and keys.
        window: Number of keys that a query sees, or None for all before it.
        chunk: Length of the chunks that attention does not cross, or None.
        temperature: Rule of the factor of queries that grows with the position, or None.
        judged: Whether the configuration of this family is understood, so that a difference is a fault.
    """

    kind: str
    frequencies: RotaryFrequencies | None = None
    attention_factor: float = 1.0
    window: int | None = None
    chunk: int | None = None
    temperature: Temperature | None = None
    judged: bool = True

    def query_factor(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Factor of the queries of tokens in rows (T,) at positions (T,), (T,) fp64."""
        if self.temperature is None:
            return torch.ones(len(ids), dtype=torch.float64)
        counted = rows if self.temperature.rule == "llama4" else ids  # Llama 4's code counts tokens
        return self.temperature.factor(TokenPositions(counted, counted), torch.float64)[:, 0]

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys (Tk,) each query (Tq,) sees, from their numbers in the input; (Tq, Tk) bool."""
        queries = queries[:, None]
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        return seen if self.chunk is None else seen & (keys >= queries // self.chunk * self.chunk)

    def __str__(self) -> str:
        parts = []
        if (f := self.frequencies) is None:
            parts.append("no rotation")
        else:
            scaling = "" if f.scaling is None else f", {f.scaling} with factor {f.factor:g}"
            parts.append(f"RoPE with θ {f.base:g} in {f.dim} channels{scaling}")
        parts += [f"attention factor {self.attention_factor:.4g}"] if self.attention_factor != 1 else []
        parts += [f"window {self.window}"] if self.window else [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"temperature {self.temperature.rule}"] if self.temperature else []
        return ", ".join(parts)


def layers(config: Any) -> list[Layer]:
    """What the configuration of a text model, a `transformers.PreTrainedConfig`, says about each of its layers."""
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [_layer(config, i, kind) for i, kind in enumerate(kinds)]


def our_layers(network: Transformer) -> list[Layer]:
    """What the strategies of a network of this project say about each of its layers; RoPE and NoPE are judged."""
    found = []
    for i in range(len(network.blocks)):
        outer = network.positions[min(i, len(network.positions) - 1)]
        position = outer.position if isinstance(outer, Wrapper) else outer
        name, judged = type(position).__name__, isinstance(position, RoPE | NoPE)
        layer = Layer(name, window=outer.window, judged=judged)
        if isinstance(position, RoPE):
            layer = replace(layer, frequencies=position.frequencies, attention_factor=position.attention_factor)
        found.append(layer)
    return found


def original_length(config: Any) -> int | None:
    """Context length before any scaling, in tokens, or None if the configuration does not say."""
    ropes = _ropes(config)
    named = [rope.get("original_max_position_embeddings") for rope in ropes]
    return next(filter(None, [*named, *(getattr(config, name, None) for name in LENGTHS)]), None)


LENGTHS = ("original_max_position_embeddings", "max_position_embeddings", "n_positions")


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_theta" in rope else [r for r in rope.values() if isinstance(r, Mapping)]


def _layer(config: Any, i: int, kind: str | None) -> Layer:
    window = getattr(config, "sliding_window", None)
    if kind is None:
        window = window if getattr(config, "use_sliding_window", True) else None
        kind = "full_attention" if window is None else "sliding_attention"
    elif kind != "sliding_attention":
        window = None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope if "rope_theta" in rope else rope.get(kind) or {}
    if _is_without_positions(config, i, kind):
        rope = {}
    temperature = _temperature(config, bool(rope))
    judged = config.model_type in KNOWN and rope.get("rope_type", "default") in SCALINGS
    if "rope_theta" not in rope or rope.get("rope_type", "default") not in SCALINGS:
        return Layer(kind, window=window, chunk=chunk, temperature=temperature, judged=judged)
    frequencies = read_frequencies(rope, config)
    factor = rope.get("attention_factor") or _attention_factor(rope, frequencies)
    return Layer(kind, frequencies, factor, window, chunk, temperature, judged)


def _is_without_positions(config: Any, i: int, kind: str) -> bool:
    pattern = getattr(config, "no_rope_layers", None)
    if pattern:
        return not pattern[i]  # despite its name, 1 stands for a layer with positions
    windows = getattr(config, "sliding_window", None) is not None
    family = config.model_type
    return kind not in LOCAL and (family in NO_POSITIONS_IN_FULL_LAYERS or (family in UNLESS_NO_WINDOW and windows))


def read_frequencies(rope: Mapping[str, Any], config: Any) -> RotaryFrequencies:
    """The frequencies of a `rope_parameters` of transformers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scaling = SCALINGS[rope.get("rope_type", "default")]
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    longest = getattr(config, "max_position_embeddings", None) or 0
    length = rope.get("original_max_position_embeddings") or getattr(config, LENGTHS[0], None) or longest
    length = longest if scaling == "dynamic_ntk" else length
    factor = rope.get("factor") or (longest / length if scaling in ("yarn", "longrope") else 1.0)
    slow = rope.get("low_freq_factor" if scaling == "llama3" else "beta_slow") or 1.0
    fast = rope.get("high_freq_factor" if scaling == "llama3" else "beta_fast") or (
        4.0 if scaling == "llama3" else 32.0
    )
    return RotaryFrequencies(
        head_dim if scaling == "proportional" else rotated,
        float(rope["rope_theta"]),
        length,
        scaling,
        float(factor),
        float(fast),
        float(slow),
        rotated,
        rope.get("short_factor"),
        rope.get("long_factor"),
        rope.get("truncate", True),
    )


def _attention_factor(rope: Mapping[str, Any], frequencies: RotaryFrequencies) -> float:
    if frequencies.scaling == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        whole = frequencies.attention_factor - 1
        return (rope["mscale"] * whole + 1) / (rope["mscale_all_dim"] * whole + 1)
    return frequencies.attention_factor


def _temperature(config: Any, rotates: bool) -> Temperature | None:
    shape = Shape(1, 1, 2)  # a temperature with a length of its own needs no sizes
    if getattr(config, "attn_temperature_tuning", False) and not rotates:
        return Temperature(shape, "llama4", config.attn_scale, int(config.floor_scale))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        length = rope["original_max_position_embeddings"]
        return Temperature(shape, "ministral3", rope["llama_4_scaling_beta"], length)
    return None
