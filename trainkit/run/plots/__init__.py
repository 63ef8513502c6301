"""What a run plots at its end: the losses, and the load of the experts."""

from trainkit.run.plots.load import plot_expert_load
from trainkit.run.plots.loss import plot_loss

__all__ = [
    "plot_expert_load",
    "plot_loss",
]
