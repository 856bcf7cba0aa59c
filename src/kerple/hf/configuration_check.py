"""Check of the values that this project reads from a model's configuration, by their names in config.json."""

import math
from typing import Any

from kerple.base.errors import require
from kerple.config.options import listed

COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "max_position_embeddings", "n_positions", "max_seq_len", "sliding_window"),
    *("attention_chunk_size", "original_max_position_embeddings"),
)
"""Entries that are whole numbers, or lists with a number for each layer."""
LARGEST = 2**40  # larger than every count, and small enough for products of counts
SIGNED = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
POSITIVE = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
)
ROPE: dict[str, tuple[float, float]] = dict.fromkeys(SIGNED, (-math.inf, math.inf))
ROPE |= dict.fromkeys(POSITIVE, (0, math.inf)) | {"rope_theta": (1, math.inf), "partial_rotary_factor": (0, 1.001)}
"""Entries of ``rope_parameters`` that are numbers or lists of numbers: their bounds, which are excluded."""


def check_configuration(config: Any) -> None:
    """Check the sizes, the kinds of layers and the parameters of RoPE in a `transformers.PreTrainedConfig`.

    Entries that are missing or null are accepted.

    Raises:
        UserError: If an entry has another type or is out of range, or ``layer_types`` does not have an entry for each
            layer.
    """
    for name in (config.attribute_map.get(name, name) for name in COUNTS):
        # transformers raises an error if an entry that differs between layers, as in Gemma 4, is read for all layers
        parts = config.per_layer_config if name in (config.per_layer_attributes or ()) else [config]
        for count in (count for part in parts for count in listed(getattr(part, name, None))):
            unused = name == "sliding_window" and not getattr(config, "use_sliding_window", True)
            lowest = 0 if unused else 1  # transformers sets a window that Qwen2-MoE does not use to 0
            valid = type(count) is int and lowest <= count <= LARGEST
            _check(valid, name, count, "a whole number of 1 or more")
    kinds, layers = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", None)
    expected = f"an entry for each of {layers} layers"
    _check(kinds is None or len(kinds) == layers, "layer_types", kinds, expected)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        for name, (low, high) in ROPE.items():
            for number in listed(rope.get(name)):
                valid = type(number) in (int, float) and low < number < high
                expected = f"a number between {low} and {high:.0f}"
                _check(valid, f"rope_parameters.{name}", number, expected)


def _check(valid: bool, name: str, value: Any, expected: str) -> None:
    require(valid, "model", f"{value!r:.60} for {name} in config.json", f"{expected}; correct the file")
