"""Mixins: how trainkit changes what an existing module computes.

Adapters, float8, quantised weights, fake quantisation and tensor parallelism each replace the
forward pass of modules that exist already, ours or Hugging Face's, without renaming a parameter.
Each of them is an ordinary class, a mixin, whose methods call `super()`. `mix_in_` gives a module
the class `<Mixin><Class of the module>` with both as bases, and this file is the only one that
assigns `__class__`:

    Linear  ->  Float8Linear(Float8, Linear)  ->  AdaptedFloat8Linear(Adapted, Float8Linear)

FSDP2 does the same (`FSDPLinear`), which makes the two compose: `isinstance`, state dicts,
hooks and `copy.deepcopy` see the module that was there before. `torch.nn.utils.parametrize` would
not do: it renames parameters, and it replaces a weight where these replace a product.

`wrap_forward_` is for what surrounds the forward pass of one module, and needs none of its methods:
recomputation, offloading, casts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType, new_class
from typing import Any

Forward = Callable[..., Any]
"""A forward pass as a function, `forward(module, *args, **kwargs)`."""


@cache
def mixed_class(mixin: type, base: type) -> Any:
    """Return the class `<Mixin><Base>` with the bases (mixin, base), the same one each time.

    One class for all modules of a kind: `torch.compile` shares code between modules of one class.

    Examples:
        >>> class Loud: ...
        >>> class Layer: ...
        >>> mixed_class(Loud, Layer).__mro__[:3]
        (<class '...LoudLayer'>, <class '...Loud'>, <class '...Layer'>)
        >>> mixed_class(Loud, Layer) is mixed_class(Loud, Layer)
        True
    """
    mixed = new_class(f"{mixin.__name__}{base.__name__}", (mixin, base))
    # It would be `types`, where `new_class` itself is.
    mixed.__module__ = mixin.__module__
    return mixed


def mix_in_(target: Any, mixin: type, **fields: Any) -> None:
    """Put the methods of a mixin in front of those of an object: a module or a tensor.

    Args:
        target: The object.
        mixin: A class without `__init__`, since the object exists already. Its methods reach the
            earlier ones by `super()`.
        **fields: The attributes that the mixin declares.

    Effects:
        Replaces the class of `target`, and sets the attributes.

    Examples:
        >>> from torch import nn, ones
        >>> class Scaled:
        ...     scale: float
        ...
        ...     def forward(self, x):
        ...         return self.scale * super().forward(x)
        >>> layer = nn.Identity()
        >>> mix_in_(layer, Scaled, scale=2.0)
        >>> type(layer).__name__, layer(ones(1))
        ('ScaledIdentity', tensor([2.]))
    """
    for name, value in fields.items():
        setattr(target, name, value)
    target.__class__ = mixed_class(mixin, type(target))


def take_out_(target: Any, mixin: type) -> None:
    """Undo `mix_in_`; mixins that came later stay.

    Effects:
        Replaces the class of `target`.

    Raises:
        TypeError: The object does not have the mixin.

    Examples:
        >>> from torch import nn
        >>> class Doubled: ...
        >>> class Shown: ...
        >>> layer = nn.Identity()
        >>> for mixin in (Doubled, Shown):
        ...     mix_in_(layer, mixin)
        >>> take_out_(layer, Doubled)
        >>> type(layer).__name__
        'ShownIdentity'
    """
    target.__class__ = _without(mixin, type(target))


def _without(mixin: type, mixed: type) -> type:
    if not issubclass(mixed, mixin):
        raise TypeError(f"take_out_: {mixed.__name__} does not have the mixin {mixin.__name__}")
    # A mixed class has two bases, the mixin and the class before it: a list, outermost first.
    outer, *rest = mixed.__bases__
    if outer is mixin:
        return rest[0]
    return mixed_class(outer, _without(mixin, rest[0]))


def wrap_forward_(module: Any, wrap: Callable[[Forward], Forward]) -> None:
    """Replace the forward pass of one module by a function of it.

    Args:
        module: The module.
        wrap: Takes `forward(module, *args, **kwargs)`, and returns such a function.

    Effects:
        Sets the attribute `forward` of the module.

    Examples:
        >>> from torch import nn, ones
        >>> layer = nn.Identity()
        >>> wrap_forward_(layer, lambda forward: lambda self, x: 2 * forward(self, x))
        >>> layer(ones(1))
        tensor([2.])
    """
    # A bound method: deepcopy binds it to the copy, where a closure would run the original.
    module.forward = MethodType(wrap(module.forward.__func__), module)
