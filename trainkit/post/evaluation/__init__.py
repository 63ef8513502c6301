"""Evaluation: log-probabilities of texts and choices, and `lm-eval`.

`make_scorer` makes a scorer of examples from a model in any layout. `read_texts` and `read_choices`
make examples from files, `write_results` writes a file of results that can be resumed, and
`perplexity` and `accuracy` summarize it. `score_corpus` stores log-probabilities of a frozen model
as columns of a token file. `make_evaluator` is for a run's held-out rows.
"""

from trainkit.post.evaluation.choices import (
    accuracy,
    make_choice_item,
    make_choice_record,
    read_choices,
)
from trainkit.post.evaluation.columns import (
    make_logprob_columns,
    score_corpus,
    score_reference,
)
from trainkit.post.evaluation.harness import (
    evaluate_tasks,
    make_harness_model,
    open_tasks,
)
from trainkit.post.evaluation.held_out import make_evaluator
from trainkit.post.evaluation.results import read_results, score_in_groups, write_results
from trainkit.post.evaluation.score import (
    make_scorer,
)
from trainkit.post.evaluation.texts import make_text_item, make_text_record, perplexity, read_texts

__all__ = [
    "accuracy",
    "evaluate_tasks",
    "make_choice_item",
    "make_choice_record",
    "make_evaluator",
    "make_harness_model",
    "make_logprob_columns",
    "make_scorer",
    "make_text_item",
    "make_text_record",
    "open_tasks",
    "perplexity",
    "read_choices",
    "read_results",
    "read_texts",
    "score_corpus",
    "score_in_groups",
    "score_reference",
    "write_results",
]
