"""How much of a run's time stands: by hand, and as a run that went on twice tells it."""

import time

from trainkit.run.sinks.open_run_sinks import open_run_sinks, summarize_run
from trainkit.run.sinks.timing import measure_goodput, suggest_save_interval
from trainkit.types import Share


def start(time, step, repeated=0):
    return {"event": "start", "time": time, "step": step, "repeated": repeated}


def steps(count, seconds=2.0):
    return [{"step": step, "seconds": seconds} for step in range(1, count + 1)]


def test_an_uninterrupted_run():
    events = [start(100.0, 0), {"event": "save", "time": 111.0, "step": 5, "blocked": 0.25}]
    found = measure_goodput(steps(5), [*events, {"event": "end", "time": 112.5, "step": 5}])
    assert (found.productive, found.wall, found.share) == (10.0, 12.5, 0.8)
    assert (found.steps, found.repeated, found.starts) == (5, 0, 1)
    assert (found.saves, found.blocked) == (1, 0.25)


def test_lost_steps_and_restarts_lower_it_and_a_kill_leaves_no_end():
    events = [
        start(0.0, 0),
        {"event": "save", "time": 8.0, "step": 4},
        {"event": "save", "time": 9.0, "step": 4, "error": "disk full"},
        start(50.0, 4, repeated=3),  # killed after step 7, down until 50
        {"event": "evaluation", "time": 53.0, "step": 5},
    ]
    found = measure_goodput(steps(10), events)
    assert found.wall == 7 * 2.0 + 6 * 2.0  # the steps say how long each lived at least
    assert found.share == 20 / 26
    assert found.down == 50.0 - 14.0
    assert (found.repeated, found.starts, found.saves) == (3, 2, 1)


def test_the_hours_in_which_nothing_ran_are_no_part_of_it():
    night = [start(0.0, 0), {"event": "end", "time": 5.0}, start(36_005.0, 2), {"time": 36_010.0}]
    found = measure_goodput(steps(4), night)
    assert (found.share, found.wall, found.down) == (0.8, 10.0, 36_000.0)
    slower = [*night[:1], start(3.0, 2, repeated=4)]  # no process outlives the start of the next
    assert measure_goodput(steps(6), slower).wall == 3.0 + 8.0


def test_nothing_is_no_goodput_and_more_than_all_is_all():
    assert measure_goodput([], []).share == 0
    assert measure_goodput(steps(2), []).share == 0
    assert measure_goodput(steps(2), [start(5.0, 0), {"event": "end", "time": 6.0}]).share == 1
    broken = [{"step": 1, "seconds": None}, {"step": 2}, {"other": 1}]
    assert measure_goodput(broken, [start(5.0, 0), {"event": "end", "time": 6.0}]).productive == 0


def test_the_planned_interval_is_the_best_one():
    stall, between_failures, restart = 5.0, 10_800.0, 180.0
    best = suggest_save_interval(stall=stall, between_failures=between_failures)
    lost = {
        x: stall / x + (x / 2 + restart) / between_failures for x in (0.9 * best, best, 1.1 * best)
    }
    assert lost[best] == min(lost.values())
    assert lost[best] < 0.05


def test_a_run_tells_its_goodput_over_all_its_restarts(tmp_path):
    begin = time.time()
    for first, last in ((0, 6), (4, 8)):  # the second goes on from a checkpoint of step 4
        with open_run_sinks(tmp_path, Share(0, 1), step=first, last=8) as (log, event):
            for step in range(first + 1, last + 1):
                before = time.perf_counter()
                time.sleep(0.002)
                log(step, {"seconds": time.perf_counter() - before})
            event("save", step=last, blocked=0.05)
    whole = time.time() - begin
    summary = summarize_run(tmp_path)
    assert summary.startswith("goodput ")
    assert ": 8 steps, 2 repeated, 2 starts, 2 saves that blocked for 0.1 s, " in summary
    assert 0 < float(summary.split()[1].rstrip("%:")) < 100
    assert float(summary.split(", ")[-2].split()[0]) <= whole + 0.1
    assert summary.endswith(" s in which nothing ran")
