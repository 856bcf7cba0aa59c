"""Translation of published model families to options and weights of our own `Transformer`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.hf.rope import read_rope, rope_type
from kerple.model.stored import StoredModel, Weights

TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # transformers' names of one approximation of gelu
ACTIVATION_NAMES = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"} | dict.fromkeys(TANH, "gelu_tanh")


@dataclass(frozen=True)
class Family:
    """How a family of models of transformers names its modules and options.

    Args:
        modules: Names of the family's modules by the names of ours; ``*`` stands for the number of a layer. Where
            several names are separated by spaces, the rows of our weight are those of these modules in this order.
        position: Class name of the positional strategy.
        options: Options of our Transformer that are the same in the whole family.
        expected: Entries of the configuration that must have this value, because our Transformer has no other.
        partial_rotary: Whether RoPE rotates the fraction ``partial_rotary_factor`` of the channels.
        fused: Order of the rows of the weight that computes queries, keys and values: ``qkv`` has all queries first, as
            ours; ``heads`` has queries, keys and values of the first head first.
        transposed: Whether weights of the layers are (in, out), the transpose of ours.
    """

    modules: Mapping[str, str]
    position: Literal["RoPE", "Learned", "ALiBi"]
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    fused: Literal["qkv", "heads"] = "qkv"
    transposed: bool = False


LLAMA = Family(
    modules={
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "blocks.*.attention.qkv": " ".join(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
        "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
        "blocks.*.attention_norm": "model.layers.*.input_layernorm",
        "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
        "blocks.*.mlp.up": "model.layers.*.mlp.up_proj",
        "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
    },
    position="RoPE",
    options={"bias": False, "norm": "rms", "gated": True},
    expected={"attention_bias": False, "mlp_bias": False, "sliding_window": None},
)
GPT_NEOX = Family(
    modules={
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
        "blocks.*.attention.qkv": "gpt_neox.layers.*.attention.query_key_value",
        "blocks.*.attention.out": "gpt_neox.layers.*.attention.dense",
        "blocks.*.attention_norm": "gpt_neox.layers.*.input_layernorm",
        "blocks.*.mlp_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "blocks.*.mlp.0": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "blocks.*.mlp.2": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    },
    position="RoPE",
    expected={"attention_bias": True},
    partial_rotary=True,
    fused="heads",
)
GPT2 = Family(
    modules={
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.*.attention.qkv": "transformer.h.*.attn.c_attn",
        "blocks.*.attention.out": "transformer.h.*.attn.c_proj",
        "blocks.*.attention_norm": "transformer.h.*.ln_1",
        "blocks.*.mlp_norm": "transformer.h.*.ln_2",
        "blocks.*.mlp.0": "transformer.h.*.mlp.c_fc",
        "blocks.*.mlp.2": "transformer.h.*.mlp.c_proj",
    },
    position="Learned",
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    transposed=True,
)
BLOOM = Family(
    modules={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.*.attention.qkv": "transformer.h.*.self_attention.query_key_value",
        "blocks.*.attention.out": "transformer.h.*.self_attention.dense",
        "blocks.*.attention_norm": "transformer.h.*.input_layernorm",
        "blocks.*.mlp_norm": "transformer.h.*.post_attention_layernorm",
        "blocks.*.mlp.0": "transformer.h.*.mlp.dense_h_to_4h",
        "blocks.*.mlp.2": "transformer.h.*.mlp.dense_4h_to_h",
    },
    position="ALiBi",
    options={"embedding_norm": True},
    expected={"apply_residual_connection_post_layernorm": False},
    fused="heads",
)
QWEN2 = replace(LLAMA, options={**LLAMA.options, "qkv_bias": True})
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": QWEN2, "gpt_neox": GPT_NEOX, "gpt2": GPT2, "bloom": BLOOM}


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
    if config.model_type == "kerple":
        model = dict(config.network)
        weights = {name.removeprefix("network."): value for name, value in state.items()}
    else:
        if config.model_type not in FAMILIES:
            raise no_counterpart(f"is a {config.model_type}, none of {', '.join(FAMILIES)}")
        family = FAMILIES[config.model_type]
        model = read_options(family, config)
        weights = read_weights(family, state, model["layers"], model["heads"])
    if config.tie_word_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return StoredModel(model, weights)


def read_options(family: Family, config: Any) -> dict[str, Any]:
    """Options of our Transformer that make the model of a configuration."""
    for name, value in family.expected.items():
        if getattr(config, name, value) != value:
            raise no_counterpart(f"has {name}: {getattr(config, name)}")
    dim, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or dim // heads
    if head_dim * heads != dim:
        raise no_counterpart(f"has heads of {head_dim} in a width of {dim} / {heads}")
    activation = _first(config, "hidden_act", "activation_function", default="gelu_new")  # BLOOM's has no name
    if activation not in ACTIVATION_NAMES:
        raise no_counterpart(f"has the activation {activation}")
    rope = read_rope(config, family.partial_rotary) if family.position == "RoPE" else {}
    if rope is None:
        raise no_counterpart(f"has RoPE of type {rope_type(config)}")
    return {
        "layers": config.num_hidden_layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads", default=heads),
        "hidden": _first(config, "intermediate_size", "n_inner", default=4 * dim),
        "bias": True,
        "eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        "activation": ACTIVATION_NAMES[activation],
        "parallel": config.model_type == "gpt_neox" and config.use_parallel_residual,
        "tied": config.tie_word_embeddings,
        "position": {"class_path": f"kerple.positions.{family.position}", "init_args": rope},
        "length": _first(config, "max_position_embeddings", "seq_length", default=2048),  # BLOOM's training length
        "vocabulary": config.vocab_size,
        **family.options,
    }


def read_weights(family: Family, state: Mapping[str, Tensor], layers: int, heads: int) -> Weights:
    """Weights of a model by their names in our Transformer; a name that is not in its state is left out."""
    weights: Weights = {}
    for ours, theirs in parameters(family, layers):
        parts = [state[name] for name in theirs if name in state]
        if not parts:
            continue
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if family.transposed and ours.startswith("blocks") and weight.ndim == 2:
            weight = weight.T.contiguous()
        if family.fused == "heads" and ".qkv." in ours:
            weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)  # (H, 3, δ, …) -> (3, H, δ, …)
        weights[ours] = weight
    if family.position == "Learned":
        weights["positions.0.table"] = state["transformer.wpe.weight"]
    return weights


def parameters(family: Family, layers: int) -> list[tuple[str, list[str]]]:
    """Names of all parameters that a model of a family may have: ours, and the one or several of theirs."""
    return [
        (f"{ours}.{kind}".replace("*", str(i)), [f"{name}.{kind}".replace("*", str(i)) for name in theirs.split()])
        for ours, theirs in family.modules.items()
        for i in range(layers if "*" in ours else 1)
        for kind in ("weight", "bias")
    ]


def no_counterpart(reason: str) -> UserError:
    """The error that says what our Transformer does not have."""
    return UserError(f"weights: the model {reason}, which this Transformer does not have; test it by test --hf")


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these entries of a configuration that has a value."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)
