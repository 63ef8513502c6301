"""A corpus in a bucket is read by ranges: the same bits, from a cache of a bounded size."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from bucket_server import KEY, SECRET

from trainkit.batch import batch_hash
from trainkit.buckets import (
    RangeArray,
    delete_files,
    find_object,
    mount_files,
    open_store,
    put_file,
    ranges,
)
from trainkit.data import PackedCorpus, make_step_batch
from trainkit.data.concat import fingerprint
from trainkit.data.corpus import iterate_documents
from trainkit.packing import pack_bins
from trainkit.text.corpora import count_document_labels, open_corpora, open_corpus, write_corpus
from trainkit.text.prepare import prepare_corpus
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.text.tokenizers.open import find_tokenizer
from trainkit.types import Column, ConfigError, Cursor, DataError, Sample

BLOCK = 4096  # so that files of a test have many


@pytest.fixture
def data(bucket, monkeypatch):
    """Return (proxy, upload, URL of the data)."""
    monkeypatch.setattr(ranges, "BLOCK", BLOCK)
    proxy, _, url = bucket
    folder = f"{url.rpartition('/')[0]}/data"

    def upload(path, key):
        put_file(open_store(folder), key, Path(path))

    return proxy, upload, folder


def write_files(folder):
    texts = [f"document {i} " * (1 + i % 7) for i in range(200)]
    tokenizer = make_byte_tokenizer()
    tokens = [np.array(tokenizer.encode(text)) for text in texts]
    write_corpus(folder / "web.tokens", tokens, vocab_size=tokenizer.vocab_size)
    write_corpus(
        folder / "scored.tokens",
        [Sample(x, x % 3 > 0, {"p": np.sin(x), "k": np.stack([x, x], 1)}) for x in tokens],
        columns={"p": Column("float32"), "k": Column("uint16", inner=(2,), of="token")},
    )
    (folder / "docs.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    np.save(folder / "raw.npy", np.concatenate(tokens).astype(np.int32))
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": texts, "other": list(range(200))})
    pytest.importorskip("pyarrow.parquet").write_table(
        table, folder / "docs.parquet", row_group_size=32
    )
    with pa.ipc.new_file(folder / "docs.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=32)
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


FILES = ["web.tokens", "scored.tokens", "docs.parquet", "docs.arrow", "docs.jsonl", "raw.npy"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_bucket_has_the_bits_of_the_file(data, tmp_path, name):
    proxy, upload, url = data
    write_files(tmp_path)
    upload(tmp_path / name, name)
    tokenizer = None if name == "scored.tokens" else make_byte_tokenizer()
    local = open_corpora([tmp_path / name], tokenizer=tokenizer)
    remote = open_corpora([Path(f"{url}/{name}")], tokenizer=tokenizer)
    assert [*local] == [*remote]
    (one,), (other,) = local.values(), remote.values()
    assert (fingerprint(one), one.sources) == (fingerprint(other), other.sources)
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(count_document_labels(one), count_document_labels(other))
    documents = zip(iterate_documents(one), iterate_documents(other), strict=True)
    for mine, its in documents:
        assert np.array_equal(getattr(mine, "tokens", mine), getattr(its, "tokens", its))
        for column, values in (getattr(mine, "columns", None) or {}).items():
            assert np.array_equal(values, its.columns[column])
    assert hashes(one) == hashes(other)
    # What is in the cache is not fetched again, until the bucket has another.
    del proxy.requests[:]
    assert hashes(open_corpus(f"{url}/{name}", tokenizer=tokenizer)) == hashes(one)
    assert {method for method, _ in proxy.requests} == {"HEAD"}


def test_a_file_that_is_larger_than_the_cache_has_the_same_bits(data, tmp_path, monkeypatch):
    proxy, upload, url = data
    write_files(tmp_path)
    upload(tmp_path / "scored.tokens", "scored.tokens")
    bound = 5 * BLOCK
    assert (tmp_path / "scored.tokens").stat().st_size > 4 * bound
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", str(bound))
    sizes = []
    add = ranges._add_block

    def watch(*args):
        add(*args)
        used = 0
        for path in tmp_path.glob("cache/blocks/*/*"):
            with contextlib.suppress(FileNotFoundError):  # another thread has removed it
                used += path.stat().st_size
        sizes.append(used)

    monkeypatch.setattr(ranges, "_add_block", watch)
    remote = open_corpus(f"{url}/scored.tokens")
    assert isinstance(remote.tokens, RangeArray)
    assert hashes(remote) == hashes(open_corpus(tmp_path / "scored.tokens"))
    assert BLOCK < max(sizes) <= bound
    # A cache that has no room for a block is none.
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", str(BLOCK - 1))
    assert hashes(open_corpus(f"{url}/scored.tokens")) == hashes(remote)
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", "10 GB")
    del proxy.requests[:]
    with pytest.raises(ConfigError, match="must be a number of bytes, got '10 GB'"):
        mount_files(f"{url}/scored.tokens")
    assert proxy.requests == []


def test_a_block_that_is_removed_once_it_was_seen_is_fetched_again(data, tmp_path, monkeypatch):
    """Also under the lock of its file, which a thread that waits for itself would never get."""
    _, upload, url = data
    (tmp_path / "a.txt").write_bytes(b"text")
    upload(tmp_path / "a.txt", "a.txt")
    remote = find_object(mount_files(f"{url}/a.txt"))
    assert remote is not None
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "00000000" or exists(path))
    found = []
    reader = threading.Thread(target=lambda: found.append(remote.read(0, 4)), daemon=True)
    reader.start()
    reader.join(20)
    assert found == [b"text"]


def test_what_was_read_least_recently_is_removed_first(data, tmp_path, monkeypatch):
    proxy, upload, url = data
    (tmp_path / "a.txt").write_bytes(b"".join(bytes([48 + i]) * BLOCK for i in range(6)))
    upload(tmp_path / "a.txt", "a.txt")
    monkeypatch.setenv("TRAINKIT_CACHE_BYTES", str(4 * BLOCK))
    remote = find_object(mount_files(f"{url}/a.txt"))
    for block in (0, 1, 2, 3, 0, 4, 0):
        assert remote.read(block * BLOCK, 2) == bytes([48 + block]) * 2
    left = sorted(int(path.name) for path in remote.folder.iterdir())
    assert (0 in left, 1 in left, 4 in left) == (True, False, True)
    # A block that was cut is fetched again.
    (remote.folder / "00000004").write_bytes(b"4")
    del proxy.requests[:]
    assert remote.read(4 * BLOCK - 1, 3) == b"344"
    assert remote.read(6 * BLOCK - 1, 99) == b"5"


READER = f"""
import sys
from trainkit.buckets import find_object, mount_files, ranges
ranges.BLOCK = {BLOCK}
remote = find_object(mount_files(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(hash(remote.read(0, remote.size)) == hash(open(sys.argv[2], "rb").read()))
"""


def test_processes_share_the_cache_and_fetch_each_block_once(data, tmp_path):
    proxy, upload, url = data
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).bytes(32 * BLOCK + 5))
    upload(tmp_path / "a.txt", "a.txt")
    command = [sys.executable, "-c", READER, f"{url}/a.txt", str(tmp_path / "a.txt")]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    assert [reader.communicate(timeout=120)[0] for reader in readers] == ["True\n"] * 2
    assert len([method for method, _ in proxy.requests if method == "GET"]) == 33


def test_a_folder_and_the_tokenizer_beside_a_token_file_are_found(data, tmp_path):
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


def test_text_of_a_bucket_is_prepared_as_that_of_the_disk(data, tmp_path):
    _, upload, url = data
    write_files(tmp_path)
    upload(tmp_path / "docs.parquet", "docs.parquet")
    for source, out in ((tmp_path / "docs.parquet", "a"), (Path(f"{url}/docs.parquet"), "b")):
        prepare_corpus(
            source, tmp_path / f"{out}.tokens", tokenizer=make_byte_tokenizer(), workers=2
        )
    assert (tmp_path / "a.tokens").read_bytes() == (tmp_path / "b.tokens").read_bytes()


def test_what_has_changed_in_the_bucket_is_read_anew_and_not_in_the_middle(data, tmp_path):
    _, upload, url = data
    for text in ("first", "again"):  # of equal size
        (tmp_path / "a.txt").write_text(text)
        upload(tmp_path / "a.txt", "a.txt")
        remote = find_object(mount_files(f"{url}/a.txt"))
        if text == "first":
            first = remote
            continue
        assert remote.read(0, 9) == b"again"
    with pytest.raises(DataError, match=f"{url}/a.txt was replaced while it was read"):
        first.read(0, 9)


def test_an_object_that_is_gone_is_said_and_what_is_cached_stays(data, tmp_path):
    _, upload, url = data
    (tmp_path / "a.txt").write_bytes(b"a" * 2 * BLOCK)
    upload(tmp_path / "a.txt", "a.txt")
    remote = find_object(mount_files(f"{url}/a.txt"))
    assert remote.read(0, 1) == b"a"
    delete_files(open_store(url), ["a.txt"])
    assert remote.read(0, 1) == b"a"
    with pytest.raises(DataError, match=f"{url}/a.txt was deleted"):
        remote.read(BLOCK, 1)


def test_a_url_of_nothing_is_refused_and_no_secret_is_in_the_cache(data, tmp_path):
    _, upload, url = data
    with pytest.raises(DataError, match=f"there is nothing at {url}/no.txt"):
        open_corpora([Path(f"{url}/no.txt")])
    (tmp_path / "a.txt").write_text("a")
    upload(tmp_path / "a.txt", "a.txt")
    open_corpus(f"{url}/a.txt")
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if {KEY, SECRET} & {*path.read_text().split('"')}]
