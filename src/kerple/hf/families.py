"""Translation of published model families to options and weights of our own `Transformer`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.hf.rope import read_rope
from kerple.model.stored import StoredModel, Weights

TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # transformers' names of one approximation of gelu
ACTIVATION_NAMES = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"} | dict.fromkeys(TANH, "gelu_tanh")


@dataclass(frozen=True)
class Family:
    """How a family of models of transformers names its modules and options.

    Args:
        modules: Names of the family's modules by the names of ours; ``*`` stands for the number of a layer. Where
            several names are separated by spaces, the rows of our weight are those of these modules in this order.
            A name ``[0]`` or ``[1]`` after a module's is the first or second half of its rows.
        position: Class name of the positional strategy.
        options: Options of our Transformer that are the same in the whole family.
        expected: Entries of the configuration that must have this value, because our Transformer has no other.
        partial_rotary: Whether RoPE rotates the fraction ``partial_rotary_factor`` of the channels.
        local_rotary: Whether only layers with a window have RoPE.
        layout: Pairs of channels that RoPE rotates, see `kerple.positions.RoPE`.
        norm_plus_one: Whether norms multiply by 1 + w.
        fused: Order of the rows of the weight that computes queries, keys and values: ``qkv`` has all queries first, as
            ours; ``heads`` has queries, keys and values of the first head first.
        transposed: Whether weights of the layers are (in, out), the transpose of ours.
    """

    modules: Mapping[str, str]
    position: Literal["RoPE", "Learned", "ALiBi"]
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    local_rotary: bool = False
    layout: Literal["half", "interleaved"] = "half"
    norm_plus_one: bool = False
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
    expected={"attention_bias": False, "mlp_bias": False},
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
QK_NORMS = {f"blocks.*.attention.{part}_norm": f"model.layers.*.self_attn.{part}_norm" for part in "qk"}
QWEN3 = replace(LLAMA, modules={**LLAMA.modules, **QK_NORMS}, options={**LLAMA.options, "qk_norm": True})
OUT_NORMS = {
    "blocks.*.attention_out_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp_out_norm": "model.layers.*.post_feedforward_layernorm",
}
OLMO2 = replace(
    LLAMA,
    modules={**LLAMA.modules, **QK_NORMS, **OUT_NORMS, "blocks.*.mlp_norm": ""},
    options={**LLAMA.options, "qk_norm": "all", "norm_placement": "post"},
)
GEMMA3 = replace(
    QWEN3,
    modules={**QWEN3.modules, **OUT_NORMS, "blocks.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm"},
    options={**QWEN3.options, "norm_placement": "both"},
    expected={**LLAMA.expected, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    norm_plus_one=True,
)
COHERE2 = replace(
    LLAMA,
    modules={**LLAMA.modules, "blocks.*.mlp_norm": LLAMA.modules["blocks.*.attention_norm"]},  # one for both
    options={"bias": False, "gated": True, "parallel": True},
    local_rotary=True,
    layout="interleaved",
)
PHI3 = replace(
    LLAMA,
    modules={
        **LLAMA.modules,
        "blocks.*.attention.qkv": "model.layers.*.self_attn.qkv_proj",
        "blocks.*.mlp.gate": "model.layers.*.mlp.gate_up_proj[0]",
        "blocks.*.mlp.up": "model.layers.*.mlp.gate_up_proj[1]",
    },
    partial_rotary=True,
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "smollm3": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "gemma3_text": GEMMA3,
    "cohere2": COHERE2,
    "phi3": PHI3,
    "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
    "bloom": BLOOM,
}


def read_family(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    """Translate a model of transformers.

    Args:
        config: The `PreTrainedConfig` of a model of one of `FAMILIES`, or of a model that this project has exported.
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
        weights = read_weights(family, config, state)
    if config.tie_word_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return StoredModel(model, weights)


