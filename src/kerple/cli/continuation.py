"""The continuation of a prompt by a trained model, printed during generation."""

import sys
from collections.abc import Iterator
from itertools import chain

import torch
from jsonargparse import Namespace

from kerple.base.errors import UserError
from kerple.cli.torch_settings import configure_torch
from kerple.cli.trained import TextData, end_token, load_trained
from kerple.model.generation import generate
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded text of an incomplete character


def print_continuation(options: Namespace) -> None:
    """Print a prompt, followed by each generated token.

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
    first = next(following, "")  # an option out of range raises here, before any output
    try:
        for piece in chain([options.prompt + first], following):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def pieces(data: TextData, start: list[int], tokens: Iterator[int], end: int) -> Iterator[str]:
    """Yield the text of tokens in pieces of complete characters.

    Args:
        data: Decodes the tokens.
        start: Ids of the prompt.
        tokens: Ids of the continuation.
        end: Id that ends the continuation; its text and later text are not part of it.
    """
    context, pending = start, list[int]()

    def new() -> str:
        # with the previous tokens, because some tokenizers drop the space before the first word of a text
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
