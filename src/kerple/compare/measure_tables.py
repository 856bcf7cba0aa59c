"""Tables of the analyses that have no figure in the report, including the user's own analyses."""

from collections.abc import Iterator, Mapping

import pandas as pd

from kerple.compare.table_markup import NOTHING, Cell, Table
from kerple.compare.tables import MOST_COLUMNS


def analyses(tables: Mapping[str, pd.DataFrame]) -> Iterator[Table]:
    """Yield a table of means over seeds for each analysis, and one table that lists the analyses without such a table.

    Columns of floats hold values. The other columns, such as ``layer`` or ``length``, are keys that identify a value. A
    key column with the same entry in every row is left out. The table of means has a column for each column of floats
    and each combination of keys. An analysis has no such table if the table would have no column or more than
    `MOST_COLUMNS`, or if a run has several rows for one combination.

    Args:
        tables: The table of each analysis by name, with columns strategy and seed, and part if runs have parts.

    Yields:
        Tables of means with a row per part and strategy, then the list of the other analyses.
    """
    larger = {}
    for name, table in tables.items():
        runs = [column for column in ("part", "strategy") if column in table]
        # an empty column, such as reasons for skipped layers if none was skipped, is not a key
        columns = table.dropna(axis="columns", how="all").columns.drop([*runs, "seed"])
        measured = [column for column in columns if pd.api.types.is_float_dtype(table[column])]
        keys = [column for column in columns if column not in measured and table[column].nunique() > 1]
        unique = not table.duplicated([*runs, "seed", *keys]).any()
        combinations = len(table[keys].drop_duplicates()) if keys else 1
        if measured and unique and combinations * len(measured) <= MOST_COLUMNS:
            yield _means(name, table, runs, keys, measured)
        else:
            larger[name] = {"rows": Cell(f"{len(table):,}"), "file": Cell(f"{name}.csv")}
    if larger:
        body = pd.DataFrame.from_dict(larger, orient="index")
        yield Table("Analyses without a table of means", body, "Their CSV files are in the folder of this report.")


def _means(name: str, table: pd.DataFrame, runs: list[str], keys: list[str], measured: list[str]) -> Table:
    """The table of means and standard deviations over seeds.

    Args:
        name: Name of the analysis.
        table: Table of the analysis.
        runs: The columns ``part``, if it exists, and ``strategy``.
        keys: Columns that identify a measurement.
        measured: Columns of measurements.
    """
    rows: dict[str, dict[str, Cell]] = {}
    for values, group in table.groupby([*runs, *keys], sort=False, dropna=False):
        run, of_keys = values[: len(runs)], zip(keys, values[len(runs) :], strict=True)
        subject = ", ".join(f"{column} {value}" for column, value in of_keys)  # such as "layer 0, head 1"
        for column in measured:
            mean, std = group[column].mean(), group[column].std()
            text = f"{mean:.4g} ± {std:.2g}" if std == std else f"{mean:.4g}"  # NaN with one seed
            heading = ": ".join(filter(None, [column if len(measured) > 1 or not subject else "", subject]))
            rows.setdefault(" ".join(map(str, run)), {})[heading] = Cell(text)
    body = pd.DataFrame.from_dict(rows, orient="index").fillna(NOTHING)
    quantity = f": {measured[0]}" if len(measured) == 1 and keys else ""
    return Table(f"{name}{quantity}", body, f"Mean ± standard deviation over seeds; {name}.csv has every run.")
