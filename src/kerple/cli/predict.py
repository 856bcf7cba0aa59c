"""`python run.py predict --ckpt_path … --prompt …`: continues a prompt, and prints its tokens one by one."""

from itertools import chain, takewhile

from kerple.base.errors import UserError, require
from kerple.config.parsing import add_checkpoint_arguments, command_parser, parse, rename_options


def main(arguments: list[str]) -> None:
    """Print a prompt and its continuation by a trained model.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the checkpoint cannot be read, the prompt cannot be encoded, or a number is out of range.
    """
    parser = command_parser("predict", __doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument("--prompt", type=str, default="", help="text to continue; empty: begin a new document")
    parser.add_argument("--length", type=int, default=200, help="maximum number of tokens to generate")
    parser.add_argument("--temperature", type=float, default=None, help="0: greedy; default: 0 for tasks, 0.8 for text")
    parser.add_argument("--top_k", type=int | None, help="sample from the k most probable tokens")
    nucleus = "sample from the smallest set of most probable tokens with at least this total probability"
    parser.add_argument("--top_p", type=float | None, help=nucleus)
    parser.add_argument("--window", type=int | None, help="number of keys that a query sees; null: all")
    parser.add_argument("--seed", type=int | None, help="seed of sampling; null: a random one")
    rename_options(parser, tokens="length")
    options = parse(parser, arguments)
    require(options.length >= 1, "length", options.length, "1 or more")
    # imported here, because torch takes seconds and wrong options are reported before
    import torch

    from kerple.model.generation import generate
    from kerple.positions.visibility import Visibility
    from kerple.tasks import TaskData
    from kerple.training.torch_settings import configure_torch
    from kerple.training.trained_model import decode_pieces, end_token, load_trained

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
    new = generate(model.network, prompt, options.length, visibility=Visibility(options.window), stop=end, **sampling)
    continuation = decode_pieces(data, start, takewhile(lambda token: token != end, map(int, new)))
    first = next(continuation, "")  # invalid options raise an error here, before any output
    try:
        for piece in chain([options.prompt + first], continuation):
            print(piece, end="", flush=True)
    finally:
        print()
