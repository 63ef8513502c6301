"""Each test removes a guard of the data, and shows the harm that it prevents."""

import hashlib
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainkit.__main__ import main
from trainkit.batch import collate_bins, shift_labels
from trainkit.batch.shards import contiguous_shard, zigzag_shard, zigzag_unshard
from trainkit.data import cache, fingerprint
from trainkit.data.cache import load_or_pack_bins
from trainkit.losses import next_token
from trainkit.packing import bins, pack_bins
from trainkit.text.corpora import foreign, open_corpus, tokens, write_corpus
from trainkit.types import DataError, Share

LENGTHS = np.random.default_rng(0).integers(1, 60, 200)


def log_nothing(_):
    """Stand in for print."""


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.case("D1")
def test_a_guessed_dtype_would_read_garbage(tmp_path):
    true = np.arange(1, 1001, dtype=np.uint16)
    true.tofile(tmp_path / "a.bin")
    guessed = np.fromfile(tmp_path / "a.bin", np.uint32)  # "its size divides by four"
    assert len(guessed) == 500
    assert not set(guessed.tolist()) & set(true.tolist())
    with pytest.raises(DataError, match="dtype"):
        open_corpus(tmp_path / "a.bin")


def array_with_a_bad_token(folder, *, at, count):
    values = np.full(count, 7, np.uint32)
    values[at] = 70_000
    np.save(folder / "b.npy", values)
    (folder / "b.npy.json").write_text('{"vocab_size": 300}')
    return folder / "b.npy"


@pytest.mark.case("D2")
def test_data_verify_names_file_place_and_token(tmp_path, capsysbinary):
    path = array_with_a_bad_token(tmp_path, at=8123, count=9000)
    assert main(["data", "verify", str(path)]) == 65
    report = json.loads(capsysbinary.readouterr().out)
    byte = path.stat().st_size - 4 * (9000 - 8123)
    problem = f"offset 8123 (byte {byte} of the file), token 70000 outside its vocabulary of 300"
    assert not report["ok"]
    assert problem in report["problems"][0]
    assert str(path) in report["problems"][0]


@pytest.mark.case("D2")
def test_without_the_checks_a_token_would_reach_the_embedding(tmp_path, monkeypatch):
    path = array_with_a_bad_token(tmp_path, at=2, count=60)
    with pytest.raises(DataError, match="token 70000 outside its vocabulary of 300"):
        open_corpus(path)
    monkeypatch.setattr(foreign, "check_ids", lambda *_, **__: None)
    corpus = open_corpus(path)
    with pytest.raises(DataError, match="70000"):  # collation looks once more, and names it too
        collate_bins(corpus, pack_bins(corpus.lengths, 60), [0])
    with pytest.raises(IndexError, match="out of range"):
        nn.Embedding(300, 2)(torch.from_numpy(corpus.tokens[:3].astype(np.int64)))


@pytest.mark.case("D5")
def test_without_hashes_changed_tokens_would_be_trained_on(tmp_path, monkeypatch):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2, 3]] * 50, vocab_size=300)
    before = np.array(open_corpus(path).tokens)
    place = path.read_bytes().index(before[:6].tobytes())
    flip(path, place)
    with pytest.raises(DataError, match="changed"):
        open_corpus(path)
    monkeypatch.setattr(tokens, "check_chunks", lambda *_: iter(()))
    assert not np.array_equal(open_corpus(path).tokens, before)


@pytest.mark.case("D5", "D6")
def test_changes_that_sizes_do_not_show_are_other_facts(tmp_path):
    def facts_of():
        return fingerprint(open_corpus(tmp_path))

    def sizes():
        return sorted(path.stat().st_size for path in tmp_path.iterdir())

    for name in "bcd":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}\n" * 9)
    saved, before = facts_of(), sizes()
    (tmp_path / "b.txt").write_text("text of x\n" * 9)
    assert facts_of() != saved
    (tmp_path / "b.txt").write_text("text of b\n" * 9)
    assert facts_of() == saved
    (tmp_path / "b.txt").rename(tmp_path / "e.txt")  # another order
    assert facts_of() != saved
    assert sizes() == before  # the control: who compares these alone sees neither
    (tmp_path / "aaa.txt").write_text("more")
    assert facts_of() != saved


