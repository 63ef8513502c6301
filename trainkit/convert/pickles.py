"""Read others' pickles as plain data: nothing is imported, called or built. No torch here.

A pickle is a program. `read_pickle` runs it on an interpreter of its own that knows the operations
of data alone: a name of a function becomes a `Named`, a call of it a `Made`, which only remember
what was written. Names that a caller does not expect are refused, as every operation is that a good
file does not need. The idea of an own interpreter is torch's (`weights_only`); this one goes
further, as it builds no object but its own records.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from typing import Any

import attrs

from trainkit.types import CheckpointError

_MOST_BYTES = 64 * 1024 * 1024
_OPERATIONS_FREE = 1_000_000  # about a second
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"BINGET", "LONG_BINGET"}
_IGNORED = {"PROTO", "FRAME"}
_FILLABLE = "collections.OrderedDict"


@attrs.frozen
class Named:
    """A name that a pickle mentions, "module.name"; it has not been looked up."""

    name: str


@attrs.define(eq=False)
class Made:
    """What a pickle asks to be made: by which name, from what; "persistent" for what is elsewhere.

    Equality is identity, and so is the hash: no value of a pickle is ever hashed or compared.
    """

    name: str
    args: Any = ()
    state: Any = None
    pairs: list[tuple[Any, Any]] = attrs.field(factory=list)


@attrs.define(eq=False)
class Pairs:
    """A dict of a pickle, as the pairs that were written."""

    pairs: list[tuple[Any, Any]] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class _Machine:
    stack: list[Any] = attrs.field(factory=list)
    marks: list[int] = attrs.field(factory=list)
    memo: dict[int, Any] = attrs.field(factory=dict)


def read_pickle(data: bytes, *, allowed: Collection[str], where: object, beside: int = 0) -> Any:
    """Return what a pickle says, without executing any of it.

    Args:
        data: A pickle.
        allowed: The names, "module.name", that it may mention.
        where: The file, for the message.
        beside: How many bytes of tensors it describes: a good file has hundreds for each of its
            descriptions, so a large pickle beside nothing is refused after a million operations.

    Returns:
        Numbers, texts, bytes, lists and tuples as they are, dicts as `Pairs`, all else as `Named`
            and `Made`.

    Raises:
        CheckpointError: It mentions another name, uses an operation that data does not need, is too
            large, or is no pickle.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps([1, "a", (2.0, None)]), allowed=(), where="x")
        [1, 'a', (2.0, None)]
        >>> read_pickle(pickle.dumps(print), allowed=(), where="x")
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: read_pickle: x mentions 'builtins.print', which no good ...
    """
    if len(data) > _MOST_BYTES:
        raise _refusal(where, f"has a pickle of {len(data)} bytes; {_MOST_BYTES} are allowed")
    machine = _Machine()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count > _OPERATIONS_FREE + beside // 2:
                raise _refusal(where, f"has a pickle of over {count} operations for so few tensors")
            if operation.name == "STOP":
                return machine.stack.pop()
            _run(machine, operation.name, argument, allowed, where)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _refusal(where, f"is no good pickle: {str(error)[:200]}") from error
    raise _refusal(where, "has a pickle without an end")


def shown(value: Any) -> str:
    """Return a text from a pickle as it may be printed: short, and ASCII alone.

    Examples:
        >>> shown("weight"), shown([["deep"]])
        ('weight', 'a list')
    """
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return value[:200].encode("ascii", "backslashreplace").decode()


def _refusal(where: object, what: str) -> CheckpointError:
    return CheckpointError(
        f"read_pickle: {where} {what}",
        where=str(where),
        hint="nothing of it has been executed; where it comes from, save its tensors alone",
    )


def _run(
    machine: _Machine, operation: str, argument: Any, allowed: Collection[str], where: object
) -> None:
    stack = machine.stack
    if operation in _VALUES:
        stack.append(argument)
    elif operation in _PUTS:
        machine.memo[len(machine.memo) if argument is None else argument] = stack[-1]
    elif operation in _GETS:
        stack.append(machine.memo[argument])
    elif operation in _CONSTANTS:
        stack.append(_CONSTANTS[operation])
    elif operation in ("GLOBAL", "STACK_GLOBAL"):
        stack.append(_named(stack, argument, allowed, where))
    elif operation in _TUPLES:
        stack.append(tuple(_popped(stack, _TUPLES[operation])))
    elif operation in _OPERATIONS:
        _OPERATIONS[operation](machine)
    elif operation not in _IGNORED:
        raise _refusal(where, f"uses the operation {operation}, which no good file needs")


def _named(stack: list[Any], argument: Any, allowed: Collection[str], where: object) -> Named:
    parts = _popped(stack, 2) if argument is None else argument.split(" ", 1)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("it gives a name that is no text")
    name = ".".join(parts)
    if name not in allowed:
        raise _refusal(where, f"mentions {shown(name)!r}, which no good file of its kind does")
    return Named(name)


def _popped(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise ValueError("its stack is empty")
    values = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return values


def _since_mark(machine: _Machine) -> list[Any]:
    return _popped(machine.stack, len(machine.stack) - machine.marks.pop())


def _in_pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _put_pairs(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, Pairs) and getattr(target, "name", None) != _FILLABLE:
        raise ValueError("it puts items into what is no dict")
    target.pairs.extend(_in_pairs(values))


def _extend(machine: _Machine, values: list[Any]) -> None:
    if not isinstance(machine.stack[-1], list):
        raise TypeError("it appends to what is no list")
    machine.stack[-1].extend(values)


def _make(machine: _Machine) -> None:
    made, args = _popped(machine.stack, 2)
    if not isinstance(made, Named) or not isinstance(args, tuple):
        raise TypeError("it calls what has no name")
    machine.stack.append(Made(made.name, args))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], Made):
        raise TypeError("it gives a state to what was not made")
    machine.stack[-1].state = state


_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "MARK": lambda machine: machine.marks.append(len(machine.stack)),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_DICT": lambda machine: machine.stack.append(Pairs()),
    "TUPLE": lambda machine: machine.stack.append(tuple(_since_mark(machine))),
    "APPEND": lambda machine: _extend(machine, _popped(machine.stack, 1)),
    "APPENDS": lambda machine: _extend(machine, _since_mark(machine)),
    "SETITEM": lambda machine: _put_pairs(machine, _popped(machine.stack, 2)),
    "SETITEMS": lambda machine: _put_pairs(machine, _since_mark(machine)),
    "REDUCE": _make,
    "NEWOBJ": _make,
    "BUILD": _build,
    "BINPERSID": lambda machine: machine.stack.append(Made("persistent", machine.stack.pop())),
}
