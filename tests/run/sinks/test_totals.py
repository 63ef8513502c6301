"""The lines at the end of a run: what all its steps come to, in 80 columns."""

from trainkit.run.sinks.totals import describe_totals


def test_the_totals_are_those_of_all_steps_a_repeated_one_counts_once():
    first = {
        "step": 1,
        "tokens": 90,
        "tokens_processed": 100,
        "documents": 7,
        "padding": 0.5,
        "tokens/web": 75,
        "tokens/code": 25,
        "seconds/forward": 1.0,
        "seconds/save": 0.5,
        "memory_peak": 2**30,
        "memory_rank": 1,
    }
    second = first | {"step": 2, "padding": 0.0, "tokens/web": 100, "tokens/code": 0}
    second |= {"memory_peak": 3 * 2**29, "memory_rank": 0, "seconds/forward": 2.5}
    third = second | {"step": 3, "memory_peak": 2**29, "memory_rank": 2}
    assert describe_totals([first, second, {"other": 1}, third, third]) == [
        "time by phase: forward 80.0%, save 20.0%",
        # 300 of 400 positions: no mean of the shares of steps.
        "300 tokens, 270 of them in the loss, of 21 documents; padding 25.0%",
        "tokens by corpus: web 91.7%, code 8.3%",
        "memory: at most 1.50 GiB, on rank 0",
    ]


def test_what_has_no_room_is_counted_and_no_name_garbles_a_terminal():
    corpora = {f"tokens/a-corpus-of-name-{i:02}": 100 - i for i in range(30)}
    corpora |= {"tokens/" + "x" * 90: 1, "tokens/\x1b[31mred": 10**4}
    (line,) = describe_totals([{"step": 1, **corpora}])
    assert line.startswith("tokens by corpus: �[31mred 79.6%, a-corpus-of-name-00 0.8%, ")
    assert line.endswith(", 30 more 19.6%")
    assert len(line) <= 80
    (line,) = describe_totals([{"step": 1, "tokens/" + "x" * 90: 1}])
    assert line == "tokens by corpus: 1 more 100.0%"


def test_what_a_run_does_not_have_is_left_out():
    assert describe_totals([]) == []
    assert describe_totals([{"step": 1, "loss": None, "tokens": 3, "seconds": 2.0}]) == []
    padding = {"step": 1, "tokens": 0, "tokens_processed": 0, "documents": 0, "padding": 1.0}
    assert describe_totals([padding]) == []
