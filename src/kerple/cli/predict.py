"""`python run.py predict --ckpt_path … --prompt …`: continues a prompt, and prints tokens as they are generated."""

from kerple.cli.arguments import command_parser, parse


def main(arguments: list[str]) -> None:
    """Parse the options, and only then import what takes seconds.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the checkpoint cannot be read, the prompt cannot be encoded or a number is out of range.
    """
    parser = command_parser("predict", __doc__)
    parser.add_argument("--ckpt_path", type=str, required=True, help="a checkpoint that `fit` has written")
    parser.add_argument("--prompt", type=str, default="", help="text to continue; empty: a new document")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens at most")
    parser.add_argument("--temperature", type=float, default=None, help="0: the likeliest token; tasks: 0, text: 0.8")
    parser.add_argument("--top_k", type=int | None, default=None, help="only the k likeliest tokens")
    parser.add_argument("--top_p", type=float | None, default=None, help="only the likeliest with this probability")
    parser.add_argument("--window", type=int | None, default=None, help="attention sees this many tokens; null: all")
    parser.add_argument("--seed", type=int | None, default=None, help="draw the same text again")
    parser.add_argument("--trust", default="", help="packages whose classes the checkpoint may name: a,b,c")
    options = parse(parser, arguments)
    from kerple.cli.continuation import print_continuation

    print_continuation(options)
