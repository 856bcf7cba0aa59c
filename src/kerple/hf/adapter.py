"""`HuggingFaceNetwork`: a causal language model of transformers as a network to measure."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.base.errors import UserError, require
from kerple.base.temporary_value import temporary_value
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.position_limit import config_length, learned_positions, longest_input, takes_positions
from kerple.hf.rope import strategy_name
from kerple.hf.windowed_attention import decoder, limited_attention, local_layer_positions
from kerple.model.loss import logit_losses, target_losses
from kerple.model.network import HasEmbedding, HasLengthLimit, SupportsGeneration, SupportsOffset, SupportsWindows
from kerple.positions.fp32_matmul import precise
from kerple.positions.visibility import EVERYTHING, Visibility

ADVICE = "use another model"


def hugging_face_network(
    model: Any, length: int | None = None, name: str | None = None, bos: int | None = None
) -> "HuggingFaceNetwork":
    """Wrap a model of transformers. The result has the base class `SupportsOffset` if the model takes ``position_ids``.

    The arguments and errors are those of `HuggingFaceNetwork`.
    """
    kind = ShiftableHuggingFaceNetwork if takes_positions(model) else HuggingFaceNetwork
    return kind(model, length, name, bos)


class HuggingFaceNetwork(nn.Module, HasLengthLimit, SupportsWindows, SupportsGeneration, HasEmbedding):
    """A `kerple.model.network.Network` that wraps a model of transformers.

    Losses are computed from the hidden states in chunks, so that the logits of a long input are never in memory at
    once. The model's own code computes the logits of a chunk, so they include the bias of its head, a soft cap or a
    scale. The constructor compares losses on 12 tokens with those of the model's logits. If they differ, or the
    model has no separate base model, losses are computed from the logits of the whole input.

    Args:
        model: A `transformers.PreTrainedModel` with a language modelling head, in evaluation mode.
        length: Training length in tokens; None for the length in the model's configuration, if it has one.
        name: Name of the positional strategy in results; None to derive it from the configuration.
        bos: Id of a token that is added before every input; None for no such token. Lengths in tokens do not count
            this token. A window of `Visibility` does not hide it from a query, but the model's own window may.

    Raises:
        UserError: If a token's logits depend on later tokens.
    """

    def __init__(self, model: Any, length: int | None = None, name: str | None = None, bos: int | None = None) -> None:
        super().__init__()
        self.model, self.bos = model, bos
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        self.training_length = length or config_length(model.config)
        self.longest_input, self.window_is_checked = longest_input(model), False
        self.name = name or strategy_name(model.config.get_text_config(), learned_positions(model) is not None)
        self._check_forward_pass()

    @property
    def max_length(self) -> int | None:
        return None if self.longest_input is None else self.longest_input - (self.bos is not None)

    def forward(self, tokens: Tensor, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0) -> Tensor:
        """Return logits (B, T, V) of the next token after each token (B, T) int64, for a vocabulary of V tokens.

        Raises:
            UserError: If the model has no such position or raises an error, the attention of the model cannot be
                limited to the window of ``visibility``, or ``visibility.distances`` is not the string ``"true"``.
        """
        return self._run(self.model, tokens, visibility, offset)

    def losses(
        self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """Return the losses of the targets, see `kerple.model.network.SupportsOffset`. Errors are as in `forward`."""
        first = 0 if last is None else -last
        inputs, targets = tokens[:, :-1], tokens[:, 1:][:, first:]
        if not self.chunked_logits:
            logits = precise(self(inputs, visibility, offset)[:, first:])
            return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        x = self._run(base_model(self.model), inputs, visibility, offset)[:, first:]  # (B, T, D)
        losses = target_losses(self.head, x.flatten(0, 1), targets.flatten(), self._row_losses)
        return losses.unflatten(0, targets.shape)

    def _row_losses(self, x: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        """Return the losses (N,) of targets (N,) from hidden states (N, D) and the code of the model after them."""
        base = base_model(self.model)
        name = next(name for name, child in self.model.named_children() if child is base)
        with temporary_value(self.model, name, KnownHiddenStates(self.output_type(last_hidden_state=x[None]))):
            logits = self.model(input_ids=targets[None], use_cache=False)[0][0]  # (N, V)
        return logit_losses(precise(logits), targets)

    @torch.inference_mode()
    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        """Return the ids of at most ``steps`` tokens, generated greedily after the tokens (1, T) int64.

        Generation stops after a token that ends a text.
        """
        reset_dynamic_rope(self.model)
        tokens = self._after_bos(tokens)
        # cached keys would be rotated by the angles of a shorter input
        same_angles = not _angles_change(self.model, tokens.shape[1], tokens.shape[1] + steps)
        strategies = getattr(decoder(self.model), "kerple", None)  # of `kerple.hf.retrofit`
        use_cache = same_angles and (strategies is None or strategies.prefix_consistent)
        mask = torch.ones_like(tokens)  # without a mask, transformers hides tokens that equal the padding token
        options = {"max_new_tokens": steps, "do_sample": False, "use_cache": use_cache}
        stored = self.model.generation_config  # may have penalties and beams, which apply to greedy generation too
        greedy = type(stored)(eos_token_id=stored.eos_token_id, pad_token_id=stored.pad_token_id)
        failure = f"model: {type(self.model).__name__} cannot continue a text"
        with temporary_value(self.model, "generation_config", greedy), foreign_errors(failure, ADVICE):
            return self.model.generate(tokens, attention_mask=mask, **options)[0, tokens.shape[1] :].tolist()

    def _after_bos(self, tokens: Tensor) -> Tensor:
        return tokens if self.bos is None else F.pad(tokens, (1, 0), value=self.bos)

    def _run(self, module: nn.Module, tokens: Tensor, visibility: Visibility, offset: int | Tensor) -> Tensor:
        """Return the output (B, T, ·) of a module for tokens (B, T).

        The module is the whole model, which returns logits, or its base model, which returns hidden states.
        """
        expected = "'true' for a model that transformers runs; or set model.position, so that this project runs it"
        require(visibility.distances == "true", "distances", repr(visibility.distances), expected)
        end, limit = int(torch.as_tensor(offset).max()) + tokens.shape[1], self.max_length
        expected = f"at most {limit}, for which the model has positions; remove longer lengths"
        require(limit is None or end <= limit, "lengths", f"{end} positions", expected)
        inputs = self._after_bos(tokens)
        rows = torch.arange(inputs.shape[1], device=tokens.device)[None]
        options = {}
        reset_dynamic_rope(self.model)
        with ExitStack() as contexts:
            if isinstance(offset, Tensor):
                offset = F.pad(offset, (inputs.shape[1] - len(offset), 0))  # 0 for BOS
                # without a mask, transformers interprets a jump in the positions as the start of another text
                options["attention_mask"] = torch.ones_like(inputs)
                contexts.enter_context(local_layer_positions(self.model, rows))
            if isinstance(self, SupportsOffset):
                options["position_ids"] = rows + offset
            if visibility.window is not None:
                visibility = visibility if self.bos is None else visibility.with_bos()
                contexts.enter_context(limited_attention(self.model, visibility))
            with foreign_errors(f"model: {type(self.model).__name__} cannot read {end} tokens", ADVICE):
                output = module(input_ids=inputs, use_cache=False, **options)[0]
        if visibility.window is not None:
            self._check_window(visibility.window)
        return output[:, -tokens.shape[1] :]

    @torch.inference_mode()
    def _check_window(self, window: int) -> None:
        """Check once that text reaches later tokens only by attention, whose window can be limited.

        If each query sees only its own key, a token must not change the logits of later tokens.

        Raises:
            UserError: If it changes them, for example by a state-space layer or a convolution.
        """
        if self.window_is_checked:
            return
        self.window_is_checked = True  # before the next line, which calls this function
        if self._changes_others(0, Visibility(window=1)):
            self.window_is_checked = False
            way = "not only by attention but also, for example, by a state-space layer"
            given = f"got {window}, but text reaches later tokens of {type(self.model).__name__} {way}"
            raise UserError(f"window: {given}; leave out measures and protocols with a window")

    def _changes_others(self, i: int, visibility: Visibility = EVERYTHING) -> bool:
        """Return whether the token at index ``i`` of 12 random tokens changes the logits of the other tokens."""
        tokens = self._random_tokens()
        changed = tokens.clone()
        changed[:, i] = (changed[:, i] + 1) % self.embedding.num_embeddings
        logits = precise(self(tokens, visibility))  # (1, T, V)
        others = torch.arange(tokens.shape[1], device=tokens.device) != i
        change = float((precise(self(changed, visibility)) - logits)[:, others].abs().max())
        eps, scale = torch.finfo(self.embedding.weight.dtype).eps, float(logits.abs().max())
        return not change <= 30 * eps * scale  # true also for NaN

    def _random_tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.embedding.num_embeddings, (1, 12), generator=generator)
        return tokens.to(self.embedding.weight.device)

    @torch.inference_mode()
    def _check_forward_pass(self) -> None:
        """Check on 12 tokens that the model is causal, and set ``chunked_logits``.

        ``chunked_logits`` is whether losses that are computed in chunks equal those of the model's logits.

        Raises:
            UserError: If the logits of a token depend on later tokens.
        """
        tokens = self._random_tokens()
        eps, scale = torch.finfo(self.embedding.weight.dtype).eps, float(self(tokens).abs().max())
        causal = not self._changes_others(tokens.shape[1] - 1)
        given = f"{type(self.model).__name__}, whose logits depend on later tokens"
        require(causal, "model", given, "a causal language model")
        self.chunked_logits = False
        expected = self.losses(tokens, 7)
        self.chunked_logits = isinstance(self.head, nn.Linear)
        try:
            self.output_type = type(base_model(self.model)(input_ids=tokens, use_cache=False))
            same = torch.allclose(self.losses(tokens, 7), expected, rtol=0, atol=max(2 * eps, 1e-5) * scale)
        except Exception:  # the base model is not a part of the model, or the model needs more of it
            same = False
        self.chunked_logits &= same


class ShiftableHuggingFaceNetwork(HuggingFaceNetwork, SupportsOffset):
    """A `HuggingFaceNetwork` whose model takes ``position_ids``."""


class KnownHiddenStates(nn.Module):
    """A base model of transformers that returns the same output, with known hidden states, for any input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    decoder = property(lambda self: self)  # OPT and BART call the decoder of their base model

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def base_model(model: Any) -> nn.Module:
    """Return the part of a model of transformers that computes the hidden states, which its head maps to logits."""
    base = model.base_model
    return getattr(model, "model", base) if base is model else base  # the prefix of Llama 4 names no attribute


