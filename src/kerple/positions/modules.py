"""`torch.nn.ModuleList` with the type of its elements, for the type checker alone: torch's own has none."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class Modules(nn.ModuleList, Generic[Element]):
        def __getitem__(self, index: int) -> Element: ...  # type: ignore[override]

        def __iter__(self) -> Iterator[Element]: ...
