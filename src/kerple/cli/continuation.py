"""The continuation of a prompt by a trained model, printed during generation."""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile

import torch
from jsonargparse import Namespace
from tokenizers.decoders import DecodeStream

from kerple.base.errors import UserError
from kerple.cli.torch_settings import configure_torch
from kerple.cli.trained import TextData, end_token, load_trained
from kerple.model.generation import generate
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData


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
    following = pieces(data, start, takewhile(lambda token: token != end, map(int, new)))
    first = next(following, "")  # invalid options raise an error here, before any output
    try:
        for piece in chain([options.prompt + first], following):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def pieces(data: TextData, start: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens in pieces of complete characters.

    Args:
        data: Data module that decodes the tokens.
        start: Ids of the prompt, because the text of a token may depend on earlier tokens.
        tokens: Ids of the continuation.
    """
    if isinstance(data, TaskData):  # a token is a character
        yield from (data.decode([token]) for token in tokens)
        return
    stream, tokenizer = DecodeStream(ids=start), data.folder.tokenizer()
    for token in tokens:
        if piece := stream.step(tokenizer, token):
            yield piece
