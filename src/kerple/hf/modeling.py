"""`KerpleForCausalLM`: our `Transformer` as a model of transformers, loaded by `AutoModelForCausalLM`."""

import sys
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from kerple.base.errors import UserError, require
from kerple.model.cache import Cache
from kerple.positions import Position

REMOTE_PACKAGE = "transformers_modules."  # prefix of the modules into which transformers imports the code of models
CONSTRAINED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # models in memory, see `constrain_after_steps`


class KerpleConfig(PreTrainedConfig):
    """Configuration of a `KerpleForCausalLM`.

    Args:
        network: Options of `kerple.model.stored_model.build_transformer`, including the strategy with its
            options.
        **kwargs: Entries of every configuration of transformers.
    """

    model_type = "kerple"

    def __init__(self, network: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.network = dict(network or {})
        self.vocab_size = self.network.get("vocabulary")
        self.hidden_size = self.network.get("dim")
        self.num_hidden_layers = self.network.get("layers")
        self.num_attention_heads = self.network.get("heads")
        self.num_key_value_heads = self.network.get("kv_heads") or self.num_attention_heads
        self.max_position_embeddings = self.network.get("length")
        kwargs["tie_word_embeddings"] = bool(self.network.get("tied", False))
        super().__init__(**kwargs)


class KerpleCache(DynamicCache):
    """Cache of transformers' `generate` that holds a `kerple.model.cache.Cache`."""

    # If ``all(is_linear)``, `generate` passes all earlier tokens again. DynamicCache has an entry in ``is_linear`` for
    # each of its layers. Here it has no layers, so the list would be empty, and `all` of an empty list is True.
    is_linear = (False,)  # type: ignore[assignment,unused-ignore]
    is_croppable = False

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row ``beam_idx[i]``, for beam search."""
        if self.cache.tokens is not None:
            self.cache.tokens = self.cache.tokens[beam_idx]
        for layer in self.cache.layers:
            for name in ("keys", "values", "state"):
                if (rows := getattr(layer, name)) is not None:
                    setattr(layer, name, rows[beam_idx])


class KerpleForCausalLM(PreTrainedModel, GenerationMixin):
    """Our `Transformer` with the interface of transformers: `generate` with a cache, and a loss for `Trainer`.

    Padding is not masked. For losses and training, the texts of a batch may be padded on the right, because later
    tokens do not change logits. Strategies that are not `Position.prefix_consistent` are an exception: with them,
    padding changes logits. The prompts of a batch must have equal lengths.
    """

    config_class = KerpleConfig
    remote: tuple[type[Position], ...] = ()  # strategies from outside this project, whose code is stored with the model
    base_model_prefix = "network"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # `Trainer` then divides the loss, a mean, by the number of accumulated batches
    _tied_weights_keys = {"network.head.weight": "network.embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # transformers then refuses assisted generation, which removes tokens from the cache

    def __init__(self, config: KerpleConfig) -> None:
        from kerple.model.stored_model import build_transformer  # needs packages of the group [train]

        super().__init__(config)
        self.network = build_transformer(config.network, remote=self.remote)
        self.post_init()
        constrain_after_steps(self, "network")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of a model from a pickle
        constrain_after_steps(self, "network")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and compute the buffers that files do not hold, such as ALiBi's slopes."""
        from kerple.model.stored_model import build_transformer  # needs packages of the group [train]

        wanted = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers would leave random weights
            raise UserError(f"model: the file of weights lacks {missing[0]} ({len(missing)} missing); export it again")
        # transformers creates the model without values; this smaller network computes the same buffers
        small = build_transformer(model.config.network | {"vocabulary": 1, "hidden": 1}, remote=cls.remote)
        restore_buffers(model.network, small)
        return (model, info) if wanted else model

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the network initialises itself."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, except those of strategies, which are always fp32."""
        return self.network.embedding.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.network.head

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        _check_mask(model_kwargs.get("attention_mask"), cached=True)
        if model_kwargs.get("cache") is not None:
            return
        if generation_config.use_cache is not False and self.network.prefix_consistent:
            model_kwargs["cache"] = KerpleCache(self.network.new_cache())
        else:
            generation_config.use_cache = False

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KerpleCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token after each token, and the mean loss of the labels.

        Args:
            input_ids: Tokens (B, T) int64.
            attention_mask: (B, T), 0 for padding on the right. With a cache it must have no 0.
            cache: The cache that an earlier call returned, to which the keys and values of these tokens are added.
            labels: Tokens (B, T) int64, usually ``input_ids``. The loss compares the logits after token i with label
                i + 1. Labels of -100 are ignored.
            use_cache: Whether to make and return a cache if ``cache`` is None. No cache is made in training mode.
                For a strategy that is not ``prefix_consistent``, no cache is made either, because more input would
                change the keys of earlier tokens.
            logits_to_keep: Number of last tokens whose logits are returned, 0 for all; or the indices of these tokens.
            **ignored: Other arguments of transformers. ``position_ids`` are only checked.

        Raises:
            UserError: If a text is padded on the left, if a text is padded at all while a cache is used, or if
                ``position_ids`` are not consecutive numbers that continue the cache.
        """
        expected = "the cache of an earlier output of this model, or none"
        require(cache is None or isinstance(cache, KerpleCache), "cache", f"a {type(cache).__name__}", expected)
        if cache is None and use_cache and not self.training and self.network.prefix_consistent:
            cache = KerpleCache(self.network.new_cache())
        inner = None if cache is None else cache.cache
        _check_mask(attention_mask, cached=inner is not None)
        if (positions := ignored.get("position_ids")) is not None:
            first = 0 if inner is None else inner.length
            if not bool((positions == torch.arange(first, first + input_ids.shape[1], device=positions.device)).all()):
                expected = f"consecutive numbers from {first}"
                raise UserError(f"position_ids: expected {expected}; put each text into a separate row")
        last = logits_to_keep if isinstance(logits_to_keep, int) else None
        logits = self.network(input_ids, cache=inner, last=last or None)  # (B, T or logits_to_keep, V)
        logits = logits[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else logits
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)


def remote_classes(module: str, *strategies: type[Position]) -> tuple[type[KerpleConfig], type[KerpleForCausalLM]]:
    """Return classes of a configuration and a model with strategies whose code is stored with the model.

    Args:
        module: ``__name__`` of the module that defines the classes.
        *strategies: Classes of the strategies.
    """
    for strategy in strategies if module.startswith(REMOTE_PACKAGE) else ():
        # a part of the module's dotted name may begin with a digit, which the parser of options rejects
        name = REMOTE_PACKAGE + strategy.__module__.removeprefix(REMOTE_PACKAGE).replace(".", "_")
        sys.modules[name], strategy.__module__ = sys.modules[strategy.__module__], name
    # transformers makes every configuration class a dataclass, which gets a new ``__init__`` unless it defines one
    names = {"model_type": "kerple_remote", "__module__": module, "__init__": KerpleConfig.__init__}
    config = type("KerpleRemoteConfig", (KerpleConfig,), names)
    attributes = {"config_class": config, "remote": strategies, "__module__": module}
    return config, type("KerpleRemoteForCausalLM", (KerpleForCausalLM,), attributes)


def restore_buffers(module: nn.Module, computed: nn.Module) -> None:
    """Copy the buffers that files do not hold from a module that has computed them.

    Integer buffers that files hold get their dtype back, because transformers casts them to fp32 too.
    """
    stored = module.state_dict()
    for name, value in computed.named_buffers():
        buffer = module.get_buffer(name)
        if name not in stored:
            buffer.copy_(value)
        elif not value.is_floating_point():
            buffer.data = buffer.data.to(value.dtype)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters of a model, as loading in this dtype does. Buffers, such as frequencies, stay in fp32."""
    kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    for name, parameter in model.named_parameters():
        if not kept & {*name.split(".")}:
            parameter.data = parameter.data.to(dtype)


def _check_mask(attention_mask: Tensor | None, cached: bool) -> None:
    """Raise a UserError if a mask hides a token on the left, or with ``cached``, if it hides any token."""
    if attention_mask is None or bool(attention_mask.all()):
        return
    if cached or bool((attention_mask.diff(dim=-1) > 0).any()):
        reason = "got padding on the left, or any padding with a cache (as in generate), which this model cannot mask"
        advice = "generate from prompts of equal length, pad other texts on the right"
        raise UserError(f"attention_mask: {reason}; {advice}")


def constrain_after_steps(model: nn.Module, part: str) -> None:
    """Let every optimiser with parameters of a model call the method ``constrain_`` of its ``part`` after each step."""
    CONSTRAINED[model] = part
    _register_hook()


@lru_cache
def _register_hook() -> None:
    """Register `_constrain_after_step` with torch's optimisers, when the first model is made."""
    register_optimizer_step_post_hook(_constrain_after_step)


def _constrain_after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Call `constrain_` for each model whose parameters an optimiser has updated; torch calls this after every step.

    `constrain_` projects parameters into their ranges. In this call, strategies with random positions also draw new
    positions, so positions change once per step and not once per forward pass.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, part in CONSTRAINED.items():
        if any(id(parameter) in updated for parameter in model.parameters()):
            with torch.no_grad():
                getattr(model, part).constrain_()


AutoConfig.register(KerpleConfig.model_type, KerpleConfig, exist_ok=True)
AutoModelForCausalLM.register(KerpleConfig, KerpleForCausalLM, exist_ok=True)