def read_options(family: Family, config: Any) -> dict[str, Any]:
    """Options of our Transformer that make the model of a configuration."""
    for name, value in family.expected.items():
        if getattr(config, name, value) != value:
            raise no_counterpart(f"has {name}: {getattr(config, name)}")
    dim, heads = config.hidden_size, config.num_attention_heads
    head_dim = _first(config, "head_dim", default=dim // heads)
    activation = _first(
        config, "hidden_act", "hidden_activation", "activation_function", default="gelu_new"
    )  # BLOOM's has no name
    if activation not in ACTIVATION_NAMES:
        raise no_counterpart(f"has the activation {activation}")
    length = _first(config, "max_position_embeddings", "seq_length", default=2048)  # BLOOM's training length
    position, length = (
        read_layers(family, config, length)
        if family.position == "RoPE"
        else ({"class_path": f"kerple.positions.{family.position}"}, length)
    )
    return {
        "layers": config.num_hidden_layers,
        "dim": dim,
        "heads": heads,
        "head_dim": None if head_dim == dim // heads else head_dim,
        "kv_heads": _first(config, "num_key_value_heads", default=heads),
        "hidden": _first(config, "intermediate_size", "n_inner", default=4 * dim),
        "bias": True,
        "eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        "activation": ACTIVATION_NAMES[activation],
        "embedding_scale": dim**0.5 if family is GEMMA3 else 1.0,
        "logit_cap": getattr(config, "final_logit_softcapping", None),
        "parallel": config.model_type == "gpt_neox" and config.use_parallel_residual,
        "tied": config.tie_word_embeddings,
        "position": position,
        "length": length,
        "vocabulary": config.vocab_size,
        **family.options,
    }


def read_layers(family: Family, config: Any, length: int) -> tuple[dict[str, Any], int]:
    """The strategy of a family with RoPE, and the training length that its frequencies belong to.

    Args:
        family: The family.
        config: A model's configuration.
        length: Its largest number of positions.

    Raises:
        UserError: If our RoPE has no counterpart of the model's.
    """
    layers, trained = config.num_hidden_layers, length
    ropes, types = config.rope_parameters, getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    rotates = getattr(config, "no_rope_layers", None)
    kinds: dict[str, Any] = {}
    windows: dict[str, int] = {}
    pattern = []
    for i, layer_type in enumerate(types):
        window = getattr(config, "sliding_window", None) if layer_type == "sliding_attention" else None
        has_rope = rotates[i] if rotates else window or not family.local_rotary
        kind = ("local" if window else "global") + ("" if has_rope else "_nope")
        pattern.append(kind)
        if window:
            windows[kind] = window
        if not has_rope:
            kinds[kind] = {"class_path": "kerple.positions.NoPE"}
        elif kind not in kinds:
            rope = ropes if "rope_theta" in ropes else ropes[layer_type]
            trained = rope.get("original_max_position_embeddings", trained)
            options = read_rope(rope, family.partial_rotary, length)
            if options is None:
                raise no_counterpart(f"has RoPE of type {rope['rope_type']}")
            kinds[kind] = {"class_path": "kerple.positions.RoPE", "init_args": options | {"layout": family.layout}}
    if len(kinds) == 1 and not windows:
        return kinds[pattern[0]], trained
    period = next(n for n in range(1, layers + 1) if pattern == (pattern[:n] * layers)[:layers])
    options = {"kinds": kinds, "pattern": pattern[:period], "windows": windows}
    return {"class_path": "kerple.positions.LayerPattern", "init_args": options}, trained


def read_weights(family: Family, config: Any, state: Mapping[str, Tensor]) -> Weights:
    """Weights of a model by their names in our Transformer; a name that is not in its state is left out."""
    weights: Weights = {}
    heads, scalar = config.num_attention_heads, getattr(config, "query_pre_attn_scalar", None)
    for ours, theirs in parameters(family, config.num_hidden_layers):
        parts = [part for name in theirs if (part := _part(state, name)) is not None]
        if not parts:
            continue
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if family.norm_plus_one and "norm." in ours:
            weight = weight.float() + 1
        if ".q_norm." in ours and scalar:
            weight = weight * (config.head_dim / scalar) ** 0.5  # scores are divided by √scalar, ours by √δ
        if ours == "norm.weight" and hasattr(config, "logit_scale"):
            weight = weight * config.logit_scale
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


def _part(state: Mapping[str, Tensor], name: str) -> Tensor | None:
    """A tensor of a state, or half of its rows, if the name asks for that; None if the state has none."""
    module, bracket, rest = name.partition("[")
    if not bracket:
        return state.get(name)
    whole = state.get(module + rest[2:])
    return None if whole is None else whole.chunk(2)[int(rest[0])]


def no_counterpart(reason: str) -> UserError:
    """The error that says what our Transformer does not have."""
    return UserError(f"weights: the model {reason}, which this Transformer does not have; test it by test --hf")


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these entries of a configuration that has a value."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)
