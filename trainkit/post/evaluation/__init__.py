"""Evaluation: log-probabilities of texts and of choices, line by line, and `lm-eval` over them.

`make_scorer` makes a function of a model in any layout: from examples to what each token of them
scores. `read_texts` and `read_choices` make examples of files, `write_results` results that a
killed run goes on with, `perplexity` and `accuracy` the numbers of them. `score_corpus` stores what
a frozen model finds as columns of a token file. `make_evaluator` is for a run's own held-out rows.
"""

from trainkit.post.evaluation.choices import (
    accuracy,
    make_choice_item,
    make_choice_record,
    read_choices,
)
from trainkit.post.evaluation.columns import (
    Measure,
    make_logprob_columns,
    make_top_k_columns,
    score_corpus,
    score_reference,
)
from trainkit.post.evaluation.examples import (
    EvalItem,
    Example,
    encode_continuation,
    get_prefix_id,
    make_example,
    make_rolling_windows,
)
from trainkit.post.evaluation.harness import (
    Generate,
    evaluate_tasks,
    make_harness_model,
    open_tasks,
)
from trainkit.post.evaluation.held_out import make_evaluator
from trainkit.post.evaluation.lines import read_results, score_in_groups, write_results
from trainkit.post.evaluation.score import (
    ExampleScores,
    Scorer,
    TopWords,
    make_scorer,
    make_top_k_scorer,
    token_scores,
)
from trainkit.post.evaluation.texts import make_text_item, make_text_record, perplexity, read_texts

__all__ = [
    "EvalItem",
    "Example",
    "ExampleScores",
    "Generate",
    "Measure",
    "Scorer",
    "TopWords",
    "accuracy",
    "encode_continuation",
    "evaluate_tasks",
    "get_prefix_id",
    "make_choice_item",
    "make_choice_record",
    "make_evaluator",
    "make_example",
    "make_harness_model",
    "make_logprob_columns",
    "make_rolling_windows",
    "make_scorer",
    "make_text_item",
    "make_text_record",
    "make_top_k_columns",
    "make_top_k_scorer",
    "open_tasks",
    "perplexity",
    "read_choices",
    "read_results",
    "read_texts",
    "score_corpus",
    "score_in_groups",
    "score_reference",
    "token_scores",
    "write_results",
]
