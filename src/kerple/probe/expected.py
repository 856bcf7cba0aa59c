"""The positions of each layer that a configuration of transformers describes, by the formulas of the papers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.hf.rope import read_rope
from kerple.hf.windows import layer_kinds
from kerple.model import Transformer
from kerple.positions import NoPE, RoPE, Shape
from kerple.positions.rotary_scaling import RotaryFrequencies
from kerple.positions.temperature import Temperature
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Wrapper

ORIGINAL = "original_max_position_embeddings"
NO_POSITIONS_IN_FULL_LAYERS = {"cohere2", "cohere2_moe", "afmoe", "flint"}
NO_POSITIONS_WITH_WINDOWS = {"exaone4", "exaone_moe"}  # the same rule, if the model has windows
KNOWN = {
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("olmo", "olmo2", "olmo3", "smollm3", "cohere", "phi", "phi3", "gpt_neox", "gpt2", "opt", "bloom", "granite"),
    *("stablelm", "starcoder2", "ministral", "ministral3", "llama4_text", "gpt_oss", "glm", "glm4", "nemotron"),
    *NO_POSITIONS_IN_FULL_LAYERS,
    *NO_POSITIONS_WITH_WINDOWS,
}
"""Families whose code was compared with `configured_layers`. In other families, a difference is not a fault."""


@dataclass(frozen=True)
class Layer:
    """The configuration of one layer.

    Args:
        kind: Kind of the layer in the configuration, such as ``sliding_attention``.
        frequencies: Frequencies of RoPE, or None if the layer does not rotate.
        attention_factor: Factor of the rotated queries and keys.
        window: Number of keys that a query sees, or None for all earlier keys.
        chunk: Length of the chunks to which attention is limited, or None.
        temperature: Rule of a factor of the queries that grows with the position, or None.
        judged: Whether a difference is a fault; False for families outside of `KNOWN`.
    """

    kind: str
    frequencies: RotaryFrequencies | None = None
    attention_factor: float = 1.0
    window: int | None = None
    chunk: int | None = None
    temperature: Temperature | None = None
    judged: bool = True

    def query_factor(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Factors (T,) fp64 of the queries of the tokens with indices ``rows`` (T,) and positions ``ids`` (T,)."""
        if self.temperature is None:
            return torch.ones(len(ids), dtype=torch.float64)
        counted = rows if self.temperature.rule == "llama4" else ids  # Llama 4 counts the tokens of the input
        return self.temperature.factor(TokenPositions(counted, counted), torch.float64)[:, 0]

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query sees each key, (Tq, Tk) bool, from their indices in the input, (Tq,) and (Tk,) int64."""
        queries = queries[:, None]
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        return seen if self.chunk is None else seen & (keys >= queries // self.chunk * self.chunk)

    def __str__(self) -> str:
        f = self.frequencies
        parts = ["no rotation" if f is None else f"RoPE with θ {f.base:g} in {f.dim} channels"]
        parts += [f"{f.scaling} with factor {f.factor:g}"] if f and f.scaling else []
        parts += [f"attention factor {self.attention_factor:.4g}"] if self.attention_factor != 1 else []
        parts += [f"window {self.window}"] if self.window else [f"chunks of {self.chunk}"] if self.chunk else []
        return ", ".join(parts + ([f"temperature {self.temperature.rule}"] if self.temperature else []))


def configured_layers(config: Any) -> list[Layer]:
    """The layers that the configuration of a text model, a `transformers.PreTrainedConfig`, describes."""
    kinds = layer_kinds(config)
    each = getattr(config, "per_layer_config", None) or [config] * len(kinds)  # the sizes of layers may differ
    return [_layer(each[i], i, kind) for i, kind in enumerate(kinds)]


def our_layers(network: Transformer) -> list[Layer]:
    """The layers that the strategies of a network of this project describe; only RoPE and NoPE are judged."""
    found = []
    for i in range(len(network.blocks)):
        outer = network.positions[min(i, len(network.positions) - 1)]
        position = outer.position if isinstance(outer, Wrapper) else outer
        name, judged = type(position).__name__, isinstance(position, RoPE | NoPE)
        layer = Layer(name, window=outer.window, judged=judged)
        found.append(with_rope(layer, position) if isinstance(position, RoPE) else layer)
    return found


def original_length(config: Any) -> int | None:
    """Context length before any scaling in tokens, or None if the configuration does not name it."""
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values(), vars(config)):
        if isinstance(entry, Mapping) and entry.get(ORIGINAL):
            return int(entry[ORIGINAL])
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def _layer(config: Any, i: int, kind: str) -> Layer:
    window = config.sliding_window if kind == "sliding_attention" else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    every = getattr(config, "rope_parameters", None) or {}
    rope = every if "rope_theta" in every else every.get(kind) or {}
    rope = {} if _without_positions(config, i, kind) else rope
    made = _rope(rope, config)
    judged = config.model_type in KNOWN and (made is not None or "rope_theta" not in rope)
    layer = Layer(kind, window=window, chunk=chunk, temperature=_temperature(config, every, bool(rope)), judged=judged)
    return layer if made is None else with_rope(layer, made)


def with_rope(layer: Layer, rope: RoPE) -> Layer:
    """The layer with the frequencies of a strategy."""
    return replace(layer, frequencies=rope.frequencies, attention_factor=rope.attention_factor)


def _without_positions(config: Any, i: int, kind: str) -> bool:
    if pattern := getattr(config, "no_rope_layers", None):
        return not pattern[i]  # despite the name, 1 is a layer with positions
    windows = getattr(config, "sliding_window", None) is not None
    families = NO_POSITIONS_IN_FULL_LAYERS | (NO_POSITIONS_WITH_WINDOWS if windows else set())
    return kind == "full_attention" and config.model_type in families


def _rope(rope: Mapping[str, Any], config: Any) -> RoPE | None:
    """The RoPE of ``rope_parameters`` of transformers, or None if it has no counterpart here."""
    longest = getattr(config, "max_position_embeddings", None) or 0
    known = {name: value for name, value in rope.items() if name not in ("truncate", "mscale", "mscale_all_dim")}
    if "rope_theta" not in rope or (options := read_rope(known, True, longest)) is None:
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = longest if options.get("scaling") == "dynamic_ntk" else original_length(config)
    made = RoPE(Shape(head_dim, 1, length or longest), **options)
    made.frequencies = replace(made.frequencies, truncate=rope.get("truncate", True))
    if rope.get("mscale") and rope.get("mscale_all_dim") and not rope.get("attention_factor"):
        grown = made.attention_factor - 1
        made.attention_factor = (rope["mscale"] * grown + 1) / (rope["mscale_all_dim"] * grown + 1)
    return made


def _temperature(config: Any, rope: Mapping[str, Any], rotates: bool) -> Temperature | None:
    shape = Shape(1, 1, 2)  # a temperature with an explicit length ignores the shape
    if getattr(config, "attn_temperature_tuning", False) and not rotates:
        return Temperature(shape, "llama4", config.attn_scale, int(config.floor_scale))
    beta = rope.get("llama_4_scaling_beta")
    return Temperature(shape, "ministral3", beta, rope[ORIGINAL]) if beta else None
