"""Write text from a run's last checkpoint.

python recipes/generate.py --run runs/pretrain --prompt "def "
python recipes/generate.py --run runs/pretrain --prompt "class " --temperature 0 --tokens 400
python recipes/generate.py --run runs/sft --prompt "def is_open(self)" --temperature 0
"""

import functools
import sys
from pathlib import Path

import attrs

from trainkit import chat, checkpoint, config, generation, models, runtime, sinks, tokenizers


@attrs.frozen(kw_only=True)
class Config:
    """Write text from a run's last checkpoint."""

    run: Path = Path("runs/pretrain")
    """A run directory, for its newest checkpoint that verifies, or one checkpoint."""
    prompt: str = "def "
    """The text to continue, which may be empty; to a run of sft.py, the question."""
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
    path = checkpoint.find_checkpoint(cfg.run, tell=to_stderr)
    needs = ("model", "config.tokenizer", "config.row_length")
    facts = checkpoint.read_facts(path, needs=needs)
    model = models.Decoder(models.config_from_facts(facts["model"]))
    checkpoint.load_weights(path, [model])
    tokenizer = tokenizers.open_tokenizer(facts["config.tokenizer"])
    if "config.template" in facts:  # it has learnt to answer
        template = chat.TEMPLATES[facts["config.template"]]
        prompt = chat.prompt_ids(
            [{"role": "user", "content": cfg.prompt}], tokenizer, template=template
        )
        shown, (stop_id,) = [], chat.stop_ids(tokenizer, template)
    else:
        shown = tokenizer.encode(cfg.prompt)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        prompt, stop_id = [*begin, *shown], tokenizer.eos_id
    how = {"temperature": cfg.temperature, "top_k": cfg.top_k, "seed": cfg.seed}
    (drawn,) = generation.generate(
        model,
        [prompt],
        max_new_tokens=cfg.tokens,
        context=facts["config.row_length"],
        slide=True,
        sampling=generation.Sampling(**how),
        stop_ids=[stop_id],
        vocab_size=tokenizer.vocab_size,
    )
    return sinks.printable(tokenizer.decode([*shown, *drawn.ids]))


def main(argv=None):
    """Read the configuration, load the checkpoint, write."""
    with runtime.report_errors():
        print(generate(config.load_config(Config, argv)))


if __name__ == "__main__":
    sys.exit(main())
