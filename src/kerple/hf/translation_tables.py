"""The table of published model families that `translation_from_transformers` can translate to our own `Transformer`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """Translation table of a family of models: the names of its modules in transformers, and its options.

    Args:
        modules: Modules outside the layers: from the name in our `Transformer` to the name in transformers.
        layers: Name of the list of layers in transformers.
        layer_modules: Modules inside a layer: from the name in our `Transformer` to the name in transformers. A string
            may have several names, separated by spaces. Our weight then has the rows of all these modules, in this
            order. ``[0]`` or ``[1]`` after a name selects the first or the second half of the module's rows. An empty
            string means that the family lacks the module.
        position: Class name of the positional strategy.
        options: Options of our `Transformer` that have the same value in the whole family.
        expected: Required values of entries of the configuration. Our `Transformer` supports no other values. An entry
            that is missing is accepted.
        partial_rotary: Whether RoPE rotates only the fraction ``partial_rotary_factor`` of the channels.
        layout: Pairs of channels that RoPE rotates, see `kerple.positions.RoPE`.
        norm_plus_one: Whether norms multiply by 1 + w, where w is the stored weight.
        fused: Order of the rows of the weight that computes queries, keys and values. ``qkv``: all queries, all keys,
            all values, as in our weight. ``heads``: queries, keys and values of the first head, then of the next.
        transposed: Whether weight matrices of the layers are stored as (in, out), the transpose of ours.
    """

    modules: Mapping[str, str]
    layers: str
    layer_modules: Mapping[str, str]
    position: Literal["RoPE", "Learned", "ALiBi"]
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    layout: Literal["half", "interleaved"] = "half"
    norm_plus_one: bool = False
    fused: Literal["qkv", "heads"] = "qkv"
    transposed: bool = False


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NORMS_AND_MLP = NORMS | {"mlp.0": "mlp.dense_h_to_4h", "mlp.2": "mlp.dense_4h_to_h"}
LLAMA = Family(
    modules={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    layers="model.layers",
    layer_modules=NORMS
    | {"attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.out": "self_attn.o_proj"}
    | {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    position="RoPE",
    options={"bias": False, "norm": "rms", "gated": True},
    expected={"attention_bias": False, "mlp_bias": False},
)
GPT_NEOX = Family(
    modules={"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "lm_head"},
    layers="gpt_neox.layers",
    layer_modules=NORMS_AND_MLP | {"attention.qkv": "attention.query_key_value", "attention.out": "attention.dense"},
    position="RoPE",
    expected={"attention_bias": True},
    partial_rotary=True,
    fused="heads",
)
GPT2 = Family(
    modules={"embedding": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
    layers="transformer.h",
    layer_modules={"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "attention_norm": "ln_1"}
    | {"mlp_norm": "ln_2", "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"},
    position="Learned",
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    transposed=True,
)
BLOOM = Family(
    modules={"embedding": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm"}
    | {"norm": "transformer.ln_f", "head": "lm_head"},
    layers="transformer.h",
    layer_modules=NORMS_AND_MLP
    | {"attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense"},
    position="ALiBi",
    options={"embedding_norm": True},
    expected={"apply_residual_connection_post_layernorm": False},
    fused="heads",
)
QWEN2 = replace(LLAMA, options={**LLAMA.options, "qkv_bias": True})
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
QWEN3 = replace(LLAMA, layer_modules={**LLAMA.layer_modules, **QK_NORMS}, options={**LLAMA.options, "qk_norm": True})
OUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
OLMO2 = replace(
    LLAMA,
    layer_modules={**LLAMA.layer_modules, **QK_NORMS, **OUT_NORMS, "mlp_norm": ""},
    options={**LLAMA.options, "qk_norm": "all", "norm_placement": "post"},
)
GEMMA3 = replace(
    QWEN3,
    layer_modules={**QWEN3.layer_modules, **OUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"},
    options={**QWEN3.options, "norm_placement": "both"},
    expected={**LLAMA.expected, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    norm_plus_one=True,
)
COHERE2 = replace(
    LLAMA,
    layer_modules={**LLAMA.layer_modules, "mlp_norm": "input_layernorm"},  # attention and MLP share a norm
    options={"bias": False, "gated": True, "parallel": True},
    layout="interleaved",
)
PHI3 = replace(
    LLAMA,
    layer_modules={**LLAMA.layer_modules, "attention.qkv": "self_attn.qkv_proj"}
    | {"mlp.gate": "mlp.gate_up_proj[0]", "mlp.up": "mlp.gate_up_proj[1]"},
    partial_rotary=True,
)
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "smollm3": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "olmo2": OLMO2}
FAMILIES |= {"olmo3": OLMO2, "gemma3_text": GEMMA3, "cohere2": COHERE2, "phi3": PHI3, "gpt_neox": GPT_NEOX}
FAMILIES |= {"gpt2": GPT2, "bloom": BLOOM}
