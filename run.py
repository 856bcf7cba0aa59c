"""Train, test, compare: `python run.py --help`."""

if __name__ == "__main__":
    # not above: the processes that tokenise import this file too, and have no use for torch and its 400 MB each
    from kerple.cli.main import main

    main()
