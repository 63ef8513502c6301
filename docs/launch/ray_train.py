# ray_train.py
"""Train a recipe under Ray Train: python ray_train.py WORKERS RECIPE.py FLAGS.

Start it on a machine of the cluster, in a folder that all machines see.
"""

import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

from trainkit.run import call_recipe


def train(config):
    """Train on this worker; return the exit code. Of an error that is raised Ray starts again."""
    os.chdir(config["folder"])  # paths are those of the command line
    code, metrics = call_recipe(config["recipe"], config["flags"])
    with tempfile.TemporaryDirectory() as empty:  # without a checkpoint Ray keeps no metrics
        report(metrics, Checkpoint(empty))  # waits for all workers
    return code


workers, recipe, *flags = sys.argv[1:]
ray.init()
has_gpus = "GPU" in ray.cluster_resources()
result = TorchTrainer(
    train,
    train_loop_config={"folder": str(Path.cwd()), "recipe": recipe, "flags": flags},
    torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
    scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=has_gpus),
    run_config=RunConfig(
        storage_path=str(Path("runs/ray").absolute()),
        failure_config=FailureConfig(max_failures=3),
    ),
).fit()
print("reported to Ray:", result.metrics)
sys.exit(result.return_value)
