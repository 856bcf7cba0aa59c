"""Our `Transformer` as a model of transformers. `AutoModelForCausalLM` loads it after `import kerple.hf`."""

import sys
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kerple.base.errors import UserError
from kerple.model.cache import Cache
from kerple.model.stored import build_transformer
from kerple.positions import Position

REMOTE_PACKAGE = "transformers_modules."  # the package into which transformers imports the code of a model
MODELS: WeakSet["KerpleForCausalLM"] = WeakSet()
# name of the cache in `generate` and in outputs, which transformers 5.24 has changed
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class KerpleConfig(PreTrainedConfig):
    """Configuration of our network.

    Args:
        network: Options of `kerple.model.stored.build_transformer`, including the strategy with its options.
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
    """Our cache in the form that `generate` of transformers expects."""

    # `generate` would take a cache without layers of its own classes for a cache without keys
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
    """Our `Transformer` with `generate`, its cache, and a loss for transformers' `Trainer`.

    Padding is not masked. Texts of a batch may be padded on the right, for losses and training. The prompts of a batch
    must have equal lengths.
    """

    config_class = KerpleConfig
    remote: tuple[type[Position], ...] = ()  # strategies whose code is stored with the model
    base_model_prefix = "network"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # `Trainer` must divide the loss, a mean, by the number of accumulated batches
    _tied_weights_keys = {"network.head.weight": "network.embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # transformers then refuses assisted generation, which would remove rows from the cache

    def __init__(self, config: KerpleConfig) -> None:
        super().__init__(config)
        self.network = build_transformer(config.network, remote=self.remote)
        self.post_init()
        MODELS.add(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and compute the buffers that files do not hold, such as ALiBi's slopes."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        initial = build_transformer(model.config.network | {"vocabulary": 1, "hidden": 1}, remote=cls.remote)
        stored = model.network.state_dict()
        for name, value in initial.named_buffers():
            if name not in stored:
                model.network.get_buffer(name).copy_(value)
        return loaded

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the network initialises itself."""

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.network.head

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        _check_mask(model_kwargs.get("attention_mask"), cached=True)
        if model_kwargs.get(CACHE) is not None:
            return
        if generation_config.use_cache is not False and self.network.prefix_consistent:
            model_kwargs[CACHE] = KerpleCache(self.network.new_cache())
        else:
            generation_config.use_cache = False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KerpleCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token after each token, and the mean loss of the labels.

        Args:
            input_ids: (B, T) int64.
            attention_mask: (B, T), 0 for padding on the right; without padding if there is a cache.
            past_key_values: The cache of an earlier call; transformers 5.24 calls it ``cache``.
            labels: (B, T) int64, which this method shifts by one; -100 is ignored.
            use_cache: Whether to return a cache. None is returned for a strategy whose positions depend on the length
                of the input, because the keys in a cache would be out of date.
            logits_to_keep: Number of last tokens whose logits are returned; 0 for all.

        Raises:
            UserError: If tokens are padded on the left, tokens are padded and a cache is used, or ``position_ids`` are
                not those of one text.
        """
        past_key_values = ignored.pop("cache", past_key_values)
        if past_key_values is None and use_cache and not self.training and self.network.prefix_consistent:
            past_key_values = KerpleCache(self.network.new_cache())
        cache = None if past_key_values is None else past_key_values.cache
        _check_mask(attention_mask, cached=cache is not None)
        if (positions := ignored.get("position_ids")) is not None:
            first = 0 if cache is None else cache.length
            if not bool((positions == torch.arange(first, first + input_ids.shape[1], device=positions.device)).all()):
                expected = f"consecutive numbers from {first}"
                raise UserError(f"position_ids: expected {expected}; put each text into a separate row")
        logits = self.network(input_ids, cache=cache, last=logits_to_keep or None)  # (B, T or logits_to_keep, V)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100)
        output: dict[str, Any] = {CACHE: past_key_values}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **output)


def remote_classes(module: str, *strategies: type[Position]) -> tuple[type[KerpleConfig], type[KerpleForCausalLM]]:
    """Make classes of a configuration and a model for a module with strategies whose code is stored with the model."""
    for kind in strategies if module.startswith(REMOTE_PACKAGE) else ():
        # transformers' name of the module has a part that begins with a digit; the parser of options rejects such names
        name = REMOTE_PACKAGE + kind.__module__.removeprefix(REMOTE_PACKAGE).replace(".", "_")
        sys.modules[name], kind.__module__ = sys.modules[kind.__module__], name
    # without __init__ in its namespace, transformers would turn the configuration into a dataclass
    names = {"model_type": "kerple_remote", "__module__": module, "__init__": KerpleConfig.__init__}
    config = type("KerpleRemoteConfig", (KerpleConfig,), names)
    attributes = {"config_class": config, "remote": strategies, "__module__": module}
    return config, type("KerpleRemoteForCausalLM", (KerpleForCausalLM,), attributes)


def _check_mask(attention_mask: Tensor | None, cached: bool) -> None:
    """Raise a UserError if a mask hides tokens on the left, or any tokens if they are prompts or cached."""
    if attention_mask is None or bool(attention_mask.all()):
        return
    if cached or bool((attention_mask.diff(dim=-1) > 0).any()):
        reason = "got padding on the left or of prompts, which this model cannot mask"
        raise UserError(f"attention_mask: {reason}; use prompts of equal length, and pad other texts on the right")


def constrain_after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook of every optimiser: after a step, project the parameters of our models into their ranges.

    Strategies with random positions or shifts draw new ones, once for each step and not for each forward pass.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in MODELS:
        if any(id(parameter) in updated for parameter in model.parameters()):
            with torch.no_grad():
                model.network.constrain_()


def register() -> None:
    """Register the model with transformers' Auto classes, and its constraints with torch's optimisers.

    It must be called once.
    """
    register_optimizer_step_post_hook(constrain_after_step)
    AutoConfig.register(KerpleConfig.model_type, KerpleConfig, exist_ok=True)
    AutoModelForCausalLM.register(KerpleConfig, KerpleForCausalLM, exist_ok=True)
