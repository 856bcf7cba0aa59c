"""The text that a trained model writes after a prompt, printed during generation."""

import sys
from collections.abc import Iterator
from itertools import chain

import torch
from jsonargparse import Namespace

from kerple.base.errors import UserError
from kerple.cli.torch_settings import configure_torch
from kerple.cli.trained import Text, end_token, load_trained
from kerple.model.generation import generate
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


def print_continuation(options: Namespace) -> None:
    """Print a prompt, and then each generated token.

    Args:
        options: Options of `kerple.cli.predict`.

    Raises:
        UserError: If the checkpoint cannot be read, the prompt cannot be encoded or a number is out of range.
    """
    configure_torch()
    if options.tokens < 1:
        raise UserError(f"tokens: got {options.tokens}, expected 1 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = load_trained(options.ckpt_path, options.trust, device)
    random = torch.Generator(device)
    random.seed() if options.seed is None else random.manual_seed(options.seed)
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if isinstance(data, TaskData) else 0.8
    end = end_token(data)
    try:
        start = data.encode(options.prompt) if options.prompt or isinstance(data, TaskData) else [end]
    except UserError as error:
        raise UserError(f"prompt: {error}") from error
    new = generate(
        model.network,
        torch.tensor([start], device=device),
        options.tokens,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        visibility=Visibility(options.window),
        stop=end,
        generator=random,
    )
    following = pieces(data, start, (int(token) for token in new), end)
    first = next(following, "")  # raises here if a number is out of range, before anything is printed
    try:
        for piece in chain([options.prompt + first], following):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def pieces(data: Text, start: list[int], tokens: Iterator[int], end: int) -> Iterator[str]:
    """Yield the text of the tokens that follow those of ``start`` until ``end``, in pieces of whole characters."""
    context, pending = start, list[int]()

    def new() -> str:
        # decoded after the tokens before them, because some tokenizers drop the space before a text's first word
        return data.decode(context + pending)[len(data.decode(context)) :]

    for token in tokens:
        if token == end:
            break
        pending.append(token)
        text = new()
        if text and not text.endswith(UNFINISHED):
            yield text
            context, pending = pending, []
    if pending:
        yield new()
