"""The process of one run of a comparison: `python -m kerple.cli.compared_run TASK`."""

from kerple.cli.main import main
from kerple.compare.run_process import work

if __name__ == "__main__":
    work(main)
