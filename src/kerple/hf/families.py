"""Translation of published model families to options and weights of our own `Transformer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kerple.base.errors import UserError

Weights = dict[str, Tensor]
ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class StoredModel:
    """A published model in terms of our own `Transformer`.

    Args:
        model: Options of `LanguageModel`: sizes, architecture, position, the training length as ``length``
            and the rows of the embedding as ``vocabulary``.
        weights: Weights by their names in our Transformer, including those of the positional strategy.
        left: Names of weights that our Transformer does not have.
    """

    model: dict[str, Any]
    weights: Weights
    left: tuple[str, ...] = ()


def read_family(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    """Translate a model of transformers.

    Args:
        config: The `PreTrainedConfig` of a Llama, Mistral, Qwen2, GPT-NeoX, GPT-2 or BLOOM, or of a model that this
            project has exported.
        state: The model's state_dict.

    Raises:
        UserError: If the family or one of its options has no counterpart here. The model can still be tested by
            ``--hf``.
    """
    readers: dict[str, Callable[[Any, Mapping[str, Tensor]], StoredModel]] = {
        "llama": _llama,
        "mistral": _llama,
        "qwen2": _llama,
        "gpt_neox": _gpt_neox,
        "gpt2": _gpt2,
        "bloom": _bloom,
        "kerple": _own,
    }
    if config.model_type not in readers:
        raise _no_counterpart(config, f"is a {config.model_type}, none of {', '.join(readers)}")
    read = readers[config.model_type](config, state)
    return StoredModel(read.model, read.weights, tuple(_unused(config, state)))


def _llama(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    heads, dim = config.num_attention_heads, config.hidden_size
    if (getattr(config, "head_dim", None) or dim // heads) * heads != dim:
        raise _no_counterpart(config, f"has heads of {config.head_dim} in a width of {dim} / {heads}")
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        raise _no_counterpart(config, "has biases outside of queries, keys and values")
    windows = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    if windows and getattr(config, "sliding_window", None):
        raise _no_counterpart(config, f"attends to a window of {config.sliding_window} tokens")
    model = {
        "layers": config.num_hidden_layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "hidden": config.intermediate_size,
        "bias": False,
        "qkv_bias": config.model_type == "qwen2",
        "norm": "rms",
        "eps": config.rms_norm_eps,
        "activation": _activation(config, config.hidden_act),
        "gated": True,
        "tied": config.tie_word_embeddings,
        "position": _rope(config, 1.0),
        "length": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
    }
    weights = {"embedding.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    for i in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        for kind in ("weight", "bias") if model["qkv_bias"] else ("weight",):
            parts = [state[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            weights[f"{ours}.attention.qkv.{kind}"] = torch.cat(parts)
        for name, source in (
            ("attention.out", "self_attn.o_proj"),
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            weights[f"{ours}.{name}.weight"] = state[f"{theirs}.{source}.weight"]
    return StoredModel(model, _with_head(weights, state, "lm_head.weight", config.tie_word_embeddings))


def _gpt_neox(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    if not config.attention_bias:
        raise _no_counterpart(config, "has biases everywhere but in its attention")
    share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    model = {
        **_plain(config, config.num_hidden_layers, config.hidden_size, config.num_attention_heads),
        "hidden": config.intermediate_size,
        "eps": config.layer_norm_eps,
        "activation": _activation(config, config.hidden_act),
        "parallel": config.use_parallel_residual,
        "tied": config.tie_word_embeddings,
        "position": _rope(config, share),
        "length": config.max_position_embeddings,
    }
    weights = {"embedding.weight": state["gpt_neox.embed_in.weight"]}
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.out": "attention.dense",
    }
    names |= {"mlp.0": "mlp.dense_h_to_4h", "mlp.2": "mlp.dense_4h_to_h", "attention.qkv": "attention.query_key_value"}
    weights |= _blocks(state, "gpt_neox.layers", config.num_hidden_layers, names, lambda w: _by_head(w, config))
    weights |= _pair(state, "gpt_neox.final_layer_norm", "norm")
    head = "lm_head.weight" if "lm_head.weight" in state else "embed_out.weight"
    return StoredModel(model, _with_head(weights, state, head, config.tie_word_embeddings))


def _gpt2(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    for option in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if getattr(config, option, False):
            raise _no_counterpart(config, f"has {option}")
    if not config.scale_attn_weights:
        raise _no_counterpart(config, "has scores that are not divided by √δ (scale_attn_weights: false)")
    model = {
        **_plain(config, config.n_layer, config.n_embd, config.n_head),
        "hidden": config.n_inner or 4 * config.n_embd,
        "eps": config.layer_norm_epsilon,
        "activation": _activation(config, config.activation_function),
        "tied": config.tie_word_embeddings,
        "position": {"class_path": "kerple.positions.Learned", "init_args": {}},
        "length": config.n_positions,
    }
    weights = {
        "embedding.weight": state["transformer.wte.weight"],
        "positions.0.table": state["transformer.wpe.weight"],
    }
    names = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.out": "attn.c_proj",
        "attention.qkv": "attn.c_attn",
    }
    names |= {"mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"}
    weights |= _blocks(state, "transformer.h", config.n_layer, names)
    for name in [n for n in weights if n.endswith("weight") and weights[n].ndim == 2 and n.startswith("blocks")]:
        weights[name] = weights[name].T.contiguous()  # GPT-2 stores (in, out)
    weights |= _pair(state, "transformer.ln_f", "norm")
    return StoredModel(model, _with_head(weights, state, "lm_head.weight", config.tie_word_embeddings))


def _bloom(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    if config.apply_residual_connection_post_layernorm:
        raise _no_counterpart(config, "adds what is normalised to the residual stream")
    model = {
        **_plain(config, config.n_layer, config.hidden_size, config.n_head),
        "hidden": 4 * config.hidden_size,
        "eps": config.layer_norm_epsilon,
        "activation": "gelu_tanh",
        "embedding_norm": True,
        "tied": config.tie_word_embeddings,
        "position": {"class_path": "kerple.positions.ALiBi", "init_args": {}},
        "length": getattr(config, "seq_length", None) or 2048,  # BLOOM's training length
    }
    weights = {"embedding.weight": state["transformer.word_embeddings.weight"]}
    weights |= _pair(state, "transformer.word_embeddings_layernorm", "embedding_norm")
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {"attention.out": "self_attention.dense", "attention.qkv": "self_attention.query_key_value"}
    names |= {"mlp.0": "mlp.dense_h_to_4h", "mlp.2": "mlp.dense_4h_to_h"}
    weights |= _blocks(state, "transformer.h", config.n_layer, names, lambda w: _by_head(w, config))
    weights |= _pair(state, "transformer.ln_f", "norm")
    return StoredModel(model, _with_head(weights, state, "lm_head.weight", config.tie_word_embeddings))


def _own(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    weights = {name.removeprefix("network."): value for name, value in state.items()}
    return StoredModel(dict(config.network), _with_head(weights, weights, "head.weight", config.tie_word_embeddings))


def _plain(config: Any, layers: int, dim: int, heads: int) -> dict[str, Any]:
    return {"layers": layers, "dim": dim, "heads": heads, "bias": True, "vocabulary": config.vocab_size}


def _pair(state: Mapping[str, Tensor], theirs: str, ours: str) -> Weights:
    return {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias")}


def _blocks(
    state: Mapping[str, Tensor],
    prefix: str,
    layers: int,
    names: Mapping[str, str],
    qkv: Callable[[Tensor], Tensor] = lambda w: w,
) -> Weights:
    made: Weights = {}
    for i in range(layers):
        for ours, theirs in names.items():
            pair = _pair(state, f"{prefix}.{i}.{theirs}", f"blocks.{i}.{ours}")
            made |= {name: qkv(w) if ours == "attention.qkv" else w for name, w in pair.items()}
    return made


def _by_head(weight: Tensor, config: Any) -> Tensor:
    """Reorder rows from (H, 3, δ, …) to our (3, H, δ, …)."""
    return weight.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _with_head(weights: Weights, state: Mapping[str, Tensor], name: str, tied: bool) -> Weights:
    return weights | {"head.weight": weights["embedding.weight"] if tied else state[name]}


def _unused(config: Any, state: Mapping[str, Tensor]) -> list[str]:
    # tables that transformers computes; some files hold them too
    return [name for name in state if name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))]


def _activation(config: Any, name: str) -> str:
    if name not in ACTIVATION_NAMES:
        raise _no_counterpart(config, f"has the activation {name}")
    return ACTIVATION_NAMES[name]


def _rope(config: Any, share: float) -> dict[str, Any]:
    rope = config.rope_parameters or {}
    kinds = {"default": None, "linear": "pi", "dynamic": "dynamic_ntk"}
    kind = rope.get("rope_type", "default")
    if kind not in kinds or "rope_theta" not in rope:
        raise _no_counterpart(config, f"has RoPE of type {kind}")
    options = {"base": float(rope["rope_theta"]), "share": float(share), "layout": "half"}
    if kinds[kind] is not None:
        options |= {"scaling": kinds[kind], "factor": float(rope["factor"])}
    return {"class_path": "kerple.positions.RoPE", "init_args": options}


def _no_counterpart(config: Any, why: str) -> UserError:
    return UserError(
        f"weights: the model {why}, which this Transformer does not have; test it as it is, with test --hf"
    )
