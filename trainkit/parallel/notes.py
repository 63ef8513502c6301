"""Notes: named values that trainkit attaches to modules and parameters.

A transform makes a choice in one place, and a function elsewhere needs it later: the dtype that
`precision` computes in, the position of a pipeline stage, the parameters whose gradients are
partial sums. Modules and parameters are torch's classes and have no field for such a value. A
`Note` is that field. Each one is a constant at the top of the file that writes and reads it, and
nothing else in trainkit adds marker attributes to torch objects: `vars(module)` shows all notes
of a module as `_trainkit_<name>`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs
from torch import Tensor, nn

T = TypeVar("T")


@attrs.frozen(eq=False)
class Note(Generic[T]):
    """A named value on a module or a parameter, with a default where nothing was written.

    A copy of a module has the same notes. A copy of a parameter has none, since torch copies only
    its values.

    Examples:
        >>> checked = Note("checked", default=False)
        >>> layer = nn.Linear(1, 1)
        >>> checked.write_(layer, True)
        >>> checked.read(layer), checked.read(layer.weight)
        (True, False)
    """

    name: str
    default: T = attrs.field(kw_only=True)

    def write_(self, owner: nn.Module | Tensor, value: T) -> None:
        """Attach the value, in place of an earlier one.

        Effects:
            Sets one attribute of `owner`.
        """
        setattr(owner, f"_trainkit_{self.name}", value)

    def read(self, owner: nn.Module | Tensor) -> T:
        """Return the value, also through a wrapper of `torch.compile`, or the default."""
        value: Any = getattr(owner, f"_trainkit_{self.name}", self.default)
        return value

    def is_on(self, owner: nn.Module | Tensor) -> bool:
        """Return whether a value was attached to this very object, not to one that it wraps."""
        return f"_trainkit_{self.name}" in vars(owner)

    def read_all(self, model: nn.Module) -> list[T]:
        """Return the values on a model and its submodules, each where it was attached."""
        return [self.read(module) for module in model.modules() if self.is_on(module)]
