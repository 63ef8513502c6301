"""What stands around a run: its directory, its exit code and last words, signals and watch.

The errors need no torch, so this table of contents imports its files when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.runtime.directory import make_run_dir
    from trainkit.runtime.errors import SAVED, error_code, leave, report_errors
    from trainkit.runtime.limits import Limits
    from trainkit.runtime.lock import run_lock
    from trainkit.runtime.reproducible import deterministic
    from trainkit.runtime.run import Loop, Run, open_run
    from trainkit.runtime.signals import stop_votes, trap_signals
    from trainkit.runtime.startup import agree_at_start, code_facts, probe
    from trainkit.runtime.watchdog import watch

__all__ = [
    "SAVED",
    "Limits",
    "Loop",
    "Run",
    "agree_at_start",
    "code_facts",
    "deterministic",
    "error_code",
    "leave",
    "make_run_dir",
    "open_run",
    "probe",
    "report_errors",
    "run_lock",
    "stop_votes",
    "trap_signals",
    "watch",
]

_HOME = {
    "SAVED": "errors",
    "Limits": "limits",
    "Loop": "run",
    "Run": "run",
    "agree_at_start": "startup",
    "code_facts": "startup",
    "deterministic": "reproducible",
    "error_code": "errors",
    "leave": "errors",
    "make_run_dir": "directory",
    "open_run": "run",
    "probe": "startup",
    "report_errors": "errors",
    "run_lock": "lock",
    "stop_votes": "signals",
    "trap_signals": "signals",
    "watch": "watchdog",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
