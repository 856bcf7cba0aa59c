"""`Layer`: positional encoding, window and scores of a layer, from a configuration by the formulas of the papers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.hf.position_limit import config_length
from kerple.hf.rope import (
    LENGTH,
    NO_ROPE_IN_FULL_LAYERS,
    NO_ROPE_WITH_WINDOWS,
    has_alibi,
    layer_rope,
    read_rope,
    retrofit_strategy,
)
from kerple.hf.windowed_attention import layer_kinds
from kerple.model import Transformer
from kerple.positions import LayerPattern, NoPE, RoPE, Shape
from kerple.positions.temperature import Temperature
from kerple.positions.token_positions import TokenPositions

KNOWN = {
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("olmo", "olmo2", "olmo3", "smollm3", "cohere", "phi", "phi3", "gpt_neox", "gpt2", "opt", "bloom", "granite"),
    *("stablelm", "starcoder2", "ministral", "ministral3", "llama4_text", "gpt_oss", "glm", "glm4", "nemotron"),
    *(NO_ROPE_IN_FULL_LAYERS | NO_ROPE_WITH_WINDOWS),
    *("deepseek_v2", "deepseek_v3", "qwen3_next", "falcon_h1", "granitemoehybrid", "phimoe"),
}
"""Families (``model_type``) whose code was compared with `configured_layers`. In other families, a forward pass that
differs from `configured_layers` is not called a fault."""
SINKS = {"gpt_oss", "flint", "granite_swa", "granitemoe_swa"}
"""Families with a sink in the softmax of every layer."""
UNSCALED = {"opt", "gemma3n_text", "gemma4_text", "gemma4_unified_text"}
"""Families whose attention functions receive a softmax scale of 1, because queries are scaled or normalised before."""


@dataclass(frozen=True)
class Layer:
    """Positional encoding, window and scores of one layer, as a configuration describes them.

    Args:
        rope: RoPE with the layer's frequencies and attention factor; None for a layer without RoPE.
        window: Number of keys that a query sees, including its own; None for all keys up to its own.
        chunk: Length of the chunks of tokens to which attention is limited; None without chunks.
        temperature: Strategy that multiplies queries by a factor that grows with the position, or None.
        scale: Softmax scale, the factor of q·k in the attention function; None if it is not compared.
        softcap: Soft cap c of the scores s, which become ``c · tanh(s / c)``; None without a soft cap.
        sinks: Whether the softmax contains the logit of a sink.
        alibi: Whether attention adds the biases of ALiBi.
        latent: Number of last channels of queries and keys that RoPE rotates in latent attention (MLA), where the
            other channels have no positions; 0 for other attention.
        is_verified: Whether a difference from the forward pass is a fault. False for families outside of `KNOWN`, for
            layers whose RoPE has no formula in this project, and for our strategies other than RoPE and NoPE.
        strategy: Strategy that acts inside the attention function: one that `kerple.hf.retrofit` has added to the
            layer, other than NoPE, or that of a layer of our networks, other than RoPE and NoPE; empty for none.
    """

    rope: RoPE | None = None
    window: int | None = None
    chunk: int | None = None
    temperature: Temperature | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    latent: int = 0
    is_verified: bool = True
    strategy: str = ""

    def query_factor(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the factor of the temperature for each query, (T,) fp64; 1 without a temperature.

        Args:
            rows: Indices of the queries in the input, (T,) int64.
            ids: Positions of the queries, (T,) int64.
        """
        if self.temperature is None:
            return torch.ones(len(ids), dtype=torch.float64)
        positions = rows if self.temperature.rule == "llama4" else ids  # Llama 4 ignores position_ids
        return self.temperature.factor(TokenPositions(positions, positions), torch.float64)[:, 0]

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query sees each key, (Tq, Tk) bool.

        Args:
            queries: Indices of the queries in the input, (Tq,) int64.
            keys: Indices of the keys in the input, (Tk,) int64.
        """
        queries = queries[:, None]
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        return seen if self.chunk is None else seen & (keys >= queries // self.chunk * self.chunk)

    def __str__(self) -> str:
        parts = ["ALiBi, no rotation" if self.alibi else "no rotation"]
        if self.rope is not None:
            f, attention_factor = self.rope.frequencies, self.rope.attention_factor
            parts = [f"RoPE with θ {f.base:g} in {f.dim} channels"]
            parts += [f"{f.scaling} with factor {f.factor:g}"] if f.scaling else []
            parts += [f"attention factor {attention_factor:.4g}"] if attention_factor != 1 else []
        parts += [f"window {self.window}"] if self.window else [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"temperature {self.temperature.rule}"] if self.temperature else []
        parts += [f"softmax scale {self.scale:.4g}"] if self.scale else []
        parts += [f"soft cap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] * self.sinks + [self.strategy] * bool(self.strategy)
        return ", ".join(["latent attention"] * bool(self.latent) + parts)


def configured_layers(config: Any) -> list[Layer]:
    """Return the layers described by ``config``, the `transformers.PreTrainedConfig` of a text model."""
    kinds = layer_kinds(config)
    configs = getattr(config, "per_layer_config", None) or [config] * len(kinds)  # the sizes of layers may differ
    return [_layer(configs[i], i, kind) for i, kind in enumerate(kinds)]


def our_layers(network: Transformer) -> list[Layer]:
    """Return the layers that the strategies of a network of this project describe.

    Only layers with RoPE and NoPE are judged.
    """
    layers = []
    for i in range(len(network.blocks)):
        outer = network.positions[min(i, len(network.positions) - 1)]  # one instance per layer, or one for all layers
        position = outer.position if isinstance(outer, LayerPattern) else outer
        rope = position if isinstance(position, RoPE) else None
        is_verified = isinstance(position, RoPE | NoPE)
        strategy = "" if is_verified else type(position).__name__
        layers.append(Layer(rope, outer.window, is_verified=is_verified, strategy=strategy))
    return layers


def original_length(config: Any) -> int | None:
    """Return the context length in tokens before any scaling, or None if the configuration does not state it."""
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values(), vars(config)):
        if isinstance(entry, Mapping) and entry.get(LENGTH):
            return int(entry[LENGTH])
    return config_length(config)


def _layer(config: Any, i: int, kind: str) -> Layer:
    """Return layer ``i`` of a configuration. ``kind`` is its kind, see `layer_kinds`."""
    window = config.sliding_window if kind == "sliding_attention" else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    parameters = layer_rope(config, i, kind)
    rope, temperature = _rope(parameters, config), _temperature(parameters, config)
    is_verified = config.model_type in KNOWN and (rope is not None or "rope_theta" not in parameters)
    sinks = config.model_type in SINKS or (config.model_type == "mimo_v2_flash" and window is not None)
    latent = config.qk_rope_head_dim if getattr(config, "kv_lora_rank", None) else 0
    scale, softcap = _scale(config, parameters, i), getattr(config, "attn_logit_softcapping", None)
    alibi = has_alibi(config)
    strategy = retrofit_strategy(config) if i in getattr(config, "kerple_retrofit", {}).get("layers", ()) else ""
    strategy = "" if strategy == "NoPE" else strategy
    return Layer(rope, window, chunk, temperature, scale, softcap, sinks, alibi, latent, is_verified, strategy)


def _scale(config: Any, parameters: Mapping[str, Any], i: int) -> float | None:
    """Return the softmax scale of layer ``i``: δ^(-1/2), or the scale that the configuration states.

    None if the configuration has no attention heads, as that of Mamba.
    """
    if not getattr(config, "num_attention_heads", None):
        return None
    if config.model_type in UNSCALED:
        return 1.0
    if multiplier := getattr(config, "attention_multiplier", None):  # Granite
        return float(multiplier)
    if config.model_type == "gpt2":
        inverse = config.scale_attn_by_inverse_layer_idx
        return (_head_dim(config) ** -0.5 if config.scale_attn_weights else 1.0) / (i + 1 if inverse else 1)
    if not getattr(config, "kv_lora_rank", None):
        return float((getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)) ** -0.5)  # Gemma
    growth = 0.1 * math.log(parameters.get("factor") or 1.0)  # YaRN in DeepSeek's code
    factor = parameters.get("mscale_all_dim", 0) * growth + 1 if parameters.get("rope_type") != "default" else 1.0
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * factor**2)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(parameters: Mapping[str, Any], config: Any) -> RoPE | None:
    """Return the RoPE of ``rope_parameters``; None if they are empty or of a type that this project lacks."""
    longest = getattr(config, "max_position_embeddings", None) or 0
    if "rope_theta" not in parameters:
        return None
    head_dim = config.qk_rope_head_dim if getattr(config, "kv_lora_rank", None) else _head_dim(config)
    # read_rope rejects or ignores these entries; they are applied here
    known = {name: value for name, value in parameters.items() if name not in ("truncate", "mscale", "mscale_all_dim")}
    if parameters.get("alpha") and parameters.get("rope_type") == "dynamic":  # HunYuan: θ·α^(δ/(δ - 2)) at all lengths
        theta = parameters["rope_theta"] * parameters["alpha"] ** (head_dim / (head_dim - 2))
        known |= {"rope_type": "default", "rope_theta": theta}
    if (options := read_rope(known, True, longest)) is None:
        return None
    length = longest if options.get("scaling") == "dynamic_ntk" else original_length(config)
    rope = RoPE(Shape(head_dim, 1, length or longest or 1), **options)  # without scaling, the length has no effect
    rope.frequencies = replace(rope.frequencies, truncate=parameters.get("truncate", True))
    if parameters.get("mscale") and parameters.get("mscale_all_dim") and not parameters.get("attention_factor"):
        growth = rope.attention_factor - 1  # 0.1 · ln s of YaRN
        rope.attention_factor = (parameters["mscale"] * growth + 1) / (parameters["mscale_all_dim"] * growth + 1)
    rope.attention_factor = parameters.get("short_mscale") or rope.attention_factor  # PhiMoE, up to the original length
    return rope


def _temperature(parameters: Mapping[str, Any], config: Any) -> Temperature | None:
    """Return the temperature of a layer, or None. In Llama 4, only layers without RoPE have a temperature."""
    shape = Shape(1, 1, 2)  # a temperature with an explicit length ignores the shape
    if getattr(config, "attn_temperature_tuning", False) and not parameters:
        return Temperature(shape, "llama4", config.attn_scale, int(config.floor_scale))
    beta = parameters.get("llama_4_scaling_beta")
    return Temperature(shape, "ministral3", beta, parameters[LENGTH]) if beta else None
