"""`python -m trainkit score`: a frozen model's log-probabilities, stored once."""

import argparse
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn
from weights.hub.test_export_command import saved_run

from trainkit.batch import batch_from_rows, count_valid_tokens
from trainkit.data import PackedCorpus, make_microbatches
from trainkit.models import Decoder, call_model, make_decoder_config
from trainkit.packing import pack_bins
from trainkit.parallel import add_columns, make_output_head
from trainkit.post.evaluation import columns as room
from trainkit.post.objectives import distillation, stored_distillation
from trainkit.text.corpora import open_tokens, write_corpus
from trainkit.tools.commands import score
from trainkit.types import Column, ConfigError, Sample

CONFIG = make_decoder_config("tiny", layers=2, width=32, heads=2, kv_heads=2, mlp_width=48)
LENGTHS = [5, 1, 30, 0, 12, 19, 7]


def run_score(*words):
    parser = argparse.ArgumentParser()
    score.add(parser)
    return score.run(parser.parse_args([*map(str, words)]))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a model, saved as a run, and a corpus that has a column already."""
    home = tmp_path_factory.mktemp("home")
    saved_run(home / "run", CONFIG, facts={"config.row_length": 16})
    draw = np.random.default_rng(3)
    documents = [
        Sample(draw.integers(0, 256, n), draw.random(n) < 0.7, {"weights": draw.random(n)})
        for n in LENGTHS
    ]
    columns = {"weights": Column("float32")}
    write_corpus(home / "a.tokens", documents, vocab_size=259, columns=columns)
    return home


@pytest.fixture(scope="module")
def model(home):
    return saved_run(home / "again", CONFIG).eval()


def test_a_token_has_the_log_probability_that_its_document_gives_it(home, model):
    out = home / "referenced.tokens"
    report, code = run_score(home / "run", home / "a.tokens", "--out", out, "--part", 20)
    assert (code, report["columns"], report["parts_reused"]) == (0, ["reference_logprobs"], 0)
    before, corpus = open_tokens(home / "a.tokens"), open_tokens(out, check="full")
    assert np.array_equal(corpus.tokens, before.tokens)
    assert np.array_equal(corpus.loss_mask, before.loss_mask)
    assert np.array_equal(corpus.values["weights"], before.values["weights"])
    assert not (home / "referenced.tokens.parts").exists()
    for document, begin in enumerate(corpus.offsets[:-1]):
        ids = torch.from_numpy(corpus.read(document, 0, LENGTHS[document]).astype(np.int64))
        found = corpus.values["reference_logprobs"][begin : begin + len(ids)]
        want = np.zeros(len(ids), np.float32)
        for at in range(1, len(ids)):
            end = min((at - 1) // 16 * 16 + 16, len(ids) - 1)  # of the window that it counts in
            with torch.no_grad():
                given = batch_from_rows(ids[None, max(0, end - 16) : at])
                logits = call_model(model, given)[0, -1]
            want[at] = logits.log_softmax(-1)[ids[at]]
        assert np.abs(found - want).max(initial=0) < 1e-4, document


def test_a_student_learns_the_same_from_stored_words_as_from_the_teacher(home, model):
    out = home / "taught.tokens"
    flags = ["--top-k", 8, "--temperature", 1.5, "--context", 64]
    run_score(home / "run", home / "a.tokens", "--out", out, *flags)
    corpus = open_tokens(out)
    packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 40, overlong="error"))
    batches = make_microbatches(packed, range(len(packed)), rows_per_microbatch=len(packed))
    assert count_valid_tokens(batches) > 20
    student = nn.Linear(CONFIG.width, CONFIG.vocab_size, bias=False)
    teacher = Decoder(CONFIG, head="hidden")
    teacher.load_state_dict(model.state_dict())
    head = make_output_head(teacher, batches[0])
    keep = lambda output, _: {"teacher_hidden": output.hidden}  # noqa: E731
    (batch,) = add_columns(teacher, batches, keep)
    found = []
    for loss in (
        distillation(head, top_k=8, beta=0.0, temperature=1.5),
        stored_distillation(beta=0.0, temperature=1.5),
    ):
        output = batch["teacher_hidden"], student.weight
        total, _ = loss(output, batch)
        found.append((total, *torch.autograd.grad(total, student.weight)))
    for one, two in zip(*found, strict=True):
        assert (one - two).abs().max() < 1e-4 * one.abs().max()


def killed(num_parts, words):
    """Score in a new process that is killed when it starts to write the part after `num_parts`."""
    pid = os.fork()
    if pid == 0:
        write = room.write_corpus

        def write_or_die(path, *args, **options):
            if path.name == f"part_{num_parts:08d}.tokens":
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, *args, **options)

        try:
            room.write_corpus = write_or_die
            run_score(*words)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_killed_command_resumes_with_the_parts_that_it_has_written(home, tmp_path):
    whole, out = tmp_path / "whole.tokens", tmp_path / "out.tokens"
    words = [home / "run", home / "a.tokens", "--part", 15]
    run_score(*words, "--out", whole)
    for num_parts in (1, 3):
        assert killed(num_parts, [*words, "--out", out])
        assert not out.exists()
    damaged = tmp_path / "out.tokens.parts" / "part_00000001.tokens"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    report, _ = run_score(*words, "--out", out)
    assert report["parts_reused"] == 2
    assert out.read_bytes() == whole.read_bytes()


def test_parts_of_another_model_or_setting_are_made_anew(home, tmp_path, capsys):
    folder = tmp_path / "out.tokens.parts"
    folder.mkdir()
    (folder / "facts.json").write_text("{}")
    (folder / "part_00000000.tokens").write_bytes((home / "a.tokens").read_bytes())
    run_score(home / "run", home / "a.tokens", "--out", tmp_path / "out.tokens")
    assert "computing them again" in capsys.readouterr().err
    assert "reference_logprobs" in open_tokens(tmp_path / "out.tokens").columns


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temperature", 2], "--top-k"),
        (["--top-k", 0], "top_k"),
        (["--top-k", 5000], "272 tokens"),
        (["--out", "a.txt"], r"\.tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_stored_is_refused(flags, named, home, tmp_path):
    given = [home / "run", home / "a.tokens", "--out", tmp_path / "out.tokens", *flags]
    with pytest.raises(ValueError, match=named):
        run_score(*given)


def test_a_corpus_that_has_the_column_is_refused(home, tmp_path):
    path = tmp_path / "has.tokens"
    own = {"reference_logprobs": Column()}
    samples = [Sample(np.arange(3), np.ones(3, bool), {"reference_logprobs": np.zeros(3)})]
    write_corpus(path, samples, vocab_size=259, columns=own)
    with pytest.raises(ConfigError, match="reference_logprobs already"):
        run_score(home / "run", path, "--out", tmp_path / "out.tokens")
