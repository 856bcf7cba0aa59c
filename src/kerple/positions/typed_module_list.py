"""`Modules`: `torch.nn.ModuleList` with a type of its elements, for type checkers.

`Modules` does not exist at run time. Import it under ``if TYPE_CHECKING``.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class Modules(nn.ModuleList, Generic[Element]):
        def __getitem__(self, index: int) -> Element: ...  # type: ignore[override]

        def __iter__(self) -> Iterator[Element]: ...
