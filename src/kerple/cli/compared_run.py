"""The process of one run of a comparison: `python -m kerple.cli.compared_run FILE`, see kerple.compare.run_process."""

from kerple.cli.main import main
from kerple.compare.run_process import work

if __name__ == "__main__":
    work(main)
