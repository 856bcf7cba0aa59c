"""Tables of the analyses that the report has no figure of, a user's own among them."""

from collections.abc import Iterator, Mapping

import pandas as pd

from kerple.compare.tables import MOST_COLUMNS, NOTHING, Cell, Table


def analyses(found: Mapping[str, pd.DataFrame]) -> Iterator[Table]:
    """Yield the table of each analysis, with means over seeds, and at last a list of those that are too large for one.

    Decimal columns are what was measured. The others, such as a layer or a length, say of what, unless they are the
    same everywhere.

    Args:
        found: The table of each analysis by its name, with columns strategy and seed, and part if there are several.
    """
    larger = {}
    for name, table in found.items():
        runs = [column for column in ("part", "strategy") if column in table]
        own = table.columns.drop([*runs, "seed"])
        filled = own[table[own].notna().any()]  # reasons for what was skipped are a column of none, where nothing was
        measured = [column for column in filled if pd.api.types.is_float_dtype(table[column])]
        of = [column for column in filled if column not in measured and table[column].nunique() > 1]
        once = not table.duplicated([*runs, "seed", *of]).any()
        if measured and once and len(table[of].drop_duplicates()) * len(measured) <= MOST_COLUMNS:
            yield _means(name, table, runs, of, measured)
        else:
            larger[name] = {"rows": f"{len(table):,}", "file": f"{name}.csv"}
    if larger:
        body = pd.DataFrame.from_dict(larger, orient="index")
        yield Table("Larger tables of analyses", body, "Their files lie beside this report.")


def _means(name: str, table: pd.DataFrame, runs: list[str], of: list[str], measured: list[str]) -> Table:
    rows: dict[str, dict[str, Cell]] = {}
    for at, group in table.groupby([*runs, *of], sort=False, dropna=False):
        run, where = at[: len(runs)], zip(of, at[len(runs) :], strict=True)
        place = ", ".join(f"{column} {value}" for column, value in where)
        for column in measured:
            mean, std = group[column].mean(), group[column].std()
            text = f"{mean:.4g} ± {std:.2g}" if std == std else f"{mean:.4g}"  # one seed has no deviation
            heading = ": ".join(filter(None, [column if len(measured) > 1 or not place else "", place]))
            rows.setdefault(" ".join(map(str, run)), {})[heading] = Cell(text)
    body = pd.DataFrame.from_dict(rows, orient="index").fillna(NOTHING)
    what = f": {measured[0]}" if len(measured) == 1 and of else ""
    note = f"Mean ± standard deviation over seeds; {name}.csv has every run."
    return Table(f"{name}{what}", body, note)
