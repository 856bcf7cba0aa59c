"""`python run.py lm_eval …`: lm-evaluation-harness on checkpoints of this project, as its model ``kerple``.

The harness has no plugins, so this command registers the model before it calls the harness.
"""

import logging
import sys
from typing import Any

import torch
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError
from kerple.cli.predict import end_of_text, load, pieces
from kerple.evaluation.protocols import sliding
from kerple.hf import need
from kerple.model.generation import generate

INSTALL_HARNESS = (
    "pip install --no-deps --target FOLDER -r requirements-lm-eval.txt (of the project's repository), and FOLDER in "
    "PYTHONPATH"
)


def main(arguments: list[str]) -> None:
    """Run the harness with ``--model kerple``, unless the arguments name another model.

    Args:
        arguments: Arguments of lm_eval, such as ``--model_args ckpt=…,length=…,stride=… --tasks …``.

    Raises:
        UserError: If the harness is not installed.
    """
    need("lm_eval", INSTALL_HARNESS)
    from lm_eval.__main__ import cli_evaluate

    register()
    given = [] if "--model" in arguments else ["--model", "kerple"]
    before, sys.argv = sys.argv, ["lm_eval", "run", *given, *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def register() -> None:
    """Register the model ``kerple`` with the harness; it may be called several times."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    if "kerple" not in MODEL_REGISTRY:
        register_model("kerple")(type("KerpleLM", (Checkpoint, LM), {}))


class Checkpoint:
    """A checkpoint with the methods that the harness calls.

    Args:
        ckpt: Path of a checkpoint that `fit` has written.
        length: Number of tokens of context; None for the training length.
        stride: Number of new targets in each step through a longer text; None for a quarter of the length.
        trust: Packages whose classes the checkpoint may name, as a+b+c.
        device: Device of the model; None for a CUDA device if there is one.
        batch_size: Of no use: texts are read one at a time.
        max_batch_size: Of no use either.
        others: What no option is called.

    Raises:
        UserError: If there is no such checkpoint or option, or a number is out of range.
    """

    def __init__(
        self,
        ckpt: str,
        length: int | None = None,
        stride: int | None = None,
        trust: str = "",
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if others:
            raise UserError(f"model_args: got {', '.join(others)}, expected ckpt, length, stride or trust")
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, self.data = load(ckpt, tuple(trust.split("+")), self._device)
        self.network = model.network
        self.length = int(length or self.network.shape.length)
        self.stride = int(stride or max(1, self.length // 4))
        if not 1 <= self.stride <= self.length:
            raise UserError(f"stride: got {self.stride}, expected 1..{self.length}, the length")
        assert isinstance(self.data, LightningDataModule)
        self.start = end_of_text(self.data)

    @torch.inference_mode()
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy generation produces it.

        A continuation of more than ``length`` tokens is scored in steps, as the protocol ``sliding`` does it. A context
        is cut on the left, so that it and the continuation are ``length`` tokens; a warning says so.
        """
        results = []
        cut: list[int] = []  # what is left of each context that is cut
        for context, continuation in (request.args for request in requests):
            before, after = self._apart(context, continuation)
            room = max(self.length + 1 - len(after), 1)
            text = torch.tensor([[*_last([self.start, *before], room, cut), *after]], device=self._device)
            targets = text.shape[1] - 1
            begin, end = targets - len(after), min(self.length, targets)  # of the targets of a step
            total, greedy = 0.0, True
            while begin < targets:
                step = text[:, max(0, end - self.length) : end + 1]
                logits, wanted = self.network(step[:, :-1], last=end - begin), step[:, begin - end :]
                total += float(logits.float().log_softmax(-1).gather(-1, wanted[..., None]).double().sum())
                greedy = greedy and bool((logits.argmax(-1) == wanted).all())
                begin, end = end, min(end + self.stride, targets)
            results.append((total, greedy))
        self._warn(cut, len(requests), "its continuation")
        return results

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text after an end-of-text token, as the protocol ``sliding`` scores it."""
        results = []
        for (text,) in (request.args for request in requests):
            tokens = torch.tensor([[self.start, *self.data.encode(text)]], device=self._device)
            length = min(self.length, tokens.shape[1] - 1)
            losses = sliding(self.network, tokens, length, stride=min(self.stride, length)) if length else tokens[:, 1:]
            results.append(-float(losses.double().sum()))
        return results

    @torch.inference_mode()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to the first of its stop strings.

        A context is cut on the left, so that it and the tokens asked for are ``length`` tokens; a warning says so.

        Raises:
            UserError: If as many tokens are asked for, or more.
        """
        results: list[str] = []
        cut: list[int] = []  # what is left of each context that is cut
        for context, options in (request.args for request in requests):
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            steps = int(options.get("max_gen_toks", 256))
            room = self.length - steps
            if room < 1:
                raise UserError(
                    f"length: got {self.length}, expected more than the {steps} tokens of max_gen_toks, so that the "
                    "prompt has room; add length=… to --model_args, or --gen_kwargs max_gen_toks=…"
                )
            prompt = _last([self.start, *self.data.encode(context)], room, cut)
            new = generate(self.network, torch.tensor([prompt], device=self._device), steps, stop=self.start)
            text = ""
            for piece in pieces(self.data, prompt, map(int, new), self.start):
                text += piece
                if any(stop in text for stop in stops):
                    break
            cuts = [text.index(stop) for stop in stops if stop in text]
            results.append(text[: min(cuts)] if cuts else text)
        self._warn(cut, len(requests), "max_gen_toks")
        return results

    def _warn(self, cut: list[int], number: int, what: str) -> None:
        """Warn of contexts that are cut; ``cut`` has the tokens that are left of each."""
        if cut:
            logging.getLogger(__name__).warning(
                "length: %d of %d contexts are cut, one to its last %d tokens, to leave room for %s in %d; add a "
                "larger length=… to --model_args",
                len(cut),
                number,
                min(cut),
                what,
                self.length,
            )

    def _apart(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of context and continuation; spaces between them belong to the continuation, as in the harness."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        return self.data.encode(bare), self.data.encode(continuation)


def _last(context: list[int], room: int, cut: list[int]) -> list[int]:
    """The last tokens of a context for which there is room; if that is not all, ``cut`` is given how many are left."""
    if len(context) > room:
        cut.append(room)
    return context[-room:]
