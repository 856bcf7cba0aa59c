"""Tiny random models of many families, without faults."""

from typing import Any

from tests.hf.tiny import hf, random_model

LENGTH = 64
BASE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0}
LOCAL_GLOBAL = ["sliding_attention"] * 3 + ["full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH}
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}
FACTORS = [1.0 + i / 4 for i in range(8)]


def scaled(kind: str, **options: Any) -> dict[str, Any]:
    original = {} if kind in ("linear", "dynamic") else {"original_max_position_embeddings": LENGTH}
    longest = LENGTH // 2 if kind == "dynamic" else 4 * LENGTH
    return with_rope({"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0} | original | options, longest)


WINDOW = {"sliding_window": 8, "layer_types": LOCAL_GLOBAL}
QWEN2 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 16}
GEMMA3 = {"sliding_attention": DEFAULT, "full_attention": YARN | {"rope_theta": 5000.0}}
OLMO3 = {"sliding_attention": DEFAULT, "full_attention": YARN}
PHI3 = {"original_max_position_embeddings": LENGTH, "sliding_window": None}
LLAMA4: dict[str, Any] = {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8}
LLAMA4 |= {"no_rope_layers": [1, 1, 1, 0], "floor_scale": 8, "attn_scale": 0.1}
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16}
MLA |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4} | EXPERTS
MLA |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
QWEN3_NEXT: dict[str, Any] = {"head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_experts": 4}
QWEN3_NEXT |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "mlp_only_layers": [0, 1, 2, 3]} | EXPERTS
FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}


def with_rope(rope: dict[str, Any], longest: int = LENGTH, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": rope, "max_position_embeddings": longest} | options


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", with_rope(DEFAULT)),
    "llama+yarn": ("Llama", scaled("yarn")),
    "llama+linear": ("Llama", scaled("linear")),
    "llama+dynamic": ("Llama", scaled("dynamic")),
    "llama+llama3": ("Llama", scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "mistral": ("Mistral", with_rope(DEFAULT, sliding_window=8)),
    "qwen2": ("Qwen2", QWEN2 | scaled("yarn")),
    "qwen3": ("Qwen3", {"head_dim": 16} | scaled("yarn")),
    "gemma2": ("Gemma2", GEMMA2 | with_rope(DEFAULT, sliding_window=8)),
    "gemma3": ("Gemma3Text", GEMMA2 | with_rope(GEMMA3, 4 * LENGTH) | WINDOW),
    "olmo2": ("Olmo2", with_rope(DEFAULT)),
    "olmo3": ("Olmo3", with_rope(OLMO3, 4 * LENGTH) | WINDOW),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0]} | scaled("yarn")),
    "cohere2": ("Cohere2", WINDOW | with_rope(DEFAULT)),
    "phi3": ("Phi3", scaled("longrope", factor=None, short_factor=[1.0] * 8, long_factor=FACTORS) | PHI3),
    "gpt_neox": ("GPTNeoX", with_rope(DEFAULT | {"partial_rotary_factor": 0.5})),
    "stablelm": ("StableLm", with_rope(DEFAULT | {"partial_rotary_factor": 0.25})),
    "glm4": ("Glm4", {"head_dim": 16} | with_rope(DEFAULT | {"partial_rotary_factor": 0.5})),
    "exaone4": ("Exaone4", WINDOW | with_rope(DEFAULT, sliding_window_pattern=4)),
    "ministral3": ("Ministral3", {"head_dim": 16} | scaled("yarn", llama_4_scaling_beta=0.1)),
    "llama4": ("Llama4Text", {"head_dim": 16} | LLAMA4 | with_rope(DEFAULT)),
    "gpt_oss": ("GptOss", {"head_dim": 16} | GPT_OSS | scaled("yarn", truncate=False)),
    "deepseek_v2": ("DeepseekV2", MLA | scaled("yarn", mscale=1.0, mscale_all_dim=0.7)),
    "deepseek_v3": ("DeepseekV3", MLA | scaled("yarn", mscale=1.0, mscale_all_dim=0.7)),
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT | with_rope(DEFAULT | {"partial_rotary_factor": 0.25})),
    "falcon_h1": ("FalconH1", {"head_dim": 16} | FALCON_H1 | with_rope(DEFAULT)),
    "gpt2": ("GPT2", {"n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4}),
    "bloom": ("Bloom", {"n_layer": 4, "n_head": 4}),
}


def build(name: str, **changes: Any) -> Any:
    """Return the random model of an entry of `FAMILIES`, with changes of its configuration."""
    kind, options = FAMILIES[name]
    return random_model(getattr(hf, f"{kind}Config")(**BASE | options | changes))
