"""Write text from a run, a checkpoint or a Hugging Face folder; it is shown as it comes.

python generate.py                       # runs/pretrain, or a small base, which it trains
python generate.py --run runs/pretrain --prompt "class " "import " --temperature 0
python generate.py --run runs/finetune --prompt "def is_open(self)" --temperature 0
python generate.py --run FOLDER --prompt "Once" --top-p 0.9 --min-p 0.05 --stop "."
"""

import functools
from pathlib import Path

import attrs

import trainkit as tk

optional = attrs.validators.optional
not_empty = attrs.validators.deep_iterable(attrs.validators.min_len(1))


@attrs.frozen(kw_only=True)
class Config:
    """Write text from a run, a checkpoint or a Hugging Face folder."""

    run: Path | None = None
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    prompt: tuple[str, ...] = ("def ",)
    """Texts to continue, which may be empty; questions to a model that was taught to answer."""
    tokens: int = attrs.field(default=300, validator=tk.config.positive)
    """The maximum number of new tokens of each text."""
    temperature: float = attrs.field(default=0.7, validator=tk.config.non_negative)
    """Divides the logits: below 1 likely tokens become more likely; 0 takes the most likely one."""
    top_k: int | None = attrs.field(default=None, validator=optional(tk.config.positive))
    """Sample among this many most likely tokens."""
    top_p: float = 1.0
    """Drop the least likely tokens, whose probabilities sum to at most 1 - top_p."""
    min_p: float = 0.0
    """Drop tokens with a probability below this times that of the most likely one."""
    repetition_penalty: float = attrs.field(default=1.0, validator=tk.config.positive)
    """Divides the logits of tokens that the text contains; negative ones are multiplied."""
    stop: tuple[str, ...] = attrs.field(default=(), validator=not_empty)
    """Strings that end a text, and are not part of it."""
    stream: bool = True
    """Show a single text while it is generated; several are shown at the end."""
    seed: int = 0
    """The seed of the noise."""
    plain: bool = False
    """Continue prompts as they are, also with a model that was taught to answer."""


def encode_prompts(cfg, trained):
    """Return the tokens of each prompt, the texts to show before them, and the stop tokens."""
    tokenizer = trained.tokenizer
    if trained.template is not None and not cfg.plain:
        # It was taught to answer: each prompt is a turn of the user, and the answer is shown alone.
        template = tk.chat.load_template(trained.template)
        prompts = [
            tk.chat.encode_prompt(
                [{"role": "user", "content": text}],
                tokenizer,
                template=template,
            )
            for text in cfg.prompt
        ]
        shown = [""] * len(prompts)
        stop_ids = tk.chat.find_stop_ids(tokenizer, template)
        return prompts, shown, stop_ids
    bos = [tokenizer.bos_id] if trained.adds_bos else []
    # A prompt needs a token. An empty one becomes EOS, after which a new text starts.
    prompts = [[*bos, *tokenizer.encode(text)] or [tokenizer.eos_id] for text in cfg.prompt]
    return prompts, cfg.prompt, [tokenizer.eos_id]


def write(cfg, trained, sampling):
    """Print each prompt and how the model continues it."""
    # The plan is empty: one process, the whole model, as it was trained.
    stages = tk.adapters.build_trained_stages(
        trained.path,
        functools.partial(tk.models.Decoder, trained.config),
        tk.solo_parallel(),
        [],
    )
    prompts, shown, stop_ids = encode_prompts(cfg, trained)
    streams = cfg.stream and len(prompts) == 1

    def show(_, piece):
        # A model may write control characters, which would garble the terminal.
        print(tk.sinks.escape_control_characters(piece), end="", flush=True)

    if streams:
        show(0, shown[0])
    # The model is passed as a plain module: in one process that is the faster way.
    completions = tk.generation.generate(
        stages[0],
        prompts,
        max_new_tokens=cfg.tokens,
        context=trained.context,
        slide=True,  # past the context, the model sees the end of the text
        sampling=sampling,
        # A folder may name further tokens that end a text.
        stop_ids={*stop_ids, *tk.chat.read_stop_ids(trained.path)},
        stop=cfg.stop,
        tokenizer=trained.tokenizer,
        vocab_size=trained.tokenizer.vocab_size,
        stream=show if streams else None,
    )
    # A streamed text is on the screen already; it only lacks the end of its line.
    if streams:
        print()
        return
    texts = [
        tk.sinks.escape_control_characters(before + completion.text)
        for before, completion in zip(shown, completions, strict=True)
    ]
    print("\n\n".join(texts))


def main(argv=None):
    """Read the configuration, open the model, and generate."""
    cfg = tk.config.load_config(Config, argv)
    # Made first: a flag out of its range is rejected before a model is loaded.
    sampling = tk.generation.Sampling(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
        seed=cfg.seed,
    )
    path = cfg.run or tk.hub.ensure_base_run()
    write(cfg, tk.hub.open_model(path), sampling)


if __name__ == "__main__":
    tk.run.run_main(main)
