"""A run that goes on refuses other first weights than its own, by their hash, wherever they are."""

import json
import shutil
import tomllib

import attrs
import pytest
from recipe_runs import column, here, nano_config, refusal, several

from trainkit import hub, models, optim
from trainkit.mesh import solo_parallel
from trainkit.text.tokenizers import open_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import TrainState
from trainkit.weights.checkpoint import save_checkpoint

WORDS = models.pad_vocab_size(open_tokenizer("bytes").vocab_size)
EXPERTS = models.Experts(count=4, top_k=2, width=16, scores="softmax")
COMMON = "--rows 2 --microbatch 2 --warmup 1 --schedule-steps 4 --save-every 1"
FLAGS = {
    "finetune": "--row-length 64 --eval-every 0 --cache None",
    "preference": "--row-length 64 --eval-every 0 --loss orpo",
    "reinforce": "--row-length 64 --supervised 2 --updates 1 --prompts 2 --answers 2",
    "pretrain": "--row-length 32 --eval-every 0 --cache None",
    "moe": "--row-length 32 --eval-every 0 --cache None",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with data, and two models of one shape, as runs, folders and mixtures."""
    home = tmp_path_factory.mktemp("first")
    (home / "text").mkdir()
    for number in range(20):
        (home / f"text/{number}.txt").write_text(f"{number} + 1 is {number + 1}. " * 4)
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}."}]
        for n in range(40)
    ]
    pairs = [{"prompt": f"{n}?", "chosen": f"{n + 1}.", "rejected": "No."} for n in range(40)]
    (home / "chats.jsonl").write_text("\n".join(json.dumps({"messages": x}) for x in turns))
    (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    config = nano_config("tiny", vocab_size=WORDS)
    for seed, name in enumerate("ab"):
        _save(home / name, config, seed)
        mixture = attrs.evolve(config, experts=EXPERTS)
        run = _save(home / f"{name} experts run", mixture, seed)
        for saved, folder in ((home / name, "folder"), (run, "experts")):
            files = hub.make_tokenizer_files("bytes")
            hub.export_folder(saved, home / f"{name} {folder}", context=64, files=files)
    return home


def _save(folder, config, seed):
    model = models.build_decoder(config, seed=seed)
    facts = {"model": attrs.asdict(config), "config.tokenizer": "bytes", "config.row_length": 64}
    optimizer = optim.adamw(model.parameters(), lr=1.0)
    save_checkpoint(folder, TrainState(), [model], optimizer, solo_parallel(), facts=facts)
    return folder


def flags_of(recipe, home, out, steps, init):
    data = {"finetune": "chats.jsonl", "preference": "pairs.jsonl", "reinforce": None}
    read = data.get(recipe, "text")
    flags = [*COMMON.split(), *FLAGS[recipe].split(), "--out", out, "--steps", steps]
    flags += [] if read is None else ["--data", home / read]
    return flags if init is None else [*flags, "--init", init]


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("finetune", ""),
        ("finetune", " folder"),
        ("preference", ""),
        ("reinforce", ""),
        ("pretrain", " folder"),
        ("moe", " experts"),
    ],
)
def test_a_run_goes_on_with_its_own_first_weights_alone(recipe, kind, home, tmp_path):
    out, moved = tmp_path / "run", tmp_path / "moved"
    begun = shutil.copytree(home / f"a{kind}", tmp_path / "a")

    def begun_with():
        return tomllib.loads((out / "config.toml").read_text())["init"]

    code, said = here(flags_of(recipe, home, out, 1, begun), recipe, layers=1)
    assert code == 0, said
    first = begun_with()
    assert first.startswith(str(begun))
    other = flags_of(recipe, home, out, 2, home / f"b{kind}")
    code, what = refusal(recipe, *other)
    assert (code, "its first weights is" in what) == (66, True), what
    code, what = refusal(recipe, *flags_of(recipe, home, out, 2, tmp_path / "typo"))
    assert (code, "there is no" in what and "typo" in what) == (64, True), what
    assert (begun_with(), column(out, "step")) == (first, [1])
    begun.rename(moved)
    code, said = here(flags_of(recipe, home, out, 2, moved), recipe, layers=1)
    assert (code, begun_with().startswith(str(moved))) == (0, True), said
    code, said = here(flags_of(recipe, home, out, 3, None), recipe, layers=1)
    assert (code, begun_with().startswith(str(moved))) == (0, True), said
    assert column(out, "step") == [1, 2, 3]


def test_new_weights_are_other_first_weights_than_those_of_a_run(home, tmp_path):
    code, said = here(flags_of("reinforce", home, tmp_path, 1, None), "reinforce", layers=1)
    assert code == 0, said
    code, what = refusal("reinforce", *flags_of("reinforce", home, tmp_path, 2, home / "a"))
    assert (code, "its first weights is None" in what) == (66, True), what


def test_the_hash_of_first_weights_is_the_same_in_every_layout(home, tmp_path):
    out = tmp_path / "run"
    code, said = here(flags_of("finetune", home, out, 1, home / "a"), "finetune", layers=1)
    assert code == 0, said
    runs = [
        [*flags_of("finetune", home, out, 2, home / "a"), "--tp", 2],
        flags_of("finetune", home, out, 3, home / "a"),
    ]
    done = run_ranks(several, 2, runs, "finetune")[0]
    assert [code for code, _ in done] == [0, 0], done
    assert column(out, "step") == [1, 2, 3]
