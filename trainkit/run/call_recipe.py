"""Call a recipe's `main` for what supervises this process, such as Ray Train."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.run.config import load_config
from trainkit.run.errors import get_exit_code, report_errors
from trainkit.run.sinks.jsonl import read_metrics
from trainkit.types import CheckpointError, ConfigError, DataError, NumericsError, PreemptedError
from trainkit.weights.checkpoint.bucket_runs import find_run_folder

# The next start would end the same way; or a stop was requested, and nothing was saved.
_NOT_AGAIN = {
    error.code for error in (ConfigError, DataError, CheckpointError, NumericsError, PreemptedError)
}


def call_recipe(recipe: str | Path, argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Import a recipe, call its `main`, and return its exit code and the metrics of its last step.

    A supervisor starts its workers again when one raises. So an error is raised only if the next
    start may not meet it: a lost peer, a disk, a bug. Others are reported on stderr as
    `report_errors` does, and their exit code is returned: 64 to 67 (refused), and 76 (a stop that
    could not save).

    Args:
        recipe: Its file.
        argv: Its flags.

    Returns:
        The exit code, and the last line of `read_metrics`; {} without a step or a run directory.

    Effects:
        Those of `main`. The recipe's folder is put into `sys.path`, as for a script.

    Examples:
        >>> from trainkit.files import find_recipes
        >>> call_recipe(find_recipes() / "pretrain.py", ["--stpes", "3"])
        (64, {})
    """
    recipe = Path(recipe).absolute()
    if str(recipe.parent) not in sys.path:
        sys.path.insert(0, str(recipe.parent))
    module = importlib.import_module(recipe.stem)
    try:
        code = module.main(argv) or 0
    except Exception as error:
        code = get_exit_code(error)
        if code not in _NOT_AGAIN:
            raise
        with contextlib.suppress(SystemExit), report_errors():
            raise
        return code, {}
    out = load_config(module.Config, argv).out if hasattr(module, "Config") else None
    lines = read_metrics(find_run_folder(out)) if out else []
    return code, lines[-1] if lines else {}
