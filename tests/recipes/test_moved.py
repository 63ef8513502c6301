"""What a run reads may be renamed and moved: its hash counts, and other content is refused."""

import json
import shutil

import pytest
from recipe_runs import column, events, here, lines, refusal
from weights.checkpoint.small import rewrite

from trainkit.text.tokenizers import save_tokenizer, train_bpe

SMALL = "--cache None --rows 2 --microbatch 2 --warmup 1 --schedule-steps 4 --save-every 1"
SMALL = [*SMALL.split(), "--eval-every", 0]


def write_texts(folder, words):
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} {words} {number + 1}. " * 4)
    return folder


@pytest.fixture
def home(tmp_path):
    """Return a folder with two folders of text, conversations and a tokenizer."""
    write_texts(tmp_path / "sums", "+ 1 is")
    write_texts(tmp_path / "orders", "is less than")
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}."}]
        for n in range(40)
    ]
    text = "\n".join(json.dumps({"messages": x}) for x in turns)
    (tmp_path / "chats.jsonl").write_text(text)
    save_tokenizer(
        train_bpe(["1 + 1 is 2. 3 is less than 4. " * 9], vocab_size=280), tmp_path / "t.json"
    )
    return tmp_path


def mixture(home, out, steps, names, tokenizer="t.json"):
    data = [home / name for name in names]
    flags = ["--data", *data, "--weights", 3, 1, "--tokenizer", home / tokenizer]
    return [*SMALL, "--row-length", 32, *flags, "--out", out, "--steps", steps]


def test_corpora_and_a_tokenizer_that_were_renamed_give_the_same_rows(home):
    wanted, out, names = home / "whole", home / "run", ("sums", "orders")
    for flags in (mixture(home, wanted, 3, names), mixture(home, out, 1, names)):
        code, said = here(flags, "mixture", layers=1)
        assert code == 0, said
    moved = ("a/x", "b/x")  # of one name, each is called by its path
    for name, new in zip(names, moved, strict=True):
        (home / new).parent.mkdir()
        (home / name).rename(home / new)
    (home / "t.json").rename(home / "moved.json")
    code, said = here(mixture(home, out, 3, moved, "moved.json"), "mixture", layers=1)
    assert code == 0, said
    for name in ("batch_hash", "loss_hex"):
        assert column(out, name) == column(wanted, name)
    assert {"loss/sums", "loss/orders"} <= lines(out)[-1].keys()
    (first, second) = events(out, "resume")
    assert "its config.tokenizer is" in "".join(second["messages"])
    assert first["messages"] == []
    (home / moved[0] / "7.txt").write_text("other words")
    code, what = refusal("mixture", *mixture(home, out, 4, moved, "moved.json"))
    assert (code, "fingerprint of " in what, "7.txt was changed" in what) == (66, True, True), what
    code, what = refusal("mixture", *mixture(home, out, 4, moved[::-1], "moved.json"))
    assert code == 66, what


def test_conversations_that_were_renamed_go_on_and_others_do_not(home, tmp_path):
    flags = [*SMALL, "--row-length", 64, "--out", tmp_path / "run"]
    based = [*mixture(home, home / "base", 1, ("sums", "orders")), "--tokenizer", "bytes"]
    code, said = here(based, "mixture", layers=1)
    assert code == 0, said
    flags += ["--init", home / "base"]
    old, new = home / "chats.jsonl", home / "renamed.jsonl"
    code, said = here([*flags, "--data", old, "--steps", 1], "finetune", layers=1)
    assert code == 0, said
    shutil.move(old, new)
    code, said = here([*flags, "--data", new, "--steps", 2], "finetune", layers=1)
    assert code == 0, said
    new.write_text("\n".join(new.read_text().splitlines()[1:]))
    code, what = refusal("finetune", *flags, "--data", new, "--steps", 3)
    named = ["its fingerprint is", "files: renamed.jsonl was changed"]
    assert (code, [x in what for x in named]) == (66, [True, True]), what


def test_a_run_of_before_a_fact_was_recorded_goes_on(home, tmp_path):
    """The context and the template's hash came later; neither is asked of a run without them."""
    out, flags = tmp_path / "run", [*SMALL, "--row-length", 64, "--data", home / "chats.jsonl"]
    base = mixture(home, home / "base", 1, ("sums", "orders"))
    code, said = here([*base, "--tokenizer", "bytes"], "mixture", layers=1)
    assert code == 0, said
    flags += ["--init", home / "base", "--out", out]
    code, said = here([*flags, "--steps", 1], "finetune", layers=1)
    assert code == 0, said

    def forget(state):
        del state["facts"]["context"], state["facts"]["template"]

    rewrite(out / "checkpoints" / "step_00000001", "state.json", forget)
    code, said = here([*flags, "--steps", 2], "finetune", layers=1)
    assert code == 0, said
