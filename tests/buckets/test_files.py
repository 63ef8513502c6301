"""A corpus in a bucket is read from a copy: the same bits, in a cache of a bounded size."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bucket_server import KEY, SECRET

from trainkit.batch import batch_hash
from trainkit.buckets import fetch_files
from trainkit.buckets import files as bucket_files
from trainkit.data import PackedCorpus, make_step_batch
from trainkit.data.concat import fingerprint
from trainkit.packing import pack_bins
from trainkit.text.corpora import open_corpora, open_corpus, write_corpus
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.text.tokenizers.open import find_tokenizer
from trainkit.types import ConfigError, Cursor, DataError


@pytest.fixture
def data(bucket, monkeypatch):
    """Yield (proxy, upload, URL of the data)."""
    proxy, client, url = bucket
    monkeypatch.setattr(bucket_files, "_HELD", held := {})
    name = url.split("/")[2]

    def upload(path, key):
        client.put_object(Bucket=name, Key=f"data/{key}", Body=Path(path).read_bytes())

    yield proxy, upload, f"s3://{name}/data"
    for handle in held.values():
        os.close(handle)


def release(held):
    for handle in held.values():
        os.close(handle)
    held.clear()


def write_files(folder):
    texts = [f"document {i} " * (1 + i % 7) for i in range(200)]
    tokenizer = make_byte_tokenizer()
    tokens = [tokenizer.encode(text) for text in texts]
    write_corpus(folder / "web.tokens", tokens, vocab_size=tokenizer.vocab_size)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": texts, "other": list(range(200))})
    parquet.write_table(table, folder / "docs.parquet", row_group_size=32)
    (folder / "web.tokenizer.json").write_text("{}")


def hashes(corpus):
    rows = PackedCorpus(corpus, pack_bins(corpus.lengths, capacity=64))
    steps = [
        make_step_batch(
            rows, lambda batch: np.arange(8) + 8 * batch, Cursor(step), rows_per_microbatch=4
        )
        for step in range(4)
    ]
    return [batch_hash(step.microbatches) for step in steps]


@pytest.mark.parametrize("name", ["web.tokens", "docs.parquet"])
def test_a_file_of_a_bucket_has_the_bits_of_the_file(data, tmp_path, name):
    proxy, upload, url = data
    write_files(tmp_path)
    upload(tmp_path / name, name)
    local = open_corpora([tmp_path / name], tokenizer=make_byte_tokenizer())
    remote = open_corpora([Path(f"{url}/{name}")], tokenizer=make_byte_tokenizer())
    assert [*local] == [*remote]
    (one,), (other,) = local.values(), remote.values()
    assert fingerprint(one) == fingerprint(other)
    assert np.array_equal(one.tokens, other.tokens)
    assert hashes(one) == hashes(other)
    # Once in the cache it is not copied again, until the bucket has another.
    del proxy.requests[:]
    open_corpus(f"{url}/{name}", tokenizer=make_byte_tokenizer())
    assert {method for method, _ in proxy.requests} == {"HEAD"}


def test_a_folder_and_the_tokenizer_beside_a_token_file_are_fetched(data, tmp_path):
    _, upload, url = data
    write_files(tmp_path)
    for name in ("a", "sub/b"):
        upload(tmp_path / "web.tokens", f"shards/{name}.tokens")
    upload(tmp_path / "web.tokenizer.json", "web.tokenizer.json")
    corpus = open_corpus(f"{url}/shards")
    assert len(corpus.lengths) == 400
    found = find_tokenizer(None, [Path(f"{url}/web.tokens")])
    assert Path(found).read_text() == "{}"
    assert find_tokenizer(None, [Path(f"{url}/shards/a.tokens")]) == "bytes"


def test_another_rank_reads_the_same_copy_while_this_one_does(data, tmp_path):
    proxy, upload, url = data
    (tmp_path / "a.txt").write_text("same")
    upload(tmp_path / "a.txt", "a.txt")
    local = fetch_files(f"{url}/a.txt")
    del proxy.requests[:]
    code = "import sys; from trainkit.buckets import fetch_files; print(fetch_files(sys.argv[1]))"
    command = [sys.executable, "-c", code, f"{url}/a.txt"]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert other.stdout.strip() == str(local)
    assert {method for method, _ in proxy.requests} == {"HEAD"}
    assert fetch_files(f"{url}/a.txt") == local


def test_what_has_changed_in_the_bucket_is_fetched_anew(data, tmp_path):
    _, upload, url = data
    for text in ("first", "again"):  # of equal size
        (tmp_path / "a.txt").write_text(text)
        upload(tmp_path / "a.txt", "a.txt")
        assert fetch_files(f"{url}/a.txt").read_text() == text


def test_the_cache_has_a_bound(data, tmp_path, monkeypatch):
    _, upload, url = data
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", "3000")
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 1000)
        upload(tmp_path / name, f"{name}.txt")
    first, second = (fetch_files(f"{url}/{name}.txt") for name in "ab")
    with pytest.raises(ConfigError, match=r"c\.txt has 1000 bytes; the cache may hold 3000, and 2"):
        fetch_files(f"{url}/c.txt")
    release(bucket_files._HELD)  # this process has ended
    third = fetch_files(f"{url}/c.txt")
    assert [path.exists() for path in (first, second, third)] == [False, True, True]
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", "10 GB")
    with pytest.raises(ConfigError, match="must be a number of bytes, got '10 GB'"):
        fetch_files(f"{url}/a.txt")


def test_a_url_of_nothing_is_refused_and_no_secret_is_in_the_cache(data, tmp_path):
    _, upload, url = data
    with pytest.raises(DataError, match=f"there is nothing at {url}/no.txt"):
        open_corpora([Path(f"{url}/no.txt")])
    (tmp_path / "a.txt").write_text("a")
    upload(tmp_path / "a.txt", "a.txt")
    fetch_files(f"{url}/a.txt")
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if {KEY, SECRET} & {*path.read_text().split('"')}]
