"""A corpus is prepared by Dask: the same file, and nothing is left behind."""

import multiprocessing
from contextlib import contextmanager
from functools import partial

import orjson
import pytest

from trainkit.text.prepare import prepare_corpus
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.types import DataError

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
BYTES = make_byte_tokenizer()


@contextmanager
def two_processes(folder):
    """Two worker processes and a client, as on two machines that share a disk."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            local_directory=folder,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_two_processes_of_dask_give_the_file_of_one(tmp_path, monkeypatch):
    source, here, out = tmp_path / "a.jsonl", tmp_path / "here.tokens", tmp_path / "there.tokens"
    good = b"".join(orjson.dumps({"text": f"{n} " * (n % 50)}) + b"\n" for n in range(200))
    source.write_bytes(good)
    prepare = partial(prepare_corpus, tokenizer=BYTES, chunk_bytes=1000)
    prepare(source, here)
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)  # workers stand elsewhere: relative paths are made absolute
    with two_processes(tmp_path / "dask") as client:
        prepare = partial(prepare, executor=client.get_executor())
        source.write_bytes(good + b'{"text": "odd"}\n')
        with pytest.raises(DataError, match=r"a\.jsonl: line 201: OddError: a and b"):
            prepare(source, out, make_encode=__import__("deadly").make_odd)
        source.write_bytes(good)
        with pytest.raises(DataError, match=r"KilledWorker: .*, at chunk \d: bytes \d+ to \d+ of"):
            prepare(source, out, make_encode=__import__("deadly").make)
        shown = []
        prepare("a.jsonl", "there.tokens", progress=shown.append)
        assert shown[-1].bytes == source.stat().st_size
        assert out.read_bytes() == here.read_bytes()
    assert multiprocessing.active_children() == []
    assert list((tmp_path / "dask").rglob("worker-*")) == []
    assert {path.name for path in tmp_path.glob("*tokens*")} == {"here.tokens", "there.tokens"}


DEADLY = """
import os

class OddError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

def make_odd(tokenizer):
    def encode(record):
        if record["text"] == "odd":
            raise OddError("a", "b")
        return tokenizer.encode(record["text"])
    return encode

def make(tokenizer):
    def encode(record):
        if record["text"] == "3 3 3 ":
            os._exit(1)
        return tokenizer.encode(record["text"])
    return encode
"""
