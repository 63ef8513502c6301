"""What a run writes tells nothing of the environment that it was started in."""

import attrs
import pytest

from trainkit import checkpoint, sinks
from trainkit.files import format_toml
from trainkit.mesh import solo_parallel
from trainkit.optim import adamw
from trainkit.run.config import RunConfig, config_to_dict
from trainkit.run.errors import report_errors
from trainkit.run.lock import lock_run
from trainkit.types import DataError, TrainState

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")


def write_all_there_is(out):
    """Write whatever a run writes, and fail."""
    import torch

    cfg, ps = attrs.evolve(RunConfig(), out=out), solo_parallel()
    model = torch.nn.Linear(2, 2)
    optimizer = adamw(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with (
        report_errors(out),
        lock_run(out, ps.world),
        sinks.open_run_sinks(out, ps.world.share, step=0, last=1) as (log, event),
    ):
        (out / "config.toml").write_text(format_toml(config_to_dict(cfg)))
        log(1, {"loss": 1.0})
        event("save", step=1)
        (out / "lock.copy").write_bytes((out / "lock").read_bytes())
        checkpoint.save_checkpoint(out, TrainState(step=1), [model], optimizer, ps)
        raise DataError("a shard is damaged")


@pytest.mark.case("W8")
@pytest.mark.parametrize("is_leaky", [False, True])
def test_no_secret_of_the_environment_is_in_a_run_directory(
    is_leaky, tmp_path, monkeypatch, capsys
):
    for name in SECRETS:
        monkeypatch.setenv(name, "canary-7c1f")
    if is_leaky:  # the check itself is shown to see one
        (tmp_path / "environment.txt").write_text("HF_TOKEN=canary-7c1f")
    with pytest.raises(SystemExit):
        write_all_there_is(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.toml", "events.jsonl", "metrics.jsonl", "manifest.json", "lock.copy"} <= {
        path.name for path in files
    }
    texts = [*(path.read_bytes() for path in files), *(t.encode() for t in capsys.readouterr())]
    assert any(b"canary-7c1f" in text for text in texts) == is_leaky
    assert not any(name.encode() in text for text in texts for name in SECRETS if not is_leaky)
