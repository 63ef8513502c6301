"""Text from a model: one token after the other, for several prompts at once.

`sampling` makes a distribution of logits and draws from it, in functions of tensors; `text` turns
tokens into text while they come, and finds the strings that end it; `generate` is the loop. What a
decoder keeps of the tokens before is `models.Cache`. `rollouts` makes batches of answers that are
reinforced, `rewards` asks a checker what they earn.
"""

from trainkit.post.generation.generate import Completion, generate, generate_dealt
from trainkit.post.generation.rewards import (
    Checked,
    Checker,
    answer_advantages,
    check_answers,
    report_answers,
)
from trainkit.post.generation.rollouts import (
    Answer,
    answer_corpus,
    bind_reader,
    check_logprobs,
    minibatches,
    old_logprobs,
    read_answers,
    sample_answers,
)
from trainkit.post.generation.sampling import (
    Sampling,
    draw,
    min_p,
    next_tokens,
    repetition_penalty,
    shaped,
    temperature,
    top_k,
    top_p,
)

__all__ = [
    "Answer",
    "Checked",
    "Checker",
    "Completion",
    "Sampling",
    "answer_advantages",
    "answer_corpus",
    "bind_reader",
    "check_answers",
    "check_logprobs",
    "draw",
    "generate",
    "generate_dealt",
    "min_p",
    "minibatches",
    "next_tokens",
    "old_logprobs",
    "read_answers",
    "repetition_penalty",
    "report_answers",
    "sample_answers",
    "shaped",
    "temperature",
    "top_k",
    "top_p",
]
