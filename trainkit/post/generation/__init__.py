"""Text from a model: one token after the other, for several prompts at once.

`sampling` makes a distribution of logits and draws from it, in functions of tensors; `text` turns
tokens into text while they come, and finds the strings that end it; `generate` is the loop. What a
decoder keeps of the tokens before is `models.KVCache`. `rollouts` makes batches of answers that are
reinforced, `rewards` asks a checker what they earn.
"""

from trainkit.post.generation.generate import (
    Completion,
    answer_questions,
    generate,
    generate_dealt,
    sample_text,
)
from trainkit.post.generation.rewards import (
    RewardFunction,
    Rewards,
    compute_advantages,
    compute_rewards,
)
from trainkit.post.generation.rollouts import (
    Answer,
    add_old_logprobs,
    check_logprobs,
    compute_old_logprobs,
    make_answer_corpus,
    make_answer_reader,
    read_answers,
    sample_answers,
    split_minibatches,
    split_rollout,
)
from trainkit.post.generation.sampling import (
    Sampling,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    next_tokens,
    penalize_repetition,
    sample_from_cdf,
    scale_temperature,
    shape_logits,
)

__all__ = [
    "Answer",
    "Completion",
    "RewardFunction",
    "Rewards",
    "Sampling",
    "add_old_logprobs",
    "answer_questions",
    "check_logprobs",
    "compute_advantages",
    "compute_old_logprobs",
    "compute_rewards",
    "filter_min_p",
    "filter_top_k",
    "filter_top_p",
    "generate",
    "generate_dealt",
    "make_answer_corpus",
    "make_answer_reader",
    "next_tokens",
    "penalize_repetition",
    "read_answers",
    "sample_answers",
    "sample_from_cdf",
    "sample_text",
    "scale_temperature",
    "shape_logits",
    "split_minibatches",
    "split_rollout",
]
