"""Configuration of a model with a strategy of this project, and the description of the strategy in it."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from kerple.base.errors import require
from kerple.hf.rope import layer_rope
from kerple.hf.windowed_attention import layer_kinds
from kerple.positions import StrategyBuilder, strategies

PREFIX = "kerple.positions."
ARCHITECTURE = "RetrofittedForCausalLM"  # class of `kerple.hf.retrofitted_model`

OF_LOADING = {"dtype", "torch_dtype", "name_or_path"}
"""Entries of every configuration that transformers' `from_pretrained` reads and does not only copy."""


class KerpleRetrofitConfig(PreTrainedConfig):
    """Content of config.json of a model that `kerple.hf.retrofit` has changed.

    The ``model_type`` is not that of the original model, so that no program reads the weights without the strategy.

    Args:
        model: Configuration of the original model, with the additional entry ``kerple_retrofit``: the ``strategy``,
            ``keep_rope`` and ``layers``.
        **kwargs: Entries of every configuration of transformers.
    """

    model_type = "kerple_retrofit"

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.model = dict(model or {})
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration from its file. Entries of the original model in ``kwargs`` replace those of the file.

        Raises:
            UserError: If ``rope_parameters`` are given, but the strategies have replaced RoPE in all layers.
        """
        inner = cls(**config_dict).get_text_config()
        changes = {name: kwargs.pop(name) for name in [*kwargs] if hasattr(inner, name) and name not in OF_LOADING}
        if (rope := changes.get("rope_parameters")) is not None:
            used = any(layer_rope(inner, i, kind) for i, kind in enumerate(layer_kinds(inner)))
            expected = "none, because retrofit has replaced RoPE in all layers; leave them out"
            require(used, "rope_parameters", rope, expected)
        names = inner.attribute_map  # such as n_positions for max_position_embeddings
        model = config_dict["model"] | {names.get(name, name): value for name, value in changes.items()}
        return super().from_dict(config_dict | {"model": model}, **kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """Return the configuration of the original model, with the entry ``kerple_retrofit``.

        Raises:
            UserError: If it is missing or not known to transformers.
        """
        entries = dict(self.model)
        kind = entries.pop("model_type", None)
        known = isinstance(kind, str) and kind in CONFIG_MAPPING
        require(known, "model", f"model_type {kind!r} in config.json", "a family of transformers")
        return AutoConfig.for_model(kind, **entries)


def saved_as_retrofit(config: PreTrainedConfig, entry: dict[str, Any]) -> None:
    """Add the entry ``kerple_retrofit`` to a model's configuration, and let it be saved as `KerpleRetrofitConfig`."""
    original = type(config)

    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        inner = json.loads(self.to_json_string(use_diff))
        KerpleRetrofitConfig(inner, architectures=[ARCHITECTURE], dtype=inner.get("dtype")).to_json_file(json_file_path)

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return _copy_of_retrofit, (original, entry), self.__dict__

    methods: dict[str, Any] = {"to_json_file": to_json_file, "__reduce__": __reduce__}
    methods |= {"__init__": original.__init__, "__module__": original.__module__}
    config.__class__ = type(original.__name__, (original,), methods)
    config.kerple_retrofit = entry


def _copy_of_retrofit(original: type[PreTrainedConfig], entry: dict[str, Any]) -> PreTrainedConfig:
    """Return an empty configuration for `pickle`, which finds classes by their names."""
    config = original.__new__(original)
    saved_as_retrofit(config, entry)
    return config


def describe_strategy(strategy: str | StrategyBuilder, options: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy and its options as JSON: the path of the class, and its options as ``init_args``.

    Raises:
        UserError: If an option cannot be written as JSON.
    """
    if isinstance(strategy, partial):
        return describe_strategy(strategy.func, strategy.keywords | options)
    name = strategy if isinstance(strategy, str) else getattr(strategy, "__qualname__", type(strategy).__name__)
    ours = isinstance(strategy, str) or strategies().get(name) is strategy
    path = f"{PREFIX}{name}" if ours else f"{getattr(strategy, '__module__', None)}.{name}"
    return {"class_path": path, "init_args": {key: _describe(key, value) for key, value in options.items()}}


def _describe(option: str, value: Any) -> Any:
    """Return the value of an option as JSON. Functions that build strategies become descriptions."""
    if isinstance(value, dict):
        return {str(key): _describe(option, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(option, inner) for inner in value]
    if callable(value):
        return describe_strategy(value, {})
    expected = "a number, a text, a strategy, or a list or dictionary of them"
    require(value is None or isinstance(value, bool | int | float | str), "options", f"{option}={value}", expected)
    return value


def read_strategy(description: Any, strategy: StrategyBuilder | None = None) -> tuple[StrategyBuilder, dict[str, Any]]:
    """Return the function that builds a described strategy, and its options.

    Args:
        description: A result of `describe_strategy`, read from a file.
        strategy: A class of the user, used for each description of a class with its name that is not in
            `kerple.positions`, also inside the options of another strategy.

    Raises:
        UserError: If the description has another form, it names a class that is neither in `kerple.positions` nor
            ``strategy``, or it does not name ``strategy``.
    """
    valid = isinstance(description, dict) and isinstance(description.get("init_args"), dict)
    valid = valid and "class_path" in description
    require(valid, "model", f"{description!r:.60} for kerple_retrofit in config.json", "a class_path and init_args")
    known: dict[str, StrategyBuilder] = {f"{PREFIX}{name}": kind for name, kind in strategies().items()}
    if strategy is not None:
        given, paths = getattr(strategy, "__qualname__", repr(strategy)), dict.fromkeys(_named(description))
        # a class of the user with the name of a built-in strategy does not replace it
        own = [path for path in paths if path.endswith(f".{given}") and known.get(path, strategy) is strategy]
        names = ", ".join(path.removeprefix(PREFIX) for path in paths)
        require(bool(own), "strategy", given, f"null or {names:.200}, which config.json names")
        known |= dict.fromkeys(own, strategy)
    return _read_strategy(description, known)


def _named(value: Any) -> Iterator[str]:
    """Yield the path of each class in a description."""
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        yield str(value["class_path"])
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _named(inner)


def _read_strategy(
    description: dict[str, Any], known: Mapping[str, StrategyBuilder]
) -> tuple[StrategyBuilder, dict[str, Any]]:
    """See `read_strategy`; ``known`` has the function that builds a strategy by its path."""
    path = str(description["class_path"])
    expected = "a strategy of kerple.positions; pass your own class: from_pretrained(folder, strategy=…)"
    require(path in known, "strategy", f"{path!r:.80} in config.json", expected)
    return known[path], {str(key): _read(value, known) for key, value in description["init_args"].items()}


def _read(value: Any, known: Mapping[str, StrategyBuilder]) -> Any:
    """Return the value of an option from JSON; the opposite of `_describe`."""
    if isinstance(value, list):
        return [_read(inner, known) for inner in value]
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        build, options = _read_strategy(value, known)
        return partial(build, **options)
    return {key: _read(inner, known) for key, inner in value.items()} if isinstance(value, dict) else value
