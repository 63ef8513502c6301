"""Pairs of answers: both halves on one side of what is held out, and of about one length."""

from trainkit.corpora import contrast_answers, held_out


def test_answers_are_told_apart_by_no_length_and_stay_on_their_side():
    words = ["alpha", "be", "gamma ray", "delta", "epsilon", "z"]
    talks = [(f"{i}.py", f"f{i}()", f"{words[i % 6]} {i % 50}") for i in range(200)]
    turns = [(name, {"messages": [{"content": q}, {"content": a}]}) for name, q, a in talks]
    pairs = list(contrast_answers(turns))
    assert [(name, p["prompt"], p["chosen"]) for name, p in pairs] == talks
    sides = {side: {a for name, _, a in talks if held_out(name) is side} for side in (True, False)}
    assert all(len(answers) > 3 for answers in sides.values())
    for name, p in pairs:
        assert p["rejected"] in sides[held_out(name)] - {p["chosen"]}
    longer = [len(p["rejected"]) - len(p["chosen"]) for n, p in pairs if not held_out(n)]
    assert max(map(abs, longer)) <= 2
