"""Losses over answers: preferences, policy gradients, teachers; and the advantages they take."""

from trainkit.post.objectives.advantages import gae, group_advantages, leave_one_out
from trainkit.post.objectives.policy import (
    Added,
    bounded_weights,
    clipped,
    importance,
    k1,
    k2,
    k3,
    policy_gradient,
    sequence_policy_gradient,
)
from trainkit.post.objectives.preference import (
    dpo,
    ipo,
    kto,
    log_ratio,
    orpo,
    simpo,
    with_reference_point,
)
from trainkit.post.objectives.teachers import distillation, stored_distillation

__all__ = [
    "Added",
    "bounded_weights",
    "clipped",
    "distillation",
    "dpo",
    "gae",
    "group_advantages",
    "importance",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kto",
    "leave_one_out",
    "log_ratio",
    "orpo",
    "policy_gradient",
    "sequence_policy_gradient",
    "simpo",
    "stored_distillation",
    "with_reference_point",
]
