"""`Result`: tables, figures and numbers of a measurement, and methods that write them to files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kerple.measure import results_table
from kerple.measure.results_table import Row


@dataclass
class Result:
    """The outcome of a measurement.

    Args:
        name: Name of the measurement.
        tables: Tables by name, each written as ``<name>.csv``. The rows of a table have the same keys.
        figures: Figures by name, each written as ``<name>.png``.
        sums: Rows for ``results.csv.gz``, which `compare` reads.
        about: Description of the sums for ``results.json``. If it is empty, the sums are not written.
        scalars: Numbers for loggers by name, such as ``ppl/full/512``.
        report: Text for the terminal.
        skipped: The reason why nothing was measured, or None.
    """

    name: str
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    sums: list[Row] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    report: str = ""
    skipped: str | None = None

    def publish(self, folder: Path, writers: Iterable[Any] = (), step: int = 0) -> None:
        """Write the files of the result, print its report, and log its figures.

        If the measurement was skipped, only print the reason.

        Args:
            folder: Folder of the files.
            writers: TensorBoard writers (``SummaryWriter``).
            step: Training step of the figures in TensorBoard.
        """
        if self.skipped:
            print(f"{self.name}: skipped: {self.skipped}")
            return
        self.write(folder)
        print(self.report, end="\n" if self.report else "")
        for writer in writers:
            for name, figure in self.figures.items():
                writer.add_figure(f"analyses/{name}", figure, step, close=False)

    def write(self, folder: Path) -> None:
        """Write tables, figures and sums into a folder. Sums of other measurements in this folder are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.about:
            results_table.add_to_results(folder, self.name, self.sums, self.about)
        for name, rows in self.tables.items():
            if rows:
                pd.DataFrame(rows, dtype=object).to_csv(folder / f"{name}.csv", index=False)
        for name, figure in self.figures.items():
            figure.savefig(folder / f"{name}.png", dpi=150)
