"""Configuration of a model with a strategy of this project, and the description of the strategy in it."""

import json
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
        strategy: A class of the user, used instead of a class that is not in `kerple.positions`.

    Raises:
        UserError: If the description has another form, its strategy is not in `kerple.positions` and ``strategy`` is
            None, or ``strategy`` is another one than it names.
    """
    valid = isinstance(description, dict) and isinstance(description.get("init_args"), dict)
    valid = valid and "class_path" in description
    require(valid, "model", f"{description!r:.60} for kerple_retrofit in config.json", "a class_path and init_args")
    path = description["class_path"]
    name = str(path).removeprefix(PREFIX)
    if path == f"{PREFIX}{name}" and name in strategies():
        known = strategies()[name]
        given = getattr(strategy, "__name__", strategy)
        require(strategy in (None, known), "strategy", given, f"null or {name}, which config.json names")
        strategy = known
    if strategy is None:
        own = "a strategy of kerple.positions; pass your own class: from_pretrained(folder, strategy=…)"
        raise UserError(f"strategy: got {path!r:.80} in config.json, expected {own}")
    return strategy, {str(key): _read(value) for key, value in description["init_args"].items()}


def _read(value: Any) -> Any:
    """Return the value of an option from JSON; the opposite of `_describe`."""
    if isinstance(value, list):
        return [_read(inner) for inner in value]
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        strategy, options = read_strategy(value)
        return partial(strategy, **options)
    return {key: _read(inner) for key, inner in value.items()} if isinstance(value, dict) else value
