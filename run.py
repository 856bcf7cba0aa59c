"""Train, test, compare: `python run.py --help`."""

from kerple.cli import main

if __name__ == "__main__":
    main()
