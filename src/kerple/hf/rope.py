"""RoPE in configurations of transformers: names in results, translation to options of this project, and scaling."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, get_args

import torch

from kerple.base.errors import UserError, require
from kerple.hf.windowed_attention import layer_kinds
from kerple.positions import Position, RoPE, Shape
from kerple.positions.rotary_scaling import AnyScaling, Scaling
from kerple.positions.wrapper import Wrapper, rotate_alike

STRATEGIES = {"none": "RoPE", "pi": "PI", "ntk": "NTK", "dynamic_ntk": "DynamicNTK", "yarn": "YaRN"}
STRATEGIES |= {"llama3": "RoPE (llama3)"}
"""Names of scalings in results."""
SCALINGS = {"default": "none", "linear": "pi", "dynamic": "dynamic_ntk"}
"""Scalings whose name in transformers (the key) differs from ours."""
OPTIONS = {name: name for name in ("factor", "attention_factor", "beta_fast", "beta_slow")}
OPTIONS |= {"high_freq_factor": "beta_fast", "low_freq_factor": "beta_slow"}
OPTIONS |= {"short_factor": "short_factors", "long_factor": "long_factors"}
LENGTH = "original_max_position_embeddings"
OPTIONS |= {LENGTH: "original_length"}
"""Options of scalings: from the name in transformers to the name in `kerple.positions.RoPE`."""
COMPOSED = {*OPTIONS, "rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", "finetuned"}
"""Entries of ``rope_parameters`` whose effect is in the frequencies and the attention factor of transformers."""
COMBINED = ("linear", "dynamic", "yarn", "llama3", "longrope")
"""Scalings of transformers with which another one can be combined."""

NO_ROPE_IN_FULL_LAYERS = {"cohere2", "cohere2_moe", "afmoe", "flint"}
"""Families whose layers with full attention (without window or chunks) have no positional encoding."""
NO_ROPE_WITH_WINDOWS = {"exaone4", "exaone_moe"}
"""Families whose layers with full attention have no positional encoding if other layers have a window."""


def layer_rope(config: Any, i: int, kind: str) -> Mapping[str, Any]:
    """Return the ``rope_parameters`` of layer ``i``; empty if the layer has no positional encoding of transformers.

    Args:
        config: Configuration of the text model, a `transformers.PreTrainedConfig`.
        i: Index of the layer.
        kind: Kind of the layer, see `kerple.hf.windowed_attention.layer_kinds`.
    """
    retrofit = getattr(config, "kerple_retrofit", None)
    if retrofit and i in retrofit["layers"] and not retrofit["keep_rope"]:
        return {}
    pattern = getattr(config, "no_rope_layers", None)  # despite the name, 1 is a layer with RoPE
    windows = getattr(config, "sliding_window", None) is not None
    families = NO_ROPE_IN_FULL_LAYERS | (NO_ROPE_WITH_WINDOWS if windows else set())
    has_rope = pattern[i] if pattern else kind != "full_attention" or config.model_type not in families
    has_rope = has_rope and not has_alibi(config) and getattr(config, "position_embedding_type", "rope") == "rope"
    has_rope = has_rope and getattr(config, "use_mem_rope", True)  # false for Zamba2 without RoPE
    ropes = getattr(config, "rope_parameters", None) or {}
    # transformers reads the entries of the kind, also if there are entries for all layers
    return (ropes.get(kind) or (ropes if "rope_theta" in ropes else {})) if has_rope else {}


def has_alibi(config: Any) -> bool:
    """Return whether the configuration of a text model states that its attention adds the biases of ALiBi."""
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


def strategy_name(config: Any, learned: bool) -> str:
    """Return the name of a model's strategy in results, such as ``Learned``, ``ALiBi`` or ``YaRN``.

    It is ``RoPE (mixed)`` if the configuration has different ``rope_parameters`` for different kinds of layers, and
    ``model_type`` if the strategy is not known. For a model that `kerple.hf.retrofit` has changed, it is the class of
    the strategy.

    Args:
        config: Configuration of the text model, a `transformers.PreTrainedConfig`.
        learned: Whether the model has a table of learned positions.
    """
    if strategy := retrofit_strategy(config):
        return strategy
    if learned:
        return "Learned"
    if has_alibi(config):
        return "ALiBi"
    if getattr(config, "position_embedding_type", None) == "nope":  # granitemoehybrid
        return "NoPE"
    if not (rope := getattr(config, "rope_parameters", None)):
        return config.model_type
    mixed = any(isinstance(value, Mapping) for value in rope.values())
    kind = "mixed" if mixed else rope.get("rope_type", "default")
    kind = "ntk" if rope.get("alpha") and kind == "dynamic" else kind  # HunYuan changes θ once, for all lengths
    return STRATEGIES.get(SCALINGS.get(kind, kind), f"RoPE ({kind})")


def retrofit_strategy(config: Any) -> str:
    """Return the class of the strategy that `kerple.hf.retrofit` has put into a model; empty for other models."""
    retrofit = getattr(config, "kerple_retrofit", None)
    return retrofit["strategy"]["class_path"].rpartition(".")[2] if retrofit else ""


def read_rope(rope: Mapping[str, Any], partial: bool, length: int) -> dict[str, Any] | None:
    """Return the options of `kerple.positions.RoPE` that give the RoPE of a model; None if no options do.

    Args:
        rope: ``rope_parameters`` of a configuration, or of one kind of its layers.
        partial: Whether the model rotates only the fraction ``partial_rotary_factor`` of the channels.
        length: Largest number of positions in the configuration. It is the training length of dynamic scaling. If YaRN
            or LongRoPE have no factor, the factor is its ratio to ``original_max_position_embeddings``.
    """
    scaling = SCALINGS.get(rope.get("rope_type", "default"), rope.get("rope_type"))
    if scaling not in (*STRATEGIES, *get_args(Scaling)) or rope.get("truncate") is False or "mscale" in rope:
        return None
    fraction = rope.get("partial_rotary_factor", 1.0) if partial or scaling == "proportional" else 1.0
    options = {"base": float(rope["rope_theta"]), "rotary_fraction": float(fraction), "layout": "half"}
    if scaling == "none":
        return options
    if scaling in ("yarn", "longrope") and not rope.get("factor"):
        options["factor"] = length / (rope.get("original_max_position_embeddings") or length)
    unused = set() if scaling in ("yarn", "longrope") else {"attention_factor"}  # as in transformers
    used = {name: ours for name, ours in OPTIONS.items() if rope.get(name) and name not in unused}
    options |= {"scaling": scaling} | {ours: rope[name] for name, ours in used.items()}
    fast: float = rope.get("high_freq_factor" if scaling == "llama3" else "beta_fast") or 32.0
    slow: float = rope.get("low_freq_factor" if scaling == "llama3" else "beta_slow") or 1.0
    if fast < slow and scaling == "llama3":
        options["beta_fast"] = slow  # the published formula has one step, at low_freq_factor
    options |= {"original_length": length} if scaling == "dynamic_ntk" else {}
    return None if fast < slow and scaling == "yarn" else options


def require_own_rope(config: Any, i: int, position: Position, shape: Shape) -> None:
    """Check that a strategy that is only for tests, such as `SelfExtend`, wraps the RoPE of a layer.

    Nothing is checked if the layer has no RoPE, or one that `kerple.positions.RoPE` cannot have.

    Args:
        config: Configuration of the text model, a `transformers.PreTrainedConfig`.
        i: Index of the layer.
        position: The strategy of the layer.
        shape: Sizes of the model.

    Raises:
        UserError: If the two rotate differently, for example because RoPE has another base.
    """
    if not isinstance(position, Wrapper) or not position.test_only:
        return
    rope = layer_rope(config, i, layer_kinds(config)[i])
    if not rope or (options := read_rope(rope, True, shape.length)) is None:
        return
    same = rotate_alike(position.position, RoPE(shape, **options), shape)
    given = f"{type(position).__name__} of another RoPE than that of layer {i}"
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    require(same, "strategy", given, f"the same RoPE: position=partial(RoPE, {listed})")


def scaled(
    config: Any, scaling: AnyScaling | None, factor: float | None, length: int, rope_options: Mapping[str, float] = {}
) -> Any:
    """Return a copy of a model's configuration with a scaling of RoPE.

    The scaling is applied to the frequencies with which the model reads ``length`` tokens. If the model has a scaling,
    the result has the type ``longrope``, which divides each frequency by a number.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        scaling: Scaling by its name in `kerple.positions.RoPE`. ``none`` removes the model's own scaling, and None
            keeps it.
        factor: Scaling factor s >= 1, the target length as a multiple of the training length. None if ``scaling`` is
            ``none`` or None.
        length: Training length in tokens, which the model reads with its own scaling.
        rope_options: Further entries of ``rope_parameters``, such as ``beta_fast``.

    Raises:
        UserError: If the model has no RoPE, its RoPE differs between layers, its family does not support the scaling,
            or the scaling cannot be combined with the model's own. Also if the factor is below 1, missing although
            there is a scaling, or given without one.
    """
    config = deepcopy(config)
    valid = factor is None if scaling in (None, "none") else factor is not None and factor >= 1
    expected = "1 or more with a scaling, and null without one"
    require(valid, "factor", f"{factor} with the scaling {scaling}", expected)
    if scaling is None:
        return config
    rope = getattr(config, "rope_parameters", None) or {}
    own = rope.get("rope_type", "default")
    if scaling == "none" or (own == "dynamic" and length <= config.max_position_embeddings):
        own = "default"  # removed, or without effect on ``length`` tokens
    others = sorted(rope.keys() - COMPOSED)
    # families such as Falcon fill ``rope_parameters`` also for models without RoPE
    used = bool(rope) and any(layer_rope(config, i, kind) for i, kind in enumerate(layer_kinds(config)))
    combined = own in COMBINED and scaling != "dynamic_ntk"
    obstacles = {
        "has no RoPE": not used,
        "has RoPE that differs between layers": "rope_theta" not in rope,
        "also scales queries by their positions": "llama_4_scaling_beta" in rope,
        f"also has the rope_parameters {', '.join(others)}": bool(others),
        f"has the scaling {own}, with which {scaling} cannot be combined": own != "default" and not combined,
        "accepts only none and ntk": config.model_type == "phi3"
        and own == "default"
        and scaling not in ("none", "ntk"),
    }
    if reason := next((reason for reason, applies in obstacles.items() if applies), None):
        given = f"{config.model_type}, which {reason}"
        raise UserError(f"model: got {given}, expected RoPE that {scaling} can scale; or leave out the scaling")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))  # channels of a head that RoPE rotates
    expected = f"pi or yarn, because {scaling} needs 4 or more rotated dimensions per head"
    require(rotated > 2 or scaling not in ("ntk", "dynamic_ntk"), "scaling", scaling, expected)
    s = factor or 1.0
    original = {"original_max_position_embeddings": length}
    changes: dict[str, dict[str, Any]] = {
        "none": {"rope_type": "default"},
        "pi": {"rope_type": "linear", "factor": s},
        # other scalings accept 2 rotated channels, and do not use this entry
        "ntk": {"rope_type": "default", "rope_theta": rope["rope_theta"] * s ** (rotated / max(rotated - 2, 1))},
        "dynamic_ntk": {"rope_type": "dynamic", "factor": s},
        "yarn": {"rope_type": "yarn", "factor": s, **original},
        "llama3": {"rope_type": "llama3", "factor": s, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    }
    if scaling == "dynamic_ntk":
        config.max_position_embeddings = length  # transformers scales RoPE only for inputs above this
    unscaled = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    entries = changes[scaling] | dict(rope_options)
    if own != "default":
        entries = _composed(config, scaling, s, length, rope_options)
    config.rope_parameters = unscaled | entries
    if LENGTH in entries and hasattr(config, LENGTH):
        config.original_max_position_embeddings = entries[LENGTH]  # transformers prefers it to ``rope_parameters``
    return config


def _composed(config: Any, scaling: Any, factor: float, length: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``rope_parameters`` that apply a scaling to the frequencies of a model's own scaling.

    The arguments are those of `scaled`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # an optional package

    kind, theta = config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]
    # the lengths at which LongRoPE uses its first and its second list; other scalings have one list
    original = config.rope_parameters[LENGTH] if kind == "longrope" else length
    lengths = (original, original + 1) if kind == "longrope" else (length, length)
    found = [ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=n) for n in lengths]
    rotated = 2 * len(found[0][0])
    shape, ours = Shape(rotated, 1, length), {OPTIONS[name]: value for name, value in options.items()}
    rope = RoPE(shape, theta, scaling=scaling, factor=factor, **ours)
    unscaled = theta ** (-torch.arange(0, rotated, 2).double() / rotated)
    short, long = ((unscaled / rope.frequencies.rescaled(f.double())).tolist() for f, _ in found)
    attention_factor = found[0][1] * rope.attention_factor
    entries = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor}
    return entries | {LENGTH: original, "attention_factor": attention_factor}
