"""Evaluation: log-probabilities of texts and of choices, line by line, and `lm-eval` over them.

`bind_score` makes a function of a model in any layout: from examples to what each token of them
scores. `read_texts` and `read_choices` make examples of files, `write_lines` results that a killed
run goes on with, `perplexity` and `accuracy` the numbers of them. `score_corpus` stores what a
frozen model finds as columns of a token file. `bind_loss` is for a run's own held-out rows.
"""

from trainkit.post.evaluation.choices import accuracy, choice_item, choice_line, read_choices
from trainkit.post.evaluation.columns import Measure, logprob_columns, score_corpus, top_columns
from trainkit.post.evaluation.examples import (
    Example,
    Item,
    encode_pair,
    make_example,
    prefix_id,
    rolling_windows,
)
from trainkit.post.evaluation.harness import Generate, evaluate_tasks, harness_model, open_tasks
from trainkit.post.evaluation.held_out import bind_loss
from trainkit.post.evaluation.lines import in_groups, read_lines, write_lines
from trainkit.post.evaluation.score import (
    Score,
    Scored,
    TopWords,
    bind_score,
    bind_top_words,
    token_scores,
)
from trainkit.post.evaluation.texts import perplexity, read_texts, text_item, text_line

__all__ = [
    "Example",
    "Generate",
    "Item",
    "Measure",
    "Score",
    "Scored",
    "TopWords",
    "accuracy",
    "bind_loss",
    "bind_score",
    "bind_top_words",
    "choice_item",
    "choice_line",
    "encode_pair",
    "evaluate_tasks",
    "harness_model",
    "in_groups",
    "logprob_columns",
    "make_example",
    "open_tasks",
    "perplexity",
    "prefix_id",
    "read_choices",
    "read_lines",
    "read_texts",
    "rolling_windows",
    "score_corpus",
    "text_item",
    "text_line",
    "token_scores",
    "top_columns",
    "write_lines",
]
