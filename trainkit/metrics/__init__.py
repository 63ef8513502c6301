"""From sums to numbers that people read: metrics over many batches, and the record of a step."""

from trainkit.metrics.classification import (
    decision_accuracy,
    f_beta,
    make_accuracy,
    make_auroc,
    make_binary_confusion,
    make_multiclass_confusion,
    precision,
    recall,
)
from trainkit.metrics.compose import adapt_metric, compose_metrics
from trainkit.metrics.experts import (
    expert_load_entropy,
    expert_load_ratio,
    make_expert_load_metrics,
)
from trainkit.metrics.flops import (
    decoder_flops,
    model_flops,
    model_flops_utilization,
    peak_flops,
    recomputed_flops,
)
from trainkit.metrics.means import (
    loss_to_perplexity,
    make_ema,
    make_max,
    make_min,
    make_perplexity,
    make_sum,
    make_weighted_mean,
)
from trainkit.metrics.merge import merge_over_ranks, start_merge_over_ranks
from trainkit.metrics.records import (
    MergedState,
    Metric,
    State,
    make_metric,
    merge_states,
    restore_state,
)
from trainkit.metrics.reduce import reduce_metrics
from trainkit.metrics.steps import (
    advance,
    estimate_gradient_noise,
    make_step_record,
    make_step_records,
    read_memory_stats,
    to_host,
    tokens_per_second,
)

__all__ = [
    "MergedState",
    "Metric",
    "State",
    "adapt_metric",
    "advance",
    "compose_metrics",
    "decision_accuracy",
    "decoder_flops",
    "estimate_gradient_noise",
    "expert_load_entropy",
    "expert_load_ratio",
    "f_beta",
    "loss_to_perplexity",
    "make_accuracy",
    "make_auroc",
    "make_binary_confusion",
    "make_ema",
    "make_expert_load_metrics",
    "make_max",
    "make_metric",
    "make_min",
    "make_multiclass_confusion",
    "make_perplexity",
    "make_step_record",
    "make_step_records",
    "make_sum",
    "make_weighted_mean",
    "merge_over_ranks",
    "merge_states",
    "model_flops",
    "model_flops_utilization",
    "peak_flops",
    "precision",
    "read_memory_stats",
    "recall",
    "recomputed_flops",
    "reduce_metrics",
    "restore_state",
    "start_merge_over_ranks",
    "to_host",
    "tokens_per_second",
]