# ------------------------------------------------------------------------------------------- plans


@pytest.mark.case("P3")
def test_without_its_hash_a_damaged_plan_would_be_used(tmp_path, monkeypatch):
    plan = load_or_pack_bins(tmp_path, LENGTHS, 64, content="a", log=log_nothing)
    clean = plan.lengths.copy()  # of the file itself, which is damaged below
    (data,) = tmp_path.rglob("*.bins")
    flip(data, len(data.read_bytes()) - 8)
    messages = []
    again = load_or_pack_bins(tmp_path, LENGTHS, 64, content="a", log=messages.append)
    assert np.array_equal(again.lengths, clean)
    assert "rebuilt" in messages[0]
    flip(data, len(data.read_bytes()) - 8)
    right = json.loads(data.read_bytes().split(b"\n", 1)[0])["sha256"]

    class Trusting:
        def hexdigest(self):
            return right

    monkeypatch.setattr(cache.hashlib, "file_digest", lambda *_: Trusting())
    damaged = load_or_pack_bins(tmp_path, LENGTHS, 64, content="a", log=log_nothing)
    assert not np.array_equal(damaged.lengths, clean)


@pytest.mark.case("P4")
def test_a_key_that_leaves_something_out_would_give_anothers_plan(tmp_path, monkeypatch):
    first = load_or_pack_bins(tmp_path, LENGTHS, 64, content="a", log=log_nothing)
    other = load_or_pack_bins(tmp_path, LENGTHS[::-1], 64, content="b", log=log_nothing)
    assert not np.array_equal(first.lengths, other.lengths)
    make_key = cache._make_key

    def make_weak_key(lengths, *rest, **options):
        same = {"content": "", "lengths_sha256": hashlib.sha256().hexdigest()}
        return make_key(lengths, *rest, **options) | same

    monkeypatch.setattr(cache, "_make_key", make_weak_key)
    weak = tmp_path / "weak"
    first = load_or_pack_bins(weak, LENGTHS, 64, content="a", log=log_nothing)
    stale = load_or_pack_bins(weak, LENGTHS[::-1], 64, content="b", log=log_nothing)
    assert np.array_equal(first.lengths, stale.lengths)  # the plan of other documents


@pytest.mark.case("P7")
def test_without_its_check_a_fit_could_overfill_rows(monkeypatch):
    def overfull(lengths, capacity, *, max_documents):
        del capacity, max_documents
        return np.arange(len(lengths)) // 10

    with pytest.raises(ValueError, match="overfull"):
        pack_bins(LENGTHS, 64, fit=overfull)
    monkeypatch.setattr(bins, "_check_bins", lambda *_: None)
    rows = pack_bins(LENGTHS, 64, fit=overfull)
    assert np.add.reduceat(rows.lengths, rows.offsets[:-1]).max() > 64


# ------------------------------------------------------------------------------ labels and shards


@pytest.mark.case("S1")
def test_a_mean_over_no_label_is_no_number_and_a_sum_is_zero():
    logits = torch.randn(1, 4, 8, requires_grad=True)
    labels = torch.full((1, 4), -100)
    assert cross_entropy(logits.view(4, 8), labels.view(4)).isnan()  # what torch does
    total, _ = next_token(logits, {"labels": labels})
    total.backward()
    assert total == 0
    assert not logits.grad.any()


@pytest.mark.case("S4")
@pytest.mark.parametrize("count", [2, 3, 8])
def test_shards_of_another_kind_do_not_join_to_what_they_were(count):
    x = torch.arange(2 * count * 6).view(1, -1)
    for shard, whole in ((zigzag_shard, True), (contiguous_shard, False)):
        parts = torch.cat([shard(x, Share(rank, count)) for rank in range(count)], 1)
        assert torch.equal(zigzag_unshard(parts, count), x) == whole


@pytest.mark.case("S6")
def test_labels_that_ignore_documents_would_cross_their_borders():
    ids = torch.tensor([[1, 2, 3, 11, 12, 13]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    right = shift_labels(ids, documents)
    naive = torch.cat([ids[:, 1:], torch.tensor([[-100]])], 1)
    assert right.tolist() == [[2, 3, -100, 12, 13, -100]]
    assert naive[0, 2] == 11  # the last token of one document has the first of the next as label
