"""Losses over answers: preferences, policy gradients, teachers; and the advantages they take."""

from trainkit.post.objectives.advantages import gae, group_advantages, leave_one_out
from trainkit.post.objectives.classification import (
    Pool,
    bradley_terry,
    classify,
    pool_documents,
)
from trainkit.post.objectives.policy import (
    PolicyOptions,
    cispo,
    importance_weights,
    k1,
    k2,
    k3,
    policy_gradient,
    ppo_clip,
    sequence_policy_gradient,
)
from trainkit.post.objectives.preference import (
    add_reference_point,
    dpo,
    ipo,
    kto,
    log_ratio,
    orpo,
    simpo,
)
from trainkit.post.objectives.teachers import distillation, stored_distillation

__all__ = [
    "PolicyOptions",
    "Pool",
    "add_reference_point",
    "bradley_terry",
    "cispo",
    "classify",
    "distillation",
    "dpo",
    "gae",
    "group_advantages",
    "importance_weights",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kto",
    "leave_one_out",
    "log_ratio",
    "orpo",
    "policy_gradient",
    "pool_documents",
    "ppo_clip",
    "sequence_policy_gradient",
    "simpo",
    "stored_distillation",
]
