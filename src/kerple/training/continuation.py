"""`continue_prompt`: the continuation of a prompt by a trained model, as pieces of text."""

from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch
from jsonargparse import Namespace
from tokenizers.decoders import DecodeStream

from kerple.base.errors import UserError
from kerple.model.generation import generate
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData
from kerple.training.torch_settings import configure_torch
from kerple.training.trained_model import TextData, end_token, load_trained


def continue_prompt(options: Namespace) -> Iterator[str]:
    """Yield a prompt with the first piece of its continuation, and then each piece as soon as it is generated.

    Args:
        options: Options of `kerple.cli.predict`.

    Raises:
        UserError: If the checkpoint cannot be read, the prompt cannot be encoded, or an option of sampling is out of
            range. Errors are raised before anything is yielded.
    """
    configure_torch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = load_trained(options.ckpt_path, options.trust, device)
    random = torch.Generator(device)
    random.seed() if options.seed is None else random.manual_seed(options.seed)
    if (temperature := options.temperature) is None:
        temperature = 0.0 if isinstance(data, TaskData) else 0.8
    end = end_token(data)
    try:
        start = data.encode(options.prompt) if options.prompt or isinstance(data, TaskData) else [end]
    except UserError as error:
        raise UserError(f"prompt: {error}") from error
    sampling = {"temperature": temperature, "top_k": options.top_k, "top_p": options.top_p, "generator": random}
    prompt = torch.tensor([start], device=device)
    if getattr(data, "mask_documents", False):
        sampling["document_end"] = end
    new = generate(model.network, prompt, options.length, visibility=Visibility(options.window), stop=end, **sampling)
    pieces = decode_pieces(data, start, takewhile(lambda token: token != end, map(int, new)))
    yield options.prompt + next(pieces, "")
    yield from pieces


def decode_pieces(data: TextData, start: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens in pieces of complete characters.

    Args:
        data: Data module that decodes the tokens.
        start: Token ids of the prompt. The text of a token may depend on earlier tokens.
        tokens: Token ids of the continuation.
    """
    if isinstance(data, TaskData):  # a token is a character
        yield from (data.decode([token]) for token in tokens)
        return
    stream = DecodeStream(ids=start)
    tokenizer = data.folder.tokenizer()
    for token in tokens:
        if piece := stream.step(tokenizer, token):
            yield piece
