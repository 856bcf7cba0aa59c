"""RoPE in configurations of transformers: its translation to our options, and its scaling."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal, get_args

from kerple.base.errors import UserError
from kerple.positions.rotary_scaling import Scaling

AnyScaling = Literal["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"]
STRATEGIES = {"none": "RoPE", "pi": "PI", "ntk": "NTK", "dynamic_ntk": "DynamicNTK", "yarn": "YaRN"}
STRATEGIES |= {"llama3": "RoPE (llama3)"}
SCALINGS = {"default": "none", "linear": "pi", "dynamic": "dynamic_ntk"}  # names that differ: transformers' and ours
OPTIONS = {name: name for name in ("factor", "attention_factor", "beta_fast", "beta_slow")}
OPTIONS |= {"high_freq_factor": "beta_fast", "low_freq_factor": "beta_slow"}
OPTIONS |= {"short_factor": "short_factors", "long_factor": "long_factors"}
"""Options of scalings: transformers' names and ours."""


def rope_type(config: Any) -> str | None:
    """transformers' name of a model's scaling of RoPE; ``mixed`` if layers differ, None for a model without RoPE."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    return rope.get("rope_type", "default") if "rope_theta" in rope else "mixed"


def strategy_name(config: Any) -> str | None:
    """Name of a model's RoPE in results, such as PI, or None for a model without RoPE."""
    kind = rope_type(config)
    return None if kind is None else STRATEGIES.get(SCALINGS.get(kind, kind), f"RoPE ({kind})")


def read_rope(rope: Mapping[str, Any], partial: bool, length: int) -> dict[str, Any] | None:
    """Options of `kerple.positions.RoPE` that give the RoPE of a model, or None if our RoPE has no counterpart.

    Args:
        rope: ``rope_parameters`` of a configuration, or of a kind of layers in it.
        partial: Whether the model rotates only the fraction ``partial_rotary_factor`` of the channels.
        length: Largest number of positions. If the configuration has no factor of YaRN or LongRoPE, the factor is the
            ratio of this number to the original one.
    """
    scaling = SCALINGS.get(rope.get("rope_type", "default"), rope.get("rope_type"))
    if scaling not in (*STRATEGIES, *get_args(Scaling)) or rope.get("truncate") is False or "mscale" in rope:
        return None
    fraction = rope.get("partial_rotary_factor", 1.0) if partial or scaling == "proportional" else 1.0
    options = {"base": float(rope["rope_theta"]), "rotary_fraction": float(fraction), "layout": "half"}
    if scaling == "none":
        return options
    if scaling in ("yarn", "longrope") and not rope.get("factor"):
        options["factor"] = length / rope["original_max_position_embeddings"]
    return options | {"scaling": scaling} | {ours: rope[name] for name, ours in OPTIONS.items() if rope.get(name)}


def scaled(
    config: Any, scaling: AnyScaling | None, factor: float | None, length: int, rope_options: Mapping[str, float] = {}
) -> Any:
    """A copy of a model's configuration whose RoPE has a scaling of `kerple.positions.RoPE`.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        scaling: The scaling; ``none`` removes any scaling, and None leaves the configuration unchanged.
        factor: Scaling factor s >= 1, the target length as a multiple of the training length; None with ``none``.
        length: Training length L in tokens.
        rope_options: Further entries of ``rope_parameters``, such as ``beta_fast``.

    Raises:
        UserError: If the model has no RoPE, its RoPE differs between layers, or the factor does not fit the scaling.
    """
    config = deepcopy(config)
    if (scaling in (None, "none")) != (factor is None) or (factor is not None and not factor >= 1):
        expected = "1 or more with a scaling, and none without one"
        raise UserError(f"model.factor: got {factor} with model.scaling {scaling}, expected {expected}")
    if scaling is None:
        return config
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        reason = "has RoPE that differs between layers" if rope else "has no RoPE"
        raise UserError(f"model.scaling: got {scaling}, but {config.model_type} {reason}; leave model.scaling out")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))  # channels of a head that RoPE rotates
    s = factor or 1.0
    original = {"original_max_position_embeddings": length}
    changes: dict[str, dict[str, Any]] = {
        "none": {"rope_type": "default"},
        "pi": {"rope_type": "linear", "factor": s},
        "ntk": {"rope_type": "default", "rope_theta": rope["rope_theta"] * s ** (rotated / (rotated - 2))},
        "dynamic_ntk": {"rope_type": "dynamic", "factor": s},
        "yarn": {"rope_type": "yarn", "factor": s, **original},
        "llama3": {"rope_type": "llama3", "factor": s, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    }
    if scaling == "dynamic_ntk":
        config.max_position_embeddings = length  # transformers scales inputs that are longer
    unscaled = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    config.rope_parameters = unscaled | changes[scaling] | dict(rope_options)
    return config
