"""`Table`: a table with Markdown, LaTeX and HTML as output formats."""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

PAGE_COLUMNS = 6  # columns, each of a mean and a standard deviation, that fit on a page
DAGGER = "†"
LATEX_ESCAPES = str.maketrans(
    {character: rf"\{character}" for character in "_%&#${}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", DAGGER: r"$^\dagger$"}
    | {"<": "$<$", ">": "$>$", "|": "$|$", "±": r"$\pm$", "×": r"$\times$", "∞": r"$\infty$", "–": "--"}
)
# start of a LaTeX box that is scaled down to the width of the page if its content is wider
FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and whether it is bold."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a title and a note, for Markdown, LaTeX and HTML.

    Args:
        title: Title above the table.
        body: A `Cell` at each place. ``body.index`` contains the labels of the rows, and ``body.columns`` the headings.
        note: Text below the table.
    """

    title: str
    body: pd.DataFrame
    note: str = ""

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with title and note."""
        body = self._text(lambda text: without_tags(text).replace("|", r"\|"), "**{}**")
        lines = [["", *body.columns], ["---", *["---:"] * len(body.columns)], *map(list, body.itertuples())]
        table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        return f"### {without_tags(self.title)}\n\n{table}\n" + (f"\n{without_tags(self.note)}\n" if self.note else "")

    def latex(self) -> str:
        """The table as a LaTeX float, which needs the packages booktabs and graphicx.

        More than `PAGE_COLUMNS` columns are divided into several tables, one below the other. A table that is still
        wider than the page is scaled.
        """
        body = self._text(_latex, r"\textbf{{{}}}")
        caption = _latex(f"{self.title}. {self.note}".strip())
        parts = np.array_split(np.arange(body.shape[1]), max(1, -(-body.shape[1] // PAGE_COLUMNS)))
        tables = [body.iloc[:, p].to_latex(escape=False, column_format="l" + "r" * len(p)).strip() for p in parts]
        below = "\n\n\\medskip\n".join(f"{FIT}{{%\n{table}}}" for table in tables)
        return f"\\begin{{table}}[t]\n\\caption{{{caption}}}\n{below}\n\\end{{table}}\n"

    def html(self) -> str:
        """The table as an HTML element, without title and note. Bold text has the class ``best``."""
        return self._text(html.escape, '<b class="best">{}</b>').to_html(escape=False, border=0, justify="right")

    def _text(self, escape: Callable[[str], str], bold: str) -> pd.DataFrame:
        """Cells, index and headings as text of a markup language. Labels may contain any character.

        Args:
            escape: Function that escapes special characters.
            bold: Format string for the text of a bold cell.
        """
        body = self.body.map(lambda cell: bold.format(escape(cell.text)) if cell.bold else escape(cell.text))
        rows, columns = ([escape(str(label)) for label in labels] for labels in (body.index, body.columns))
        return body.set_axis(rows, axis=0).set_axis(columns, axis=1)


NOTHING: Any = Cell("–")


def _latex(text: str) -> str:
    return text.translate(LATEX_ESCAPES)


def without_tags(text: str) -> str:
    """Escape HTML tags in Markdown and join lines. Names in the text may come from untrusted files."""
    return re.sub(r"<(?=\S)", "&lt;", text.replace("\n", " "))
