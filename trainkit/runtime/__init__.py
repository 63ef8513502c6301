"""What stands around a run: its directory, its exit code and its last words.

The errors need no torch, so this table of contents imports its files when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.runtime.directory import make_run_dir
    from trainkit.runtime.errors import error_code, needs_extra, report_errors

_HOME = {
    "error_code": "errors",
    "make_run_dir": "directory",
    "needs_extra": "errors",
    "report_errors": "errors",
}

__all__ = ["error_code", "make_run_dir", "needs_extra", "report_errors"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
