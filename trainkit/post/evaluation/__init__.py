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
from trainkit.post.evaluation.results import read_results, score_in_groups, write_results
from trainkit.post.evaluation.score import (
    ExampleScores,
    Scorer,
    TopKScorer,
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
    "TopKScorer",
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
