"""What a thread of this process is doing, read off its Python stack from another thread."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from trainkit.run.peers import IN_UNIT

FSDP_UNIT_FILE = "/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
"""The end of the file in which FSDP2 gathers a unit and reduces its gradients."""

_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<")


def read_stack(thread: int) -> list[tuple[str, str, int]]:
    """Return (file, function, line) of a thread's innermost 100 Python frames, innermost first.

    Args:
        thread: As from `threading.get_ident()`; the list is empty if there is no such thread.

    Examples:
        >>> import threading
        >>> read_stack(threading.get_ident())[0][1]
        'read_stack'
    """
    frames = list[Any]()
    innermost = sys._current_frames().get(thread)  # noqa: SLF001 (its public name)
    if innermost is None:
        return []
    # One call of C code walks the frames, so no other thread runs meanwhile. Walking them in Python
    # while the thread goes on has crashed processes (3.11.7). So has `faulthandler` with all
    # threads, while autograd's threads begin or end.
    with contextlib.suppress(AttributeError):  # of None, behind the outermost frame
        frames.extend(accumulate(repeat("f_back", 99), getattr, initial=innermost))
    known = (frame for frame in frames if frame is not None)
    return [(x.f_code.co_filename, x.f_code.co_name, x.f_lineno or 0) for x in known]


def is_in_collective(thread: int) -> bool:
    """Return whether a thread is inside torch.distributed, other than to compute on a DTensor.

    Examples:
        >>> import threading
        >>> is_in_collective(threading.get_ident())
        False
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (its public name)
    file = "" if frame is None else frame.f_code.co_filename
    return "/torch/distributed/" in file and "/torch/distributed/tensor/" not in file


def describe_stack(thread: int) -> str:
    """Return the three innermost functions of the recipe or of trainkit, outermost first.

    If the thread is in a unit of FSDP2, what FSDP2 does there comes last.

    Examples:
        >>> import threading
        >>> describe_stack(threading.get_ident())
        '...describe_stack (stacks.py:...) > read_stack (stacks.py:...)'
    """
    stack = read_stack(thread)
    own = [
        f"{function} ({Path(file).name}:{line})"
        for file, function, line in stack
        if "/trainkit/" in file
        or not ("/site-packages/" in file or file.startswith(_STANDARD_LIBRARY))
        if not file.endswith("/trainkit/run/errors.py")
    ]
    in_unit = [function for file, function, _ in stack if file.endswith(FSDP_UNIT_FILE)]
    return " > ".join([*reversed(own[:3]), *(f"{IN_UNIT} ({x})" for x in in_unit[:1])])
