"""Scaling of RoPE in transformers' configurations, for inputs longer than those of training."""

from copy import deepcopy
from typing import Any, Literal

from kerple.base.errors import UserError
from kerple.positions.rotary_scaling import Scaling

AnyScaling = Literal["none", Scaling]
STRATEGIES = {"none": "RoPE", "pi": "PI", "ntk": "NTK", "dynamic_ntk": "DynamicNTK", "yarn": "YaRN"}


def scaled(config: Any, scaling: AnyScaling | None, factor: float | None, length: int) -> Any:
    """A copy of a model's configuration whose RoPE is scaled, as `kerple.positions.RoPE` scales ours.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        scaling: ``none`` for RoPE without any scaling; `RoPE` explains ``pi``, ``ntk``, ``dynamic_ntk`` and ``yarn``.
            None leaves the configuration unchanged.
        factor: Length that the scaling should reach, as a multiple s >= 1 of the training length; all scalings but
            ``none`` need it.
        length: Training length L in tokens.

    Raises:
        UserError: If the model has no RoPE, has one that differs between layers, or the factor is missing.
    """
    config = deepcopy(config)
    if scaling is None:
        if factor is not None:
            raise UserError(f"factor: got {factor} without a scaling; add scaling: pi, ntk, dynamic_ntk or yarn")
        return config
    if scaling not in STRATEGIES:
        raise UserError(
            f"scaling: got {scaling!r}, expected one of {', '.join(STRATEGIES)}, or null for the model's own"
        )
    if (scaling == "none") != (factor is None) or (factor is not None and not factor >= 1):
        raise UserError(f"factor: got {factor} with scaling {scaling}, expected a number of 1 or more, none for none")
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        why = "has RoPE that differs between layers" if rope else "has no RoPE"
        raise UserError(f"scaling: got {scaling}, but {config.model_type} {why}; leave scaling out")
    kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(heads * rope.get("partial_rotary_factor", 1.0))
    times = 1.0 if factor is None else float(factor)
    changed: dict[str, Any]
    if scaling == "none":
        changed = {"rope_type": "default"}
    elif scaling == "pi":
        changed = {"rope_type": "linear", "factor": times}
    elif scaling == "ntk":
        changed = {"rope_type": "default", "rope_theta": rope["rope_theta"] * times ** (turned / (turned - 2))}
    elif scaling == "dynamic_ntk":
        changed = {"rope_type": "dynamic", "factor": times}
        config.max_position_embeddings = length  # transformers compares T with it
    else:
        changed = {"rope_type": "yarn", "factor": times, "original_max_position_embeddings": length}
    config.rope_parameters = {**kept, **changed}
    return config
