"""Write text from a run, a checkpoint or a Hugging Face folder; it is shown as it comes.

python recipes/generate.py                       # runs/pretrain, or a small base, which it trains
python recipes/generate.py --run runs/pretrain --prompt "class " "import " --temperature 0
python recipes/generate.py --run runs/finetune --prompt "def is_open(self)" --temperature 0
python recipes/generate.py --run FOLDER --prompt "Once" --top-p 0.9 --min-p 0.05 --stop "."
"""

import functools
import sys
from pathlib import Path

import attrs

import trainkit as tk
from trainkit.post.generation import Sampling

optional = attrs.validators.optional
not_empty = attrs.validators.deep_iterable(attrs.validators.min_len(1))


@attrs.frozen(kw_only=True)
class Config:
    """Write text from a run, a checkpoint or a Hugging Face folder."""

    run: Path | None = None
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    prompt: tuple[str, ...] = ("def ",)
    """Texts to continue, which may be empty; to what has learned to answer, questions."""
    tokens: int = attrs.field(default=300, validator=tk.config.positive)
    """How many tokens to write at most, of each."""
    temperature: float = attrs.field(default=0.7, validator=tk.config.non_negative)
    """How daring the choice of tokens is; 0 always takes the likeliest."""
    top_k: int | None = attrs.field(default=None, validator=optional(tk.config.positive))
    """Choose among this many likeliest tokens only."""
    top_p: float = 1.0
    """Leave out the least likely tokens that together have no more than 1 - top_p."""
    min_p: float = 0.0
    """Leave out tokens that are less likely than the likeliest times this."""
    repetition_penalty: float = attrs.field(default=1.0, validator=tk.config.positive)
    """What logits of tokens of the text so far are divided by, or multiplied by below 0."""
    stop: tuple[str, ...] = attrs.field(default=(), validator=not_empty)
    """Strings that end a text; they are not written."""
    stream: bool = True
    """Show a single text as it comes; several are shown when they are there."""
    seed: int = 0
    """The seed of the choices."""
    plain: bool = False
    """Continue prompts as they are, though the model has learned to answer."""


def prompts_of(cfg, trained):
    """Return the tokens of each prompt, what is shown before its text, and what ends one."""
    tokenizer = trained.tokenizer
    if trained.template is not None and not cfg.plain:
        template = tk.chat.load_template(trained.template)
        asked = [[{"role": "user", "content": text}] for text in cfg.prompt]
        prompts = [tk.chat.encode_prompt(each, tokenizer, template=template) for each in asked]
        return prompts, [""] * len(asked), tk.chat.find_stop_ids(tokenizer, template)
    begin = [tokenizer.bos_id] if trained.adds_bos else []
    prompts = [[*begin, *tokenizer.encode(text)] or [tokenizer.eos_id] for text in cfg.prompt]
    return prompts, cfg.prompt, [tokenizer.eos_id]


def write(cfg, trained, sampling):
    """Print each prompt and what the model makes of it."""
    make_model = functools.partial(tk.models.Decoder, trained.config)
    (model,) = tk.adapters.build_trained_stages(trained.path, make_model, tk.solo_parallel(), [])
    prompts, shown, stop_ids = prompts_of(cfg, trained)
    stop_ids = {*stop_ids, *tk.chat.read_stop_ids(trained.path)}
    streams = cfg.stream and len(prompts) == 1

    def show(_, piece):
        print(tk.sinks.escape_control_characters(piece), end="", flush=True)

    if streams:
        show(0, shown[0])
    found = tk.generation.generate(
        model,
        prompts,
        max_new_tokens=cfg.tokens,
        context=trained.context,
        slide=True,
        sampling=sampling,
        stop_ids=stop_ids,
        stop=cfg.stop,
        tokenizer=trained.tokenizer,
        vocab_size=trained.tokenizer.vocab_size,
        stream=show if streams else None,
    )
    texts = [before + each.text for before, each in zip(shown, found, strict=True)]
    print("" if streams else "\n\n".join(map(tk.sinks.escape_control_characters, texts)))


def main(argv=None):
    """Read the configuration, look the model over, write."""
    with tk.run.report_errors():
        cfg = tk.config.load_config(Config, argv)
        names = [field.name for field in attrs.fields(Sampling)]
        sampling = Sampling(**{name: getattr(cfg, name) for name in names})
        path = cfg.run or tk.hub.ensure_base_run(Path(__file__).parent)
        write(cfg, tk.hub.open_model(path), sampling)


if __name__ == "__main__":
    sys.exit(main())
