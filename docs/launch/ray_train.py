# ray_train.py
"""Train a recipe under Ray Train: python ray_train.py WORKERS RECIPE.py FLAGS.

Start it on a machine of the cluster; recipe and --out are on a disk that all machines see.
"""

import importlib
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

from trainkit.run import get_exit_code
from trainkit.run.sinks import read_jsonl

# Refused: the next start would end the same way. 76: asked to stop, and could not save.
ENDED = {64, 65, 66, 67, 76}


def train(config):
    """Run the recipe on this worker, and return its exit code; of an error Ray starts all again."""
    recipe = Path(config["recipe"])
    sys.path.insert(0, str(recipe.parent))
    try:
        code = importlib.import_module(recipe.stem).main(config["flags"]) or 0
    except Exception as error:
        code = get_exit_code(error)
        if code not in ENDED:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return code
    *_, last = read_jsonl(Path(config["out"]) / "metrics.jsonl")
    report(last)  # waits for all workers
    return code


if __name__ == "__main__":
    workers, recipe, *flags = sys.argv[1:]
    out = Path(flags[flags.index("--out") + 1]).absolute()
    ray.init()
    has_gpus = "GPU" in ray.cluster_resources()
    result = TorchTrainer(
        train,
        train_loop_config={"recipe": str(Path(recipe).absolute()), "flags": flags, "out": str(out)},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=has_gpus),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        run_config=RunConfig(
            storage_path=str(out / "ray"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    print(f"step {result.metrics['step']}" if result.metrics else "no step was taken")
    sys.exit(result.return_value)
