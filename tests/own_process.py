"""Let this process be a recipe's own for a while, as inside `run_main`, which would end it."""

import contextlib

from trainkit.run import errors


@contextlib.contextmanager
def own_process():
    """Inside the block `open_run` traps signals, and raises SystemExit in place of an error."""
    errors._OWN_PROCESS.set()
    try:
        yield
    finally:
        errors._OWN_PROCESS.clear()
