"""Pairs of answers that need no data: one that ends, and one that goes on."""

from trainkit.text.corpora.pairs import prolong_answers


def test_a_rejected_answer_is_the_chosen_one_and_that_of_the_next_question():
    answers = ["Return the sum of all x.", "a b", "one"]
    turns = [
        (str(i), {"messages": [{"content": "q"}, {"content": a}]}) for i, a in enumerate(answers)
    ]
    pairs = dict(prolong_answers(iter(turns)))
    assert [pair["chosen"] for pair in pairs.values()] == answers
    assert [pair["rejected"] for pair in pairs.values()] == [
        "Return the sum of all x. a b",
        "a b one",
        "one Return the sum of all x.",
    ]
