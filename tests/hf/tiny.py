"""Tiny random models of each family. Tests that import this module are skipped without transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kerple.data.tokenizer import train_tokenizer
from kerple.hf.translation_from_transformers import read_family
from kerple.model import Transformer
from kerple.model.stored_model import build_transformer, copy_weights

hf = pytest.importorskip("transformers")

VOCABULARY = 96
LENGTH = 32
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = SIZES | {"max_position_embeddings": LENGTH}
GROUPED: dict[str, Any] = WIDE | {"intermediate_size": 48, "num_key_value_heads": 2, "num_hidden_layers": 5}
GROUPED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "original_max_position_embeddings": LENGTH // 2}
LLAMA = WIDE | {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
OLMO3 = {"sliding_window": 7, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}}
GEMMA3 = GROUPED | {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 9, "sliding_window_pattern": 3}
CONFIGS = {
    "llama": (hf.LlamaConfig, LLAMA | {"tie_word_embeddings": True, "rope_theta": 1000.0}),
    "mistral": (hf.MistralConfig, GROUPED | {"sliding_window": 9}),
    "qwen2": (hf.Qwen2Config, WIDE | {"intermediate_size": 48, "num_key_value_heads": 2}),
    "qwen3": (hf.Qwen3Config, GROUPED | {"head_dim": 12}),
    "olmo2": (hf.Olmo2Config, GROUPED),
    "olmo3": (hf.Olmo3Config, GROUPED | OLMO3),
    "gemma3_text": (hf.Gemma3TextConfig, GEMMA3 | {"final_logit_softcapping": 3.0}),
    "smollm3": (hf.SmolLM3Config, GROUPED),
    "cohere2": (hf.Cohere2Config, GROUPED | {"sliding_window": 7}),
    "phi3": (hf.Phi3Config, GROUPED | {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "gpt_neox": (hf.GPTNeoXConfig, WIDE | {"intermediate_size": 64, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "gpt2": (hf.GPT2Config, SIZES | {"n_positions": 4 * LENGTH}),
    "bloom": (hf.BloomConfig, SIZES),
}


def configuration(family: str) -> Any:
    """Return the configuration of the tiny model of a family."""
    kind, options = CONFIGS[family]
    return kind(**options)


def random_model(config: Any) -> Any:
    """Return a model with random weights, which are so large that every part of the model changes its logits."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial biases of 0 and gains of 1 would hide a mistake
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def tiny(family: str, **changes: Any) -> Any:
    """Return a tiny random model of a family, with changes of its configuration."""
    config = configuration(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return random_model(config)


def our_network(model: Any) -> Transformer:
    """Return a model of transformers, translated to the `Transformer` of this project."""
    stored = read_family(model.config, model.state_dict())
    network = build_transformer(stored.model).eval()
    account = copy_weights(network, stored)
    assert not account.new
    assert not [name for name in account.unused if name.startswith("positions.")]
    return network


def small(config: type, model: type | None = None, **options: Any) -> Any:
    """Return a random model for a class of configurations; ``model`` is its class if AutoModelForCausalLM has none."""
    torch.manual_seed(0)
    built = config(**SIZES | {"max_position_embeddings": 2 * LENGTH} | options)
    return (model(built) if model else hf.AutoModelForCausalLM.from_config(built)).eval()


def arguments(folder: Path, **options: Any) -> Any:
    """Return arguments of transformers' `Trainer` for a short run on the CPU."""
    return hf.TrainingArguments(str(folder), report_to=[], use_cpu=True, save_strategy="no", **options)


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """Save a tiny model, and a tokenizer of 256 bytes and an end-of-text token, in a folder; return the folder."""
    tiny(family, vocab_size=257, **changes).save_pretrained(folder)
    tokenizer = train_tokenizer(["none"], 257)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
