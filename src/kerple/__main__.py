"""`python -m kerple` is the same as `kerple` and as `python run.py`."""

from kerple.cli.main import main

if __name__ == "__main__":
    main()
