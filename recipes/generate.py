"""Write text from a run's last checkpoint.

python recipes/generate.py --run runs/pretrain --prompt "def "
python recipes/generate.py --run runs/pretrain --prompt "class " --temperature 0 --tokens 400
"""

import functools
import sys
from pathlib import Path

import attrs

from trainkit import checkpoint, config, data, models, runtime
from trainkit.types import CheckpointError


@attrs.frozen(kw_only=True)
class Config:
    """Write text from a run's last checkpoint."""

    run: Path = Path("runs/pretrain")
    """The run directory."""
    checkpoint: str = "auto"
    """auto for the newest checkpoint that verifies, or the directory of one."""
    prompt: str = "def "
    """The text to continue; it may be empty."""
    tokens: int = attrs.field(default=300, validator=config.positive)
    """How many tokens to write at most."""
    temperature: float = attrs.field(default=0.7, validator=config.non_negative)
    """How daring the choice of tokens is; 0 always takes the likeliest."""
    top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(config.positive)
    )
    """Choose among this many likeliest tokens only."""
    seed: int = 0
    """The seed of the choices."""


def generate(cfg: Config) -> str:
    """Return the prompt and what the model makes of it."""
    to_stderr = functools.partial(print, file=sys.stderr)
    path = checkpoint.choose_checkpoint(cfg.run / "checkpoints", cfg.checkpoint, tell=to_stderr)
    if path is None:
        raise CheckpointError(f"generate: there is no checkpoint in {cfg.run}", where=cfg.run)
    facts = checkpoint.read_facts(path)
    model = models.Decoder(models.config_from_facts(facts["model"]))
    checkpoint.load_weights(path, [model])
    tokenizer = data.byte_tokenizer()
    prompt = tokenizer.encode(cfg.prompt)
    drawn = models.generate(
        model,
        [tokenizer.bos_id, *prompt],
        max_new_tokens=cfg.tokens,
        context=facts["config.row_length"],
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        seed=cfg.seed,
        stop_id=tokenizer.eos_id,
    )
    return tokenizer.decode([*prompt, *drawn])


def main(argv=None):
    """Read the configuration, load the checkpoint, write."""
    with runtime.report_errors():
        print(generate(config.load_config(Config, argv)))


if __name__ == "__main__":
    sys.exit(main())
