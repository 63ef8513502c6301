"""Bad data given to recipes/pretrain.py: its exit code, and what its last line names."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import recipe_runs
from own_process import own_process

from trainkit.run import report_errors
from trainkit.text.corpora import write_corpus

RECIPE = Path(__file__).parents[2] / "recipes/pretrain.py"
SMALL = "--row-length 32 --rows 2 --microbatch 2 --warmup 1 --schedule-steps 4 --save-every 1"
WORDS = [f"word{number} = {number * number}\n" * (2 + number % 5) for number in range(30)]


@pytest.fixture(scope="module")
def recipe():
    """Return the recipe as a module that draws no picture at the end."""
    spec = importlib.util.spec_from_file_location("recipe_of_data_faults", RECIPE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("trainkit.run.open_run"), "plot_loss", print)
        patch.setattr("trainkit.models.make_decoder_config", recipe_runs.nano_config)
        yield module
    del sys.modules[spec.name]


@pytest.fixture
def start(recipe, tmp_path):
    """Return a function that runs the recipe: its exit code, and what it printed or refused."""

    def hang(*_):
        raise TimeoutError("the recipe hangs")

    def run(data, *flags, steps=2, out="run"):
        given = ["--out", tmp_path / out, "--data", data, "--steps", steps, *SMALL.split()]
        printed, errors = io.StringIO(), io.StringIO()
        before = signal.signal(signal.SIGALRM, hang)
        signal.alarm(60)
        try:
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(errors),
                own_process(),
                report_errors(),
            ):
                recipe.main([str(flag) for flag in (*given, "--eval-every", 0, *flags)])
            return 0, printed.getvalue()
        except SystemExit as end:
            last = errors.getvalue().rstrip().splitlines()[-1]
            error = json.loads(last.removeprefix("TRAINKIT_ERROR "))
            return end.code, error["what"]
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return run


def text_in(folder):
    folder.mkdir()
    for number, words in enumerate(WORDS):
        (folder / f"{number}.txt").write_text(words)
    return folder


def tokens_in(path, **options):
    return write_corpus(path, [list(words.encode()) for words in WORDS], **options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def hashes(out):
    return [line["batch_hash"] for line in lines(out / "metrics.jsonl")]


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ------------------------------------------------------------------------- refused before the first


def raw_without_dtype(folder):
    np.arange(100, dtype=np.uint16).tofile(folder / "c.bin")
    return folder / "c.bin", ["c.bin", "dtype"]


def npy_beyond(folder):
    np.save(folder / "c.npy", np.array([5, 6, 70000, *range(100)], np.uint32))
    return folder / "c.npy", ["c.npy", "offset 2", "70000", "271"]


def npy_negative(folder):
    np.save(folder / "c.npy", np.array([5, -6, *range(100)], np.int64))
    return folder / "c.npy", ["c.npy", "offset 1", "-6"]


def tokens_beyond(folder):
    write_corpus(folder / "c.tokens", [[5, 6], [7, 70000], [8] * 100], vocab_size=100_000)
    return folder / "c.tokens", ["c.tokens", "100000", "271"]


def unknown_vocabulary(folder):
    write_corpus(folder / "c.tokens", [[5, 6], [7, 70000], [8] * 100])
    return folder / "c.tokens", ["c.tokens", "document 1", "offset 1", "70000", "271"]


def tokens_file(folder):
    write_corpus(folder / "c.tokens", [[7] * 100] * 100, vocab_size=259)
    return folder / "c.tokens"


def npy_file(folder):
    np.save(folder / "c.npy", np.full(3000, 7, np.uint16))
    return folder / "c.npy"


def raw_file(folder):
    np.full(3000, 7, np.uint16).tofile(folder / "c.bin")
    sidecar = {"dtype": "uint16", "offsets": [0, 1000, 3000]}
    (folder / "c.bin.json").write_text(json.dumps(sidecar))
    return folder / "c.bin"


def changed_header(folder):
    tokens_in(folder / "c.tokens", vocab_size=259)
    flip(folder / "c.tokens", 60)
    return folder / "c.tokens", ["c.tokens", "header"]


def changed_tokens(folder):
    tokens_in(folder / "c.tokens", vocab_size=259)
    flip(folder / "c.tokens", 4100)
    return folder / "c.tokens", ["c.tokens", "changed"]


def no_documents(folder):
    return folder, [str(folder), "no documents"]


def empty_lines(folder):
    (folder / "c.jsonl").write_text("\n\n")
    return folder / "c.jsonl", ["c.jsonl", "no documents"]


def missing(folder):
    return folder / "gone.tokens", ["gone.tokens", "No such file"]


def dangling(folder):
    (folder / "c.tokens").symlink_to("gone")
    return folder / "c.tokens", ["c.tokens", "link"]


def dangling_inside(folder):
    (text_in(folder / "text") / "b.txt").symlink_to("gone")
    return folder / "text", ["b.txt", "link"]


def pipe(folder):
    os.mkfifo(folder / "c.tokens")
    return folder / "c.tokens", ["c.tokens", "neither a regular file"]


def pipe_inside(folder):
    os.mkfifo(text_in(folder / "text") / "b.txt")
    return folder / "text", ["b.txt", "regular file"]


def folder_as_file(folder):
    (folder / "c.tokens").mkdir()
    return folder / "c.tokens", ["c.tokens", "no documents"]


def endless(folder):
    del folder
    return Path("/dev/zero"), ["/dev/zero", "neither a regular file"]


BAD = [raw_without_dtype, npy_beyond, npy_negative, tokens_beyond, unknown_vocabulary]
BAD += [changed_header, changed_tokens, no_documents, empty_lines, missing, dangling]
BAD += [dangling_inside, pipe, pipe_inside, folder_as_file, endless]


@pytest.mark.case("D1", "D2", "D7", "D8")
@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_bad_data_is_named_before_the_first_step(make, start, tmp_path):
    (tmp_path / "data").mkdir()
    path, named = make(tmp_path / "data")
    code, what = start(path)
    assert code == 65, what
    assert [word for word in named if word not in what] == [], what
    assert not (tmp_path / "run/metrics.jsonl").exists()


def both_sizes(left, size):
    return f"{left} bytes instead of {size}"


def what_the_sidecar_says(left, _):
    if left % 2:
        return f"{left} bytes are no multiple of uint16"
    return f"from 0 to {left // 2}, the number of tokens"


CUT = [(tokens_file, both_sizes), (npy_file, both_sizes), (raw_file, what_the_sidecar_says)]


@pytest.mark.case("D3")
@pytest.mark.parametrize(("make", "named"), CUT, ids=["tokens", "npy", "raw"])
def test_a_cut_file_is_named_with_what_it_has_and_should_have(make, named, start, tmp_path):
    path = make(tmp_path)
    size = path.stat().st_size
    for left in (size - 1, size // 2):
        os.truncate(path, left)
        code, what = start(path)
        assert (code, path.name in what, named(left, size) in what) == (65, True, True), what
    assert not (tmp_path / "run/metrics.jsonl").exists()


# ------------------------------------------------------------------------- changed between two runs


def other_text(folder):
    path = folder / "7.txt"
    path.write_text(path.read_text().replace("word", "ward"))
    return "7.txt was changed"


def one_more(folder):
    (folder / "aaa.txt").write_text("more")
    return "aaa.txt was added"


def one_less(folder):
    (folder / "7.txt").unlink()
    return "7.txt was removed"


def another_name(folder):
    (folder / "7.txt").rename(folder / "777.txt")
    return "777.txt"


@pytest.mark.case("D5", "D6", "G5")
def test_a_directory_that_changed_between_runs_is_refused_and_the_file_named(start, tmp_path):
    folder = text_in(tmp_path / "text")
    assert start(folder)[0] == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for change in (other_text, one_more, one_less):
        named = change(folder)
        code, what = start(folder, steps=3)
        assert (code, named in what) == (66, True), what
        for path in folder.iterdir():
            path.unlink()
        for path, data in before.items():
            path.write_bytes(data)
    named = another_name(folder)  # the same bytes in the same order are the same data
    code, what = start(folder, steps=3)
    assert (code, named in what) == (0, True), what
    assert len(hashes(tmp_path / "run")) == 3


@pytest.mark.case("D5")
def test_a_token_file_that_changed_between_runs_is_refused_and_named(start, tmp_path):
    path = tmp_path / "c.tokens"
    tokens_in(path, vocab_size=259)
    assert start(path)[0] == 0
    before = path.read_bytes()
    flip(path, 4100)
    code, what = start(path, steps=3)
    assert (code in {65, 66}, "c.tokens" in what) == (True, True), what
    write_corpus(path, [[1, 2, 3]] * 100, vocab_size=259)
    code, what = start(path, steps=3)
    assert (code, "c.tokens" in what) == (66, True), what
    path.write_bytes(before)
    assert start(path, steps=3)[0] == 0


# ----------------------------------------------------------------------------------------- counted


@pytest.mark.case("D7")
def test_what_becomes_of_documents_is_counted_in_the_run(start, tmp_path):
    path = tmp_path / "c.tokens"
    write_corpus(path, [[7] * 20, [], [8] * 200] * 10, vocab_size=259)
    assert start(path)[0] == 0
    counts = {}
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in lines(tmp_path / "run" / name):
            counts |= line
    text = (tmp_path / "run/events.jsonl").read_text()
    assert counts.get("split_documents", 0) > 0, text
    assert counts.get("empty_documents", 0) > 0, text


@pytest.mark.case("P3")
def test_a_damaged_cache_is_built_again_and_the_run_is_the_same(start, tmp_path):
    folder = text_in(tmp_path / "text")
    cache = tmp_path / "cache"
    assert start(folder, "--cache", cache, out="first")[0] == 0
    plans = sorted(cache.rglob("*.bins"))
    before = [plan.read_bytes() for plan in plans]
    for plan in plans:
        flip(plan, plan.stat().st_size // 2)
    code, printed = start(folder, "--cache", cache, out="second")
    assert (code, printed.count("rebuilt the packing")) == (0, len(plans)), printed
    assert len(plans) > 0
    assert [plan.read_bytes() for plan in plans] == before
    assert hashes(tmp_path / "second") == hashes(tmp_path / "first")
    code, printed = start(folder, "--cache", cache, out="third")
    assert (code, "rebuilt" in printed) == (0, False)
