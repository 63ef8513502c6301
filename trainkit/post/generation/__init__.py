"""Generate text for several prompts at once, and make rollouts for reinforcement learning.

`sampling` has functions of logits: penalty, temperature, filters, and the draw. `text` decodes
tokens incrementally and finds stop strings. `completions` has the loop, and `models.KVCache` is its
cache of keys and values. `rollouts` turns completions into a corpus to train on, `rewards` scores
them with a reward function.
"""

from trainkit.post.generation.completions import (
    Completion,
    answer_questions,
    generate,
    generate_sharded,
    sample_text,
)
from trainkit.post.generation.rewards import (
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
    penalize_repetition,
    sample_from_cdf,
    scale_temperature,
    shape_logits,
)

__all__ = [
    "Answer",
    "Completion",
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
    "generate_sharded",
    "make_answer_corpus",
    "make_answer_reader",
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
