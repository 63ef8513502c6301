"""Tokens per second of our `generate` and of that of `transformers`: greedy, fp32, one thread.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/generation.py [NAME ...]`. Both draw the same tokens
of the same weights, in turns; the ratio is the median of the turns' ratios, so that a busy machine
disturbs both alike. `--long` prints what a token costs as the text grows.
"""

import statistics
import sys
import tempfile
import time

import torch

from trainkit import hub
from trainkit.models import build_decoder, make_decoder_config
from trainkit.post.generation import Sampling, generate

GREEDY = Sampling(temperature=0)
ONE, EIGHT = [64], [8, 200, 30, 120, 64, 16, 90, 45]
CASES = {  # size, lengths of prompts, new tokens, turns
    "tiny": ("tiny", ONE, 128, 9),
    "tiny, 8 prompts": ("tiny", EIGHT, 128, 7),
    "125m": ("125m", ONE, 48, 5),
    "125m, 8 prompts": ("125m", EIGHT, 32, 3),
}


def models(size):
    """Return the same weights as our decoder and as theirs."""
    import transformers

    ours = build_decoder(make_decoder_config(size), seed=0)
    values = hub.write_decoder_config(ours.config, context=2048)
    config = transformers.LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})
    theirs = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        weights = hub.open_folder_weights(hub.open_folder(folder))
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter.copy_(weights(name, parameter.shape, (0,) * parameter.ndim))
    theirs.generation_config.eos_token_id = None
    return ours, theirs


def with_ours(model, prompts, new):
    found = generate(model, prompts, max_new_tokens=new, context=8192, sampling=GREEDY)
    return [completion.ids for completion in found]


def with_theirs(model, prompts, new):
    longest = max(map(len, prompts))
    filled = torch.tensor([longest - len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = (torch.arange(longest) >= filled.unsqueeze(1)).long()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
    )[:, longest:].tolist()


def seconds(function, *args):
    start = time.perf_counter()
    found = function(*args)
    return time.perf_counter() - start, found


def compare(name):
    size, lengths, new, turns = CASES[name]
    ours, theirs = models(size)
    words = ours.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, words, (n,), generator=generator).tolist() for n in lengths]
    work = [(with_ours, ours, prompts, new), (with_theirs, theirs, prompts, new)]
    assert seconds(*work[0])[1] == seconds(*work[1])[1]
    times = [[seconds(*each)[0] for each in work] for _ in range(turns)]
    speeds = [len(prompts) * new / statistics.median(x) for x in zip(*times, strict=True)]
    ratio = statistics.median(b / a for a, b in times)
    print(f"{name:16} ours {speeds[0]:8.1f}/s  theirs {speeds[1]:8.1f}/s  ratio {ratio:5.2f}")


def growth():
    """Print what one more token costs after texts of several lengths."""
    model = build_decoder(make_decoder_config("tiny"), seed=0)
    for length in (64, 256, 1024, 4096):
        few, many = (
            statistics.median(seconds(with_ours, model, [[1] * length], n)[0] for _ in range(5))
            for n in (1, 101)
        )
        print(f"after {length:5} tokens: {1e3 * (many - few) / 100:6.3f} ms a token")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--long" in sys.argv:
        growth()
    else:
        for name in sys.argv[1:] or CASES:
            compare(name)
