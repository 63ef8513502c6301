"""The log of a run: messages to stdout, warnings to stderr and to events.jsonl, none lost."""

import io
import logging
import os
import sys
import threading

from trainkit.run.log import add_handler, fold_lines, make_logger
from trainkit.run.sinks import open_run_sinks, read_jsonl
from trainkit.types import Share, log_info, log_warning


def test_messages_are_printed_on_the_first_rank_and_warnings_on_all(capfd):
    for rank in range(2):
        logger = make_logger(Share(rank, 2))
        logger.info("rank %d", rank)
        logger.info("100 % read")  # no format: messages may hold anything
        logger.warning("slow rank %d", rank)
    out, err = capfd.readouterr()
    assert out == "rank 0\n100 % read\n"
    assert err == "warning: slow rank 0\nwarning: slow rank 1\n"


LONG = "the run is in runs/mine; its loss is plotted in runs/mine/loss.png, and the rest is there"


def test_lines_are_folded_at_spaces_to_the_width_of_the_terminal_or_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for is_terminal, columns in ((False, 80), (True, 60)):
        stream = io.StringIO()
        stream.isatty = lambda found=is_terminal: found
        monkeypatch.setattr(sys, "stdout", stream)
        make_logger(Share(0, 1)).info(f"{LONG}\n    a row  of a table")
        first, second, *more = stream.getvalue().splitlines()
        assert len(first) <= columns < len(f"{first} {second.split()[0]}")
        assert f"{first} {second.strip()}" == LONG
        assert second.startswith("  ")
        assert more == ["    a row  of a table"]


def test_a_word_that_is_too_long_stays_whole():
    path = "/" + "x" * 100
    assert fold_lines(f"it is in {path} now") == f"it is in\n  {path}\n  now"
    assert fold_lines("") == ""
    assert fold_lines("a\n\nb") == "a\n\nb"


def test_each_logger_has_its_own_handlers_and_configures_nothing(capfd):
    before = list(logging.getLogger().handlers)
    first, second = make_logger(Share(0, 1)), make_logger(Share(0, 1))
    messages = []
    with add_handler(first, messages.append):
        first.info("a")
        second.info("b")
    first.info("c")
    assert messages == ["a"]
    assert capfd.readouterr().out == "a\nb\nc\n"
    assert logging.getLogger().handlers == before


def test_warnings_of_a_run_are_events_while_its_sinks_are_open(tmp_path, capfd):
    logger = make_logger(Share(0, 1))
    logger.warning("before")
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=2, logger=logger) as (record, _):
        logger.info("a message")
        record(1, {"loss": 1.0})
        logger.warning("within")
    logger.warning("after")
    events = [x for x in read_jsonl(tmp_path / "events.jsonl") if x["event"] == "warning"]
    assert [(x["step"], x["what"]) for x in events] == [(1, "within")]
    err = capfd.readouterr().err
    assert err == "warning: before\nwarning: within\nwarning: after\n"


def test_a_reader_that_stalls_stdout_stops_no_warning(monkeypatch, capfd):
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        logger = make_logger(Share(0, 1))
        stalled = threading.Thread(target=logger.info, args=("x" * 200_000,), daemon=True)
        stalled.start()  # the pipe holds 64 KiB
        stalled.join(0.5)
        assert stalled.is_alive()
        warning = threading.Thread(target=logger.warning, args=("a rank hangs",), daemon=True)
        warning.start()
        warning.join(10)
        assert not warning.is_alive()
        left = 200_001  # bytes to read: asking the pipe for one more would wait forever
        while left:
            left -= len(os.read(read, left))
        stalled.join()
        monkeypatch.undo()
    os.close(read)
    assert capfd.readouterr().err == "warning: a rank hangs\n"


def test_the_default_of_log_is_the_logger_of_the_library(caplog):
    with caplog.at_level("INFO", logger="trainkit"):
        log_info("5 % packed")
        log_warning("passed over")
    assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
        ("INFO", "5 % packed"),
        ("WARNING", "passed over"),
    ]
