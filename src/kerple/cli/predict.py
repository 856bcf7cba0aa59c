"""`python run.py predict --ckpt_path … --prompt …`: continues a prompt, and prints its tokens one by one."""

from itertools import chain

from kerple.base.errors import require
from kerple.config.options import add_checkpoint_arguments, command_parser, rename_options
from kerple.config.parsing import parse


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
    from kerple.training.continuation import continue_prompt  # takes seconds, and wrong options are reported before

    pieces = continue_prompt(options)
    first = next(pieces)  # an error is raised here, before any output
    try:
        for piece in chain([first], pieces):
            print(piece, end="", flush=True)
    finally:
        print()