def _dynamic_rope(model: Any) -> list[tuple[Any, str]]:
    """Return the modules of a model that compute RoPE with dynamic scaling, with the prefix of their buffers' names.

    A module for several kinds of layers has buffers for each kind, whose names begin with this kind.
    """
    types = {module: getattr(module, "rope_type", None) for module in model.modules()}
    kinds = {module: of if isinstance(of, dict) else {"": of} for module, of in types.items()}
    return [(m, kind and f"{kind}_") for m, of in kinds.items() for kind, name in of.items() if "dynamic" in str(name)]


def _angles_change(model: Any, shorter: int, longer: int) -> bool:
    """Return whether the angles of RoPE differ between inputs of two lengths in tokens.

    Dynamic scaling depends on the length, and LongRoPE on whether it is above the original length.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    originals = [
        each["original_max_position_embeddings"]
        for each in ([rope] if "rope_type" in rope else rope.values())
        if isinstance(each, Mapping) and each.get("rope_type") == "longrope"
    ]
    return bool(_dynamic_rope(model)) or any(shorter <= original < longer for original in originals)


def reset_dynamic_rope(model: Any) -> None:
    """Reset the frequencies of RoPE with dynamic scaling to those of the training length.

    transformers keeps the frequencies of the longest earlier input. Without a reset, results depend on that input.
    """
    for module, prefix in _dynamic_rope(model):
        if (original := getattr(module, f"{prefix}original_inv_freq", None)) is not None:
            used = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.to(used), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
