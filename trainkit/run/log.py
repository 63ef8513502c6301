"""The log of a run: one logger; its handlers print messages, and add warnings to events.jsonl."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator

from trainkit.files import print_to, print_to_stderr
from trainkit.types import Log, Share

COLUMNS = 80
"""How wide a line of a log is at most, outside a terminal."""


def make_logger(share: Share) -> logging.Logger:
    """Return the logger of a run, which prints messages on the first rank and never fails.

    Messages of level INFO go to stdout. Warnings go to stderr, with "warning: " before them, and
    are printed on every rank. What nobody reads any more is lost, and the run goes on.

    Args:
        share: Which rank of how many, `ps.world.share`.

    Examples:
        >>> log = make_logger(Share(0, 2)).info
        >>> log("reading the corpus")
        reading the corpus
        >>> make_logger(Share(1, 2)).info("reading the corpus")
    """
    level = logging.INFO if share.index == 0 else logging.WARNING
    # Not logging.getLogger: two runs of one process, as in a notebook, would share its handlers.
    logger = logging.Logger("trainkit.run", level)  # noqa: LOG001
    # A handler, and so a lock, for each stream: a reader that stalls stdout must not stop warnings.
    stdout = _Handler(print_message)
    stdout.addFilter(lambda record: record.levelno < logging.WARNING)
    logger.addHandler(stdout)
    logger.addHandler(_Handler(print_warning, logging.WARNING))
    return logger


@contextlib.contextmanager
def add_handler(logger: logging.Logger, write: Log, *, level: int = logging.INFO) -> Iterator[None]:
    """Pass the messages of a logger to a function as well, from a level on, inside the block.

    Args:
        logger: The logger, as `make_logger` returns it.
        write: Called with each message, on the thread that logs it. It must not raise.
        level: The lowest level that is passed on.

    Examples:
        >>> warnings, logger = [], make_logger(Share(0, 1))
        >>> with add_handler(logger, warnings.append, level=logging.WARNING):
        ...     logger.info("step 1")
        step 1
        >>> warnings
        []
    """
    handler = _Handler(write, level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Handler(logging.Handler):
    """Calls a function with each message."""

    def __init__(self, write: Log, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record.getMessage())


def print_message(message: str) -> None:
    """Print a message on stdout at once; it is lost where stdout is closed or has no reader.

    Its lines are folded (`fold_lines`): a terminal would break them within words.

    Effects:
        Writes to stdout. When its reader has left, its file becomes the null device, for the rest
        of the process: nothing that is printed later, not even at exit, can fail.

    Examples:
        >>> print_message("step 1")
        step 1
    """
    columns = COLUMNS
    with contextlib.suppress(AttributeError, ValueError):  # of None, and of a closed stream
        if sys.stdout.isatty():
            columns = shutil.get_terminal_size((COLUMNS, 24)).columns
    print_to(fold_lines(message, columns=columns), sys.stdout)


def fold_lines(text: str, *, columns: int = COLUMNS) -> str:
    """Return a text with lines of at most 80 columns, broken at spaces.

    What continues a line is indented by two columns more. A word that is longer, as a path, stays
    whole.

    Args:
        text: One line or several.
        columns: The width.

    Examples:
        >>> print(fold_lines("the run is in runs/mine; its loss is plotted there", columns=30))
        the run is in runs/mine; its
          loss is plotted there
    """
    return "\n".join(part for line in text.split("\n") for part in _fold_line(line, columns))


def _fold_line(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return textwrap.wrap(
        line,
        columns,
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_warning(message: str) -> None:
    """Print "warning: " and a message on stderr at once; see `print_message`.

    Effects:
        Writes to stderr, and never fails.
    """
    print_to_stderr(f"warning: {message}")
