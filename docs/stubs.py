"""Writes positions/__init__.pyi, which lists the strategies for type checkers; `make format` runs it.

With ``--check`` it writes nothing, and ends with status 1 if the file is not current.
"""

import ast
import inspect
import sys
from pathlib import Path

from kerple import positions

HEAD = "# Written by docs/stubs.py; make format writes it again.\n# ruff: noqa\n# fmt: off\n"


def stubs() -> str:
    """Return the imports and public functions of positions/__init__.py, and an import of each strategy."""
    tree = ast.parse(inspect.getsource(positions))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    for function in functions:
        function.body = [ast.Expr(ast.Constant(...))]
    names = [*positions.__all__, *positions.names()]
    strategies = [f"from {kind.__module__} import {name}" for name, kind in positions.strategies().items()]
    return "\n".join(
        [HEAD, *map(ast.unparse, imports), *strategies, f"\n__all__ = {names}\n", *map(ast.unparse, functions), ""]
    )


if __name__ == "__main__":
    path = Path(positions.__file__).with_suffix(".pyi")
    if "--check" not in sys.argv:
        path.write_text(stubs(), encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != stubs():
        sys.exit(f"{path} is not current; run make format")
