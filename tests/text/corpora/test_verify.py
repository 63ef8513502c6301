"""`data verify` finds what is wrong with a corpus; `data show` says what is in it."""

import argparse

import numpy as np
import orjson
import pytest

from trainkit.text.corpora import content
from trainkit.text.corpora.tokens import write_corpus
from trainkit.tools.commands import data
from trainkit.types import DataError


def run(*arguments):
    parser = argparse.ArgumentParser()
    data.add(parser)
    report, code = data.run(parser.parse_args([*map(str, arguments)]))
    return orjson.loads(orjson.dumps(report)), code


def test_verify_reads_all_of_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "CHUNK", 64)
    for name in "abc":
        write_corpus(tmp_path / f"{name}.tokens", [range(100)] * 50, vocab_size=100)
    report, code = run("verify", tmp_path)
    want = {"path": str(tmp_path), "ok": True, "problems": [], "documents": 150, "tokens": 15000}
    assert (report, code) == (want, 0)
    for name in "ac":
        path = tmp_path / f"{name}.tokens"
        flipped = bytearray(path.read_bytes())
        flipped[5000] ^= 1
        path.write_bytes(flipped)
    report, code = run("verify", tmp_path)
    assert (report["ok"], report["documents"], code) == (False, 50, 65)
    assert [problem.split(": ")[0] for problem in report["problems"]] == [
        str(tmp_path / "a.tokens"),
        str(tmp_path / "c.tokens"),
    ]
    assert run("verify", tmp_path / "b.tokens")[1] == 0
    assert run("verify", tmp_path / "a.tokens")[1] == 65


def test_verify_reads_text_and_says_what_it_is_not(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": []}\n{"messages": []}\n')
    report, code = run("verify", path)
    assert (report["documents"], report["tokens"], report["ok"], code) == (2, None, True, 0)
    path.write_bytes(b'{"messages": []}\n{"messages": [\n')
    report, code = run("verify", path)
    assert (report["documents"], code) == (1, 65)
    assert "a.jsonl: line 2: bad JSON" in report["problems"][0]
    path.write_bytes(b"\n\n")
    report, code = run("verify", path)
    assert (report["problems"], code) == ([f"{path}: there are no documents"], 65)
    report, code = run("verify", tmp_path / "gone")
    assert (code, report["problems"]) == (65, [f"{tmp_path}/gone: No such file or directory"])


def test_show_describes_a_corpus_and_one_document(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 0, 6, 7, 0, 8], np.uint16))
    (tmp_path / "a.npy.json").write_bytes(b'{"eos_id": 0, "vocab_size": 9}')
    report, code = run("show", tmp_path / "a.npy", "--document", 1)
    assert code == 0
    assert report == {
        "path": str(tmp_path / "a.npy"),
        "documents": 3,
        "tokens": 6,
        "dtype": ["uint16"],
        "vocab_size": 9,
        "columns": {},
        "lengths": {"min": 1, "median": 2.0, "max": 3},
        "document": {"number": 1, "name": None, "length": 3, "first_tokens": [6, 7, 0]},
    }
    assert run("show", tmp_path)[0]["documents"] == 3
    with pytest.raises(ValueError, match="there is no document 3 of 3"):
        run("show", tmp_path, "--document", 3)
    with pytest.raises(DataError, match="No such file"):
        run("show", tmp_path / "gone")
