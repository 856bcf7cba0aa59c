"""The largest number of positions of a model of transformers, from its configuration, its tables and trial inputs."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kerple.base.errors import require
from kerple.hf.windowed_attention import decoder
from kerple.model import Transformer

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Entries of configurations that state the largest number of positions."""


def leaves_out_positions(model: Any) -> bool:
    """Return whether `kerple.hf.retrofit` has replaced the positional encoding of a model."""
    strategies = getattr(decoder(model), "kerple", None)
    return strategies is not None and not strategies.keep_rope


def takes_positions(model: Any) -> bool:
    """Return whether the logits of a model depend on the argument ``position_ids``."""
    takes = "position_ids" in inspect.signature(model.base_model.forward).parameters
    return takes and not getattr(model.config, "alibi", False)  # Falcon takes and ignores them


def config_length(config: Any) -> int | None:
    """Return the largest number of positions in a `PreTrainedConfig`, or None if no entry of `LENGTHS` states it."""
    text = config.get_text_config()
    return next((length for name in LENGTHS if (length := getattr(text, name, None))), None)


def known_length(config: Any, given: int | None, option: str, fixed: bool) -> int | None:
    """Return the training length of a model in tokens: the given one, or that of `config_length`.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        given: Training length that the user gives; None for that of the configuration.
        option: Name of the user's option, for messages.
        fixed: Whether only the length in the configuration is accepted, as for an exported model.

    Raises:
        UserError: If the given length is below 1, or differs from the accepted one.
    """
    own = config_length(config)
    require(given is None or given >= 1, option, given, "1 token or more, or null")
    require(not fixed or given in (None, own), option, given, f"{own}, that of the exported model, or null")
    return own if given is None else given


def longest_input(model: Any) -> int | None:
    """Return the largest number of tokens that a model can read; None if there is no limit.

    The limit is the size of a table of learned positions. Tables of other kinds, such as sinusoids or biases, are found
    by a test: the model has the last position of the length in its configuration, but not the next one.
    """
    if (table := learned_positions(model)) is not None and not leaves_out_positions(model):
        return table.num_embeddings - getattr(table, "offset", 0)  # OPT reserves the first rows
    length = config_length(model.config)
    return length if length and _has_position(model, length - 1) and not _has_position(model, length) else None


@torch.inference_mode()
def _has_position(model: Any, position: int) -> bool:
    """Return whether a model accepts a position.

    The input is one token at this position, and then a text that ends there, because some tables grow with the text. If
    the model takes no positions, the text has no values (on the device ``meta``), because only shapes matter. On a GPU,
    a position outside of a table would make the device unusable, so the answer is always true.
    """
    text = torch.zeros(1, position + 1, dtype=torch.int64)
    if not takes_positions(model):
        state = {name: x.to("meta") for name, x in (*model.named_parameters(), *model.named_buffers())}
        return _runs(functional_call, model, state, (text.to("meta"),), {"use_cache": False})
    single = {"position_ids": torch.tensor([[position]]), "use_cache": False}
    return model.device.type != "cpu" or _runs(model, text[:, :1], **single) or _runs_first_layer(model, text)


def _runs_first_layer(model: Any, tokens: Tensor) -> bool:
    """Return whether a model reads tokens without an error until the end of its first layer."""
    reached = []

    def stop(*_: Any) -> None:
        reached.append(True)
        raise StopIteration

    hooks = [layer.register_forward_hook(stop) for layer in [*decoder_layers(model)][:1]]
    runs = _runs(model, tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return runs or bool(reached)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a model: the first list of as many modules as it has layers, or no modules."""
    if isinstance(network := getattr(model, "network", None), Transformer):
        return network.blocks
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(lists, nn.ModuleList())


def _runs(function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    try:
        function(*args, **options)
    except Exception:  # models raise errors of many classes
        return False
    return True


def learned_positions(model: Any) -> nn.Embedding | None:
    """Return the table of learned positions of a model: an embedding named ``wpe``, or with ``position`` in its name.

    None if there is no such embedding. Tables for images or sound in a multimodal model are not returned.
    """
    modules = model.get_decoder().named_modules()  # the language model of a multimodal model
    tables = ((name.rpartition(".")[2], m) for name, m in modules if isinstance(m, nn.Embedding))
    return next((table for name, table in tables if name == "wpe" or "position" in name), None)
