"""`HuggingFaceNetwork`: any causal language model of transformers as a network to measure."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.hf.rope import strategy_name
from kerple.hf.windows import limited_attention, local_layers_keep
from kerple.model.loss import target_losses
from kerple.model.network import Embedding, Generation, Limited, Offset, Windows
from kerple.positions.products import precise
from kerple.positions.visibility import EVERYTHING, Visibility


def hugging_face_network(
    model: Any, length: int | None = None, name: str | None = None, bos: int | None = None
) -> "HuggingFaceNetwork":
    """Wrap a model of transformers; the network has `Offset` where the model takes ``position_ids``.

    The arguments and errors are those of `HuggingFaceNetwork`.
    """
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    return (ShiftableHuggingFaceNetwork if takes_positions else HuggingFaceNetwork)(model, length, name, bos)


class HuggingFaceNetwork(nn.Module, Limited, Windows, Generation, Embedding):
    """A `kerple.model.network.Network` that wraps a model of transformers.

    The head is applied in chunks, so that the logits of a long input are never in memory at once. The logits of some
    models are not just the head's product with the last hidden states (a soft cap, a scale). A probe detects them, and
    their logits are computed as a whole.

    Args:
        model: A `transformers.PreTrainedModel` with a language modelling head, in evaluation mode.
        length: Training length in tokens; None for that in its configuration, if it names one.
        name: Name of its positional strategy in results; None for one that its configuration implies.
        bos: Id of the token that is read before every input and seen by every query, or None; lengths do not count it.

    Raises:
        UserError: If a token's logits depend on later tokens.
    """

    takes_positions = False

    def __init__(self, model: Any, length: int | None = None, name: str | None = None, bos: int | None = None) -> None:
        super().__init__()
        self.model, self.bos = model, bos
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        self.training_length = length or config_length(model.config)
        self.learned = learned_positions(model)
        self.name = name or _strategy(model.config.get_text_config(), self.learned)
        self.in_pieces = True
        self._probe()

    @property
    def max_length(self) -> int | None:
        if self.learned is None:
            return None
        rows = self.learned.num_embeddings - getattr(self.learned, "offset", 0)  # OPT's first rows are no positions
        return rows - (self.bos is not None)

    def forward(self, tokens: Tensor, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0) -> Tensor:
        """Logits (B, T, V) of the next token after each token (B, T) int64.

        Raises:
            UserError: If the model has no such positions, or its attention cannot be limited to a window.
        """
        return self._run(self.model, tokens, visibility, offset)

    def losses(
        self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """Losses of the targets of tokens (B, T + 1), (B, T) or (B, last), fp32 or fp64; errors as of `forward`."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        first = 0 if last is None else -last
        targets = targets[:, first:]
        if not self.in_pieces:
            logits = precise(self(inputs, visibility, offset)[:, first:])
            return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        x = self._run(self.model.base_model, inputs, visibility, offset)[:, first:]  # (B, T, D)
        return target_losses(self.head, x.flatten(0, 1), targets.flatten()).unflatten(0, targets.shape)

    @torch.inference_mode()
    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        """Generate ``steps`` tokens greedily after the tokens (1, T) int64, or fewer if the text ends; their ids."""
        forget_length(self.model)
        # cached keys keep the angles of an earlier length, so scaling by length needs all tokens again each time
        whole = any("dynamic" in str(getattr(module, "rope_type", "")) for module in self.model.modules())
        tokens = self._after_bos(tokens)
        mask = torch.ones_like(tokens)  # else tokens that equal the padding token are left out
        options = {"max_new_tokens": steps, "do_sample": False, "use_cache": not whole}
        written = self.model.generate(tokens, attention_mask=mask, **options)
        return written[0, tokens.shape[1] :].tolist()

    def _after_bos(self, tokens: Tensor) -> Tensor:
        return tokens if self.bos is None else F.pad(tokens, (1, 0), value=self.bos)

    def _run(
        self, module: nn.Module, tokens: Tensor, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """Output (B, T, ·) of ``module`` for the tokens (B, T): of the model, or of its base model without the head."""
        if visibility.distances != "true":
            raise UserError(
                f"distances: got {visibility.distances!r}, but the code of {type(self.model).__name__} computes true "
                "distances; test it with --model.position as our own network"
            )
        end = int(torch.as_tensor(offset).max()) + tokens.shape[1]
        if self.max_length is not None and end > self.max_length:
            raise UserError(
                f"position: got {end - 1}, but {type(self.model).__name__} has learned {self.max_length} positions, "
                f"the last is {self.max_length - 1}; read less"
            )
        read = self._after_bos(tokens)
        own: AbstractContextManager[None] = nullcontext()
        ids = rows = torch.arange(read.shape[1], device=tokens.device)[None]
        options = {}
        if isinstance(offset, Tensor):
            ids, own = rows + F.pad(offset, (read.shape[1] - len(offset), 0)), local_layers_keep(self.model, rows)
            options["attention_mask"] = torch.ones_like(read)  # without it, transformers takes a jump for another text
        else:
            ids = rows + offset
        if self.takes_positions:
            options["position_ids"] = ids
        forget_length(self.model)
        if self.bos is not None:
            visibility = visibility.after_bos()
        with own, nullcontext() if visibility.window is None else limited_attention(self.model, visibility):
            return module(input_ids=read, use_cache=False, **options)[0][:, -tokens.shape[1] :]

    @torch.inference_mode()
    def _probe(self) -> None:
        """Check on a few tokens that the model is causal, and set ``in_pieces``: whether logits are the head's product.

        Raises:
            UserError: If the logits of a token depend on later tokens.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.embedding.num_embeddings, (1, 12), generator=generator)
        tokens = tokens.to(self.embedding.weight.device)
        logits = precise(self(tokens))  # (1, T, V)
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % self.embedding.num_embeddings
        scale = float(logits.abs().max())
        rounding = 30 * torch.finfo(self.embedding.weight.dtype).eps * scale
        if not float((precise(self(other)) - logits)[:, :-1].abs().max()) <= rounding:
            raise UserError(
                f"hf: in {type(self.model).__name__} a token's logits depend on later tokens, as in an encoder; "
                "expected a causal language model"
            )
        head = self.head
        base = self.model.base_model  # Llama 4's is the model itself
        self.in_pieces = isinstance(head, nn.Linear) and base is not self.model
        self.in_pieces = self.in_pieces and torch.allclose(
            precise(head(self._run(base, tokens))), logits, rtol=1e-3, atol=1e-3 * scale
        )


class ShiftableHuggingFaceNetwork(HuggingFaceNetwork, Offset):
    """A `HuggingFaceNetwork` whose model takes ``position_ids``."""

    takes_positions = True


def forget_length(model: Any) -> None:
    """Reset RoPE with dynamic scaling.

    It would keep the angles of the longest input so far, and results would depend on earlier inputs.
    """
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")) and hasattr(module, "original_inv_freq"):
            module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq), persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len


def config_length(config: Any) -> int | None:
    """Training length in tokens in a `transformers.PreTrainedConfig`, or None if it does not say."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)


def learned_positions(model: nn.Module) -> nn.Embedding | None:
    """The table of learned positions of a model, found by its name; None if it has none."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (last == "wpe" or "position" in last):
            return module
    return None


def _strategy(config: Any, learned: nn.Embedding | None) -> str:
    """Name of the strategy in results: a class of ours, or the model's type if its configuration names none.

    Args:
        config: Configuration of the text model, a `transformers.PreTrainedConfig`.
        learned: Its table of learned positions, or None.
    """
    if learned is not None:
        return "Learned"
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return "ALiBi"
    return strategy_name(config) or config.model_type
