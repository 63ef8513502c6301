"""Evaluation: log-probabilities of texts and of choices, line by line, and `lm-eval` over them.

`bind_score` makes a function of a model in any layout: from examples to what each token of them
scores. `read_texts` and `read_choices` make examples of files, `write_lines` results that a killed
run goes on with, `perplexity` and `accuracy` the numbers of them. `score_corpus` stores what a
frozen model finds as columns of a token file. `bind_loss` is for a run's own held-out rows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
