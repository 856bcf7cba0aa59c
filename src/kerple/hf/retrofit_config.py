"""Configuration of a model with a strategy of this project, and the description of the strategy in it."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from kerple.base.errors import UserError, require
from kerple.positions import StrategyBuilder, strategies

PREFIX = "kerple.positions."
ARCHITECTURE = "RetrofittedForCausalLM"  # class of `kerple.hf.retrofitted_model`


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
    own = {} if strategy is None else {getattr(strategy, "__qualname__", repr(strategy)): strategy}
    named = dict.fromkeys(_named(description))
    for name in own:
        # a class of the user with the name of a built-in strategy does not replace it
        replaceable = [path for path in named if strategies().get(path, strategy) is strategy]
        is_named = any(f".{path}".endswith(f".{name}") for path in replaceable)
        require(is_named, "strategy", name, f"null or {', '.join(named):.200}, which config.json names")
    return _read_strategy(description, own)


def _named(value: Any) -> Iterator[str]:
    """Yield the path of each class in a description."""
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        yield str(value["class_path"]).removeprefix(PREFIX)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _named(inner)


def _read_strategy(
    description: dict[str, Any], own: dict[str, StrategyBuilder]
) -> tuple[StrategyBuilder, dict[str, Any]]:
    """See `read_strategy`; ``own`` has the class of the user by its name."""
    path = str(description["class_path"])
    known = strategies().get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
    build = known or next((kind for name, kind in own.items() if path.endswith(f".{name}")), None)
    if build is None:
        expected = "a strategy of kerple.positions; pass your own class: from_pretrained(folder, strategy=…)"
        raise UserError(f"strategy: got {path!r:.80} in config.json, expected {expected}")
    return build, {str(key): _read(value, own) for key, value in description["init_args"].items()}


def _read(value: Any, own: dict[str, StrategyBuilder]) -> Any:
    """Return the value of an option from JSON; the opposite of `_describe`."""
    if isinstance(value, list):
        return [_read(inner, own) for inner in value]
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        build, options = _read_strategy(value, own)
        return partial(build, **options)
    return {key: _read(inner, own) for key, inner in value.items()} if isinstance(value, dict) else value
