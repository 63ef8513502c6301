"""What a run plots at its end: the losses, and the load of the experts."""

from trainkit.run.plots.load import load_over_steps, plot_expert_load
from trainkit.run.plots.loss import plot_loss

__all__ = [
    "load_over_steps",
    "plot_expert_load",
    "plot_loss",
]
