"""Pairs of answers that need no data: the same words in another order."""

from trainkit.corpora import disorder_answers


def test_both_answers_have_the_same_words_in_an_order_of_the_answer_alone():
    answers = ["Return the sum of all x.", "a b", "one", "no no", "", "Close the file, if any."]
    turns = [
        (str(i), {"messages": [{"content": "q"}, {"content": a}]}) for i, a in enumerate(answers)
    ]
    pairs = dict(disorder_answers(turns))
    assert list(pairs) == ["0", "1", "5"]
    for name, pair in pairs.items():
        assert pair["chosen"] == answers[int(name)] != pair["rejected"]
        assert sorted(pair["chosen"].split()) == sorted(pair["rejected"].split())
    assert dict(disorder_answers(turns[5:]))["5"] == pairs["5"]
