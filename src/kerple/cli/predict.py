"""`python run.py predict --ckpt_path … --prompt …`: continues a prompt, and prints tokens as they are generated."""

import sys
from collections.abc import Iterator
from itertools import chain

import torch
from jsonargparse import ArgumentError, ArgumentParser
from pytorch_lightning.cli import LightningArgumentParser

from kerple.base.errors import UserError
from kerple.base.trust import load as load_checkpoint
from kerple.cli.agreement import check_weights
from kerple.cli.classes import classes
from kerple.cli.parser import add_model_and_data, mistake_in
from kerple.cli.reading import read
from kerple.cli.torch_settings import settle_torch
from kerple.data import TokenShards
from kerple.model.generation import generate
from kerple.tasks import TaskData
from kerple.training.language_model import LanguageModel

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
Text = TokenShards | TaskData  # the data modules that can encode and decode


def main(arguments: list[str]) -> None:
    """Print the prompt, and then each generated token.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the checkpoint cannot be read, the prompt cannot be encoded or a number is out of range.
    """
    parser = ArgumentParser(prog="run.py predict", description=__doc__, exit_on_error=False)
    parser.add_argument("--ckpt_path", type=str, required=True, help="a checkpoint that `fit` has written")
    parser.add_argument("--prompt", type=str, default="", help="text to continue; empty: a new document")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens at most")
    parser.add_argument("--temperature", type=float, default=None, help="0: the likeliest token; tasks: 0, text: 0.8")
    parser.add_argument("--top_k", type=int | None, default=None, help="only the k likeliest tokens")
    parser.add_argument("--top_p", type=float | None, default=None, help="only the likeliest with this probability")
    parser.add_argument("--window", type=int | None, default=None, help="attention sees this many tokens; null: all")
    parser.add_argument("--seed", type=int | None, default=None, help="draw the same text again")
    parser.add_argument("--trust", default="", help="packages whose classes the checkpoint may name: a,b,c")
    parser.add_argument(
        "--device", type=str, default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    given = read(parser, arguments)
    settle_torch()
    if given.tokens < 1:
        raise UserError(f"tokens: got {given.tokens}, expected 1 or more")
    try:
        torch.empty(0, device=given.device)
    except (RuntimeError, AssertionError) as error:  # the device is unknown, or torch was built without it
        reason = str(error).splitlines()[0]
        raise UserError(f"device: got {given.device!r}, expected one torch has here, such as cpu: {reason}") from error

    model, data = load(given.ckpt_path, given.trust, given.device)
    random = torch.Generator(given.device)
    random.seed() if given.seed is None else random.manual_seed(given.seed)
    temperature = given.temperature
    if temperature is None:
        temperature = 0.0 if isinstance(data, TaskData) else 0.8
    end = end_of_text(data)
    try:
        start = data.encode(given.prompt) if given.prompt or isinstance(data, TaskData) else [end]
    except UserError as error:
        raise UserError(f"prompt: {error}") from error
    new = generate(
        model.network,
        torch.tensor([start], device=given.device),
        given.tokens,
        temperature=temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        window=given.window,
        stop=end,
        generator=random,
    )
    following = pieces(data, start, (int(token) for token in new), end)
    first = next(following, "")  # raises here if a number is out of range, before anything is printed
    try:
        for piece in chain([given.prompt + first], following):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def load(path: str, trust: str = "", device: str = "cpu") -> tuple[LanguageModel, Text]:
    """Load the model of a checkpoint, in evaluation mode, and its data module, which can encode and decode.

    Args:
        path: Path of a checkpoint that `fit` has written.
        trust: Packages, beside this one, whose classes it may name, separated by commas.
        device: Device of the model.

    Raises:
        UserError: If there is no such checkpoint, or its data is missing.
    """
    config = classes(trust).config(path)
    parser = LightningArgumentParser(exit_on_error=False)
    add_model_and_data(parser)
    try:
        made = parser.instantiate_classes(parser.parse_object({key: config[key] for key in ("model", "data")}))
    except (ArgumentError, ValueError, TypeError) as error:  # the parser's, also of what a class said when it was made
        raise UserError(f"ckpt_path: {path}: {mistake_in(error) or error}") from error
    if not isinstance(made.data, Text):  # a user's own data module
        raise UserError(f"ckpt_path: {path} was trained on {type(made.data).__name__}, which cannot encode a prompt")
    made.data.setup("predict")
    content = load_checkpoint(path)
    check_weights(path, content, made.model)
    if (state := content.get(type(made.data).__qualname__)) is not None:
        made.data.load_state_dict(state)
    made.model.load_state_dict(content["state_dict"])
    made.model.attach(made.data)
    return made.model.to(device).eval(), made.data


def end_of_text(data: Text) -> int:
    """Id of the token that ends a text or an answer."""
    return data.end if isinstance(data, TaskData) else data.manifest.end_of_text


def pieces(data: Text, start: list[int], tokens: Iterator[int], end: int) -> Iterator[str]:
    """Yield the text of a stream of tokens after those of ``start``, in pieces of whole characters, without the end."""
    known, waiting = start, list[int]()

    def new() -> str:
        # with known ones before them: some tokenizers drop the space before a text's first word
        return data.decode(known + waiting)[len(data.decode(known)) :]

    for token in tokens:
        if token == end:
            break
        waiting.append(token)
        text = new()
        if text and not text.endswith(UNFINISHED):
            yield text
            known, waiting = waiting, []
    if waiting:
        yield new()
