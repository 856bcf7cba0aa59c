"""`from_pretrained`: read a model that `kerple.hf.retrofit` has changed and `save_pretrained` has written."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kerple.base.errors import require
from kerple.hf.layer_strategies import NAME, LayerStrategies
from kerple.hf.model_retrofit import add_strategies, connect, input_device, list_layers
from kerple.hf.modeling import restore_buffers
from kerple.hf.retrofit_config import ARCHITECTURE, KerpleRetrofitConfig, read_strategy, saved_as_retrofit
from kerple.hf.windowed_attention import decoder
from kerple.positions import StrategyBuilder


def from_pretrained(folder: str, strategy: StrategyBuilder | None = None, **options: Any) -> Any:
    """Read a model that `kerple.hf.retrofit` has changed.

    After ``import kerple.hf``, `transformers.AutoModelForCausalLM.from_pretrained` does the same.

    Args:
        folder: Folder that `save_pretrained` has written, or the name of a model on the Hugging Face hub.
        strategy: Your own class, if the strategy is not in `kerple.positions`.
        **options: Options of transformers' `from_pretrained`, such as ``dtype``, ``device_map`` and ``revision``, and
            entries of the original model's configuration, such as ``attention_dropout``.

    Raises:
        UserError: If the folder has no such model, or its strategy is not known.
    """
    config = AutoConfig.from_pretrained(folder, **options)  # for options such as ``revision`` and ``token``
    expected = "kerple_retrofit; read other models by AutoModelForCausalLM.from_pretrained"
    require(isinstance(config, KerpleRetrofitConfig), "model", f"{config.model_type} in {folder}", expected)
    return AutoModelForCausalLM.from_pretrained(folder, strategy=strategy, **options)


class RetrofittedForCausalLM(PreTrainedModel):
    """Reader of retrofitted models for `AutoModelForCausalLM`. The result has the class of the original model."""

    config_class = KerpleRetrofitConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, folder: Any, config: KerpleRetrofitConfig, strategy: StrategyBuilder | None = None, **options: Any
    ) -> Any:
        """Read a model; see the function `from_pretrained`."""
        wanted = options.pop("output_loading_info", False)
        inner, kind = config.get_text_config(), _model_class(config, strategy)
        model, info = kind.from_pretrained(folder, config=inner, output_loading_info=True, **options)
        missing = sorted(info["missing_keys"])
        require(not missing, "model", f"{missing[:1]} missing in the file of weights", "all weights; save it again")
        _finish(model, config, strategy)
        return (model, info) if wanted else model

    @classmethod
    def _from_config(cls, config: KerpleRetrofitConfig, **options: Any) -> Any:
        """Return a model with random weights. On the device ``meta`` it cannot run."""
        model = _model_class(config)._from_config(config.get_text_config(), **options)
        _finish(model, config)
        return model


def _entry(config: KerpleRetrofitConfig) -> dict[str, Any]:
    """Return the checked entry ``kerple_retrofit`` of a configuration."""
    entry: Any = config.model.get("kerple_retrofit")
    valid = isinstance(entry, dict) and isinstance(entry.get("keep_rope"), bool) and "strategy" in entry
    given = f"{entry!r:.80} for kerple_retrofit in config.json"
    require(valid and isinstance(entry.get("layers"), list), "model", given, "strategy, keep_rope and layers")
    return entry | {"layers": list_layers(config.get_text_config(), entry["layers"])}


def _model_class(config: KerpleRetrofitConfig, strategy: StrategyBuilder | None = None) -> Any:
    """Return a subclass of the class of the original model that has the strategies as a submodule."""
    original: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.get_text_config())]
    entry = _entry(config)
    build, options = read_strategy(entry["strategy"], strategy)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        add_strategies(self, entry, build, options)

    kept = [*(original._keep_in_fp32_modules_strict or ()), NAME]
    methods = {"__init__": __init__, "_keep_in_fp32_modules_strict": kept, "__module__": original.__module__}
    return type(original.__name__, (original,), methods)


def _finish(model: Any, config: KerpleRetrofitConfig, strategy: StrategyBuilder | None = None) -> None:
    """Give a new model its original class, compute the buffers that files do not hold, and connect its strategies."""
    model.__class__ = type(model).__mro__[1]
    base = decoder(model)
    entry = _entry(config)
    saved_as_retrofit(model.config, entry)
    dispatched = hasattr(model, "hf_device_map")
    if model.device.type == "meta" and not dispatched:
        return
    strategies = _without_offload(base.kerple, input_device(model)) if dispatched else base.kerple
    del base.kerple
    # transformers creates models without values, so the buffers are computed by another instance
    add_strategies(model, entry, *read_strategy(entry["strategy"], strategy))
    restore_buffers(strategies, base.kerple)
    base.kerple = strategies
    connect(model)


def _without_offload(strategies: LayerStrategies, device: torch.device) -> LayerStrategies:
    """Move strategies to a device, also if they are offloaded: attention uses their parameters outside of `forward`."""
    from accelerate.hooks import remove_hook_from_module  # installed if a model is read with a device_map

    for module in strategies.modules():
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            hook.pre_forward(module)  # reads the parameters
    return remove_hook_from_module(strategies, recurse=True).to(device)


AutoConfig.register(KerpleRetrofitConfig.model_type, KerpleRetrofitConfig, exist_ok=True)
AutoModelForCausalLM.register(KerpleRetrofitConfig, RetrofittedForCausalLM, exist_ok=True)
assert RetrofittedForCausalLM.__name__ == ARCHITECTURE
