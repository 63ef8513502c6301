"""What lies at a path becomes documents of tokens, or is refused by name."""

import errno
import hashlib
import os
import re
import resource
import shutil
import socket
import sysconfig
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.concat import concat_corpora, fingerprint
from trainkit.data.corpus import TokenCorpus
from trainkit.data.memory_map import check_unchanged
from trainkit.text.chat.encode import make_chat_encoder
from trainkit.text.corpora.open import (
    held_out_documents,
    hold_out,
    is_held_out,
    open_corpus,
    open_library_corpus,
)
from trainkit.text.corpora.python_library import is_library_source, standard_library
from trainkit.text.corpora.tokens import write_corpus
from trainkit.text.tokenizers import make_byte_tokenizer, open_tokenizer, tokenizer_hash
from trainkit.types import DataError, Sample

BYTES = make_byte_tokenizer()


def texts(corpus):
    return [
        BYTES.decode(corpus.read(document, 0, int(length)))
        for document, length in enumerate(corpus.lengths)
    ]


def write_tree(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


# ------------------------------------------------------------------------------------ directories


def test_a_directory_gives_its_text_files_in_the_order_of_their_paths(tmp_path):
    files = {
        "b.txt": "b",
        "a/z.py": "z\r\n",
        "a.md": "ä",
        "a/a.rst": "",
        "c.bin": b"\0",
        "Z.txt": "Z",
    }
    corpus = open_corpus(write_tree(tmp_path, files))
    assert texts(corpus) == ["Z", "ä", "", "z\r\n", "b"]
    assert corpus.read(1, 0, 4).tolist() == [256, *"ä".encode(), 257]
    assert (corpus.tokens.dtype, corpus.offsets.dtype) == (np.uint16, np.int64)
    assert corpus.vocab_size == BYTES.vocab_size
    assert corpus.lengths.tolist() == np.diff(corpus.offsets).tolist()


def test_files_are_chosen_by_suffix_and_by_relative_path(tmp_path):
    write_tree(tmp_path, {"x/a.py": "a", "x/b.py": b"\xff", "a.cfg": "c"})
    assert texts(open_corpus(tmp_path, keep=lambda name: name != "x/b.py")) == ["a"]
    assert texts(open_corpus(tmp_path, suffixes=[".cfg"])) == ["c"]


class Words:
    def encode(self, text):
        return [len(word) for word in text.split()]

    def decode(self, ids):
        return " ".join("x" * i for i in ids)


def test_any_object_with_encode_and_decode_serves(tmp_path):
    corpus = open_corpus(write_tree(tmp_path, {"a.txt": "to be or"}), tokenizer=Words())
    assert corpus.read(0, 0, 3).tolist() == [2, 2, 2]
    assert (corpus.tokens.dtype, corpus.vocab_size) == (np.uint32, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ab\0c", "a NUL byte at byte 2"), (b"\xc3\xa4abc\xff", "invalid UTF-8 at byte 5")],
)
def test_binary_files_are_refused_with_the_byte(tmp_path, content, message):
    write_tree(tmp_path, {"a.txt": "fine", "x/b.txt": content})
    with pytest.raises(DataError, match=rf"x/b.txt: .*{message}") as caught:
        open_corpus(tmp_path)
    assert caught.value.where == tmp_path / "x/b.txt"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_nothing_but_nul_bytes_is_refused_at_the_first(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(3 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"{name}: .* NUL byte"):
        open_corpus(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.case("D8")
def test_pipes_and_broken_links_in_a_directory_are_refused(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"a.txt: a link that leads nowhere"):
        open_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a.txt: neither a regular file nor"):
        open_corpus(tmp_path)


def test_linked_files_are_read(tmp_path):
    write_tree(tmp_path, {"real": "text"})
    (tmp_path / "link.txt").symlink_to("real")
    assert texts(open_corpus(tmp_path)) == ["text"]


def test_directories_without_documents_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no documents: of its files ending in .md.* none was"):
        open_corpus(tmp_path)
    write_tree(tmp_path, {"a.txt": "a"})
    with pytest.raises(DataError, match="none is selected"):
        open_corpus(tmp_path, keep=lambda _: False)
    write_tree(tmp_path, {"a.txt": ""})
    with pytest.raises(DataError, match="none has a token"):
        open_corpus(tmp_path, tokenizer=Words())


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", ""), ("a.jsonl", '{"text": ""}\n{"text": ""}\n')]
)
def test_documents_that_are_all_empty_are_refused_and_one_text_is_enough(name, text, tmp_path):
    write_tree(tmp_path, {name: text, f"b{name}": text})
    where = tmp_path if name == "a.txt" else tmp_path / name
    with pytest.raises(DataError, match=r"there is no text: all documents \(2\) are empty"):
        open_corpus(where)
    write_tree(tmp_path, {name: text.replace('""', '"x"', 1) or "x"})
    assert open_corpus(where).lengths.tolist() == [3, 2]


def test_what_must_not_be_read_is_named(tmp_path, monkeypatch):
    # Tests may run as root, whom no mode keeps out.
    write_tree(tmp_path, {"x/a.txt": "a"})

    def refuse(path, *_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(DataError, match=r"a.txt: Permission denied"):
            open_corpus(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}: Permission denied")):
            open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["input.txt", "a.md", "b.c.py"])
def test_a_text_file_is_a_corpus_of_one_document(tmp_path, name):
    write_tree(tmp_path, {name: "First Citizen:\nSpeak.\n\nAll:\nSpeak, ä", "other.txt": "x"})
    corpus = open_corpus(tmp_path / name, field="body")  # which text does not have
    assert texts(corpus) == ["First Citizen:\nSpeak.\n\nAll:\nSpeak, ä"]
    assert (corpus.names, [*corpus.sources]) == ([name], [name])
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(DataError, match=rf"^{tmp_path / name}: not a text file"):
        open_corpus(tmp_path / name)
    with pytest.raises(DataError, match=rf"^{tmp_path / name}: no"):
        open_corpus(tmp_path / name, encode=lambda _: "no")


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_some_of_every_corpus_is_held_out_and_no_token_twice(lengths, piece, parts, whole):
    offsets = np.append(0, np.cumsum(lengths))
    one = TokenCorpus(np.arange(offsets[-1]), offsets, digest="d" * 64)
    corpus = one if whole else concat_corpora([one] * parts)
    found, chosen = hold_out(corpus, piece=piece, one_in=20)
    assert len(chosen) == len(found.lengths)
    assert int(found.lengths.sum()) == int(corpus.lengths.sum())
    held, total = int(found.lengths[chosen].sum()), int(corpus.lengths.sum())
    if found is corpus:
        assert chosen.tolist() == held_out_documents(corpus, one_in=20).tolist()
        assert 0 < held <= total / 4
        return
    assert found.lengths.max(initial=0) <= piece
    assert fingerprint(found) != fingerprint(corpus)
    assert 0 < held < total or len(chosen) < 2
    if whole:
        read = [token for a, b in pairwise(found.offsets) for token in found.tokens[a:b].tolist()]
        assert read == one.tokens.tolist()


# ------------------------------------------------------------------------------------ JSON lines


def test_json_lines_give_one_document_each(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\\u00e4", "n": 1}\n\n{"text": ""}\n{"text": "b"}')
    assert texts(open_corpus(path)) == ["aä", "", "b"]
    assert texts(open_corpus(path, keep=lambda number: number == "4")) == ["b"]


def test_the_field_can_be_chosen(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "x"}\n')
    assert texts(open_corpus(path, field="body")) == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{text}", "bad JSON"),
        (b'{"text": "\xff"}', "bad JSON"),
        (b'{"text": "a', "bad JSON"),
        (b'{"txt": "a"}', "no field 'text'; found txt"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"text": 3}', "field 'text' must be a string, got int"),
        (b'{"text": null}', "field 'text' must be a string, got NoneType"),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a.jsonl: line 2: .*{message}"):
        open_corpus(path)


# ------------------------------------------------------------------------------------ any path


def test_paths_that_are_no_corpus_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone: No such file"):
        open_corpus(tmp_path / "gone")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(DataError, match=r"link: a link that leads nowhere"):
        open_corpus(tmp_path / "link")
    with pytest.raises(DataError, match=r"null: neither a regular file nor a directory"):
        open_corpus("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.tokens"))
        with pytest.raises(DataError, match=r"s.tokens: neither a regular file nor a directory"):
            open_corpus(tmp_path / "s.tokens")
    for name in ("a.csv", "empty"):
        write_tree(tmp_path, {name: ""})
        with pytest.raises(
            DataError, match=rf"{name}: neither a directory, nor a file of a known kind: .jsonl"
        ):
            open_corpus(tmp_path / name)
    write_tree(tmp_path, {"a.jsonl": ""})
    with pytest.raises(
        DataError, match=r"a.jsonl: no documents: of its lines or rows, none is selected"
    ):
        open_corpus(tmp_path / "a.jsonl")
    write_tree(tmp_path, {"a.tokens": ""})
    with pytest.raises(DataError, match=r"a.tokens: this token file has no token file's beginning"):
        open_corpus(tmp_path / "a.tokens")


# --------------------------------------------------------------------------- files of tokens


def token_file(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2, 3], [], [4] * 50], vocab_size=100)
    return path


def test_a_tokenizer_must_cover_a_token_files_vocabulary(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1]], vocab_size=300)
    with pytest.raises(DataError, match="vocabulary of 300 is larger than the tokenizer's, 259"):
        open_corpus(path, tokenizer=BYTES)
    assert open_corpus(path, tokenizer=Words()).vocab_size == 300


class Letters(Words):
    """A tokenizer with an identity."""

    vocab_size = 32_000

    def __init__(self, identity):
        self.identity = identity


@pytest.mark.parametrize("place", ["a.tokens", "."])
def test_a_token_file_of_another_tokenizer_is_refused(tmp_path, place):
    one, two = Letters("one"), Letters("two")
    path = tmp_path / "a.tokens"
    made = write_corpus(path, [[1]], vocab_size=32_000, tokenizer_hash=tokenizer_hash(one))
    assert made.tokenizer_hash == tokenizer_hash(one)
    assert open_corpus(tmp_path / place, tokenizer=one).lengths.tolist() == [1]
    for unknown in (None, Words()):
        assert open_corpus(tmp_path / place, tokenizer=unknown).lengths.tolist() == [1]
    message = rf"a.tokens: .*by the tokenizer {tokenizer_hash(one)}, .* is {tokenizer_hash(two)};"
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(tmp_path / place, tokenizer=two)
    assert (caught.value.got, caught.value.want) == (tokenizer_hash(one), tokenizer_hash(two))
    write_corpus(path, [[1]], vocab_size=32_000)
    assert open_corpus(tmp_path / place, tokenizer=two).lengths.tolist() == [1]


def test_bytes_open_what_bytes_with_fewer_special_tokens_made(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1]], vocab_size=259, tokenizer_hash=tokenizer_hash(BYTES))
    assert open_corpus(path, tokenizer=BYTES).tokenizer_hash == tokenizer_hash(BYTES)
    assert open_corpus(path, tokenizer=open_tokenizer("bytes")).vocab_size == 259
    write_corpus(
        path, [[1]], vocab_size=260, tokenizer_hash=tokenizer_hash(make_byte_tokenizer("x"))
    )
    assert open_corpus(path, tokenizer=make_byte_tokenizer(["x", "y"])).vocab_size == 260
    for special in (["y"], ["y", "x"]):
        with pytest.raises(DataError, match="its tokens were made by the tokenizer"):
            open_corpus(path, tokenizer=make_byte_tokenizer(special))


def test_keep_is_refused_for_a_token_file(tmp_path):
    with pytest.raises(ValueError, match="no names for `keep`"):
        open_corpus(token_file(tmp_path), keep=is_held_out)


# ------------------------------------------------------------------------------------ the library


def test_held_out_files_are_one_in_twenty_by_name_alone():
    names = [f"package/module_{number}.py" for number in range(4000)]
    chosen = [name for name in names if is_held_out(name)]
    assert 150 < len(chosen) < 250
    held = [number for number in range(60) if is_held_out(f"{number}.py")]
    assert held == [6, 11, 20, 43, 56]  # for ever: another answer would move files across
    assert all(is_held_out(name, one_in=1) for name in names)
    with pytest.raises(ValueError, match="one_in must be at least 1, got 0"):
        is_held_out("a", one_in=0)


def test_documents_are_held_out_by_name_or_by_number(tmp_path):
    named = open_corpus(write_tree(tmp_path, {f"{number}.py": "x" for number in range(60)}))
    assert held_out_documents(named).tolist() == [is_held_out(name) for name in named.names]
    assert held_out_documents(named).sum() == 5
    numbered = write_corpus(tmp_path / "a.tokens", [[1]] * 60)
    assert numbered.names is None
    chosen = held_out_documents(numbered)
    assert np.flatnonzero(chosen).tolist() == [12, 22, 34, 49]  # for ever, as above
    longer = held_out_documents(write_corpus(tmp_path / "b.tokens", [[1]] * 40_000))
    assert longer[:60].tolist() == chosen.tolist()
    assert 1900 < longer.sum() < 2100
    assert held_out_documents(numbered, one_in=1).all()
    with pytest.raises(ValueError, match="one_in must be at least 1, got 0"):
        held_out_documents(numbered, one_in=0)


def test_the_standard_library_is_source_without_packages_and_tests(tmp_path, monkeypatch):
    library = {"os.py": "os", "json/decoder.py": "json", "unittest/case.py": "case"}
    others = {
        "site-packages/numpy/__init__.py": "",
        "dist-packages/a.py": "",
        "test/test_os.py": "",
        "unittest/test/a.py": "",
        "lib2to3/tests/data/bom.py": "",
        "idlelib/idle_test/a.py": "",
        "os.pyc": "",
        "LICENSE.txt": "",
        "binary.py": b"\xff",
    }
    write_tree(tmp_path, library | others)
    (tmp_path / "link.py").symlink_to("gone")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert not any(is_library_source(name) for name in [*others, "link.py", "gone.py"])
    corpus = open_library_corpus()
    assert texts(corpus) == ["json", "os", "case"]


def test_the_standard_library_opens_as_a_corpus():
    corpus = open_corpus(
        standard_library() / "json", keep=lambda name: is_library_source("json/" + name)
    )
    assert corpus.lengths.sum() > 10_000
    assert "JSONDecoder" in "".join(texts(corpus))


def test_a_fingerprint_follows_the_content_and_is_read_from_a_token_file(tmp_path):
    paths = [tmp_path / f"{i}.tokens" for i in range(3)]
    contents = [[[1, 2], [3]], [[1, 2], [3]], [[1, 2, 3]]]
    corpora = [write_corpus(path, c, vocab_size=9) for path, c in zip(paths, contents, strict=True)]
    first, same, other = map(fingerprint, corpora)
    assert first == same != other
    in_memory = [TokenCorpus(c.tokens, c.offsets) for c in corpora]
    first, same, other = map(fingerprint, in_memory)
    assert first == same != other


# ------------------------------------------------------------------------------------ encode


def test_encode_makes_ids_or_samples_of_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"q": "a", "a": "bc"}\n{"q": "d", "a": ""}\n')

    def encode(record):
        question, answer = (list(record[name].encode()) for name in "qa")
        trained = [False] * len(question) + [True] * len(answer)
        return Sample(np.array(question + answer), np.array(trained))

    corpus = open_corpus(path, tokenizer=BYTES, encode=encode)
    assert corpus.tokens.tolist() == list(b"abcd")
    assert corpus.loss_mask.tolist() == [0, 1, 1, 0]
    assert (corpus.vocab_size, corpus.tokens.dtype, corpus.names) == (259, np.uint16, ["1", "2"])
    ids = open_corpus(path, encode=lambda record: [len(record["a"])])
    assert ids.tokens.tolist() == [2, 0]
    assert (ids.vocab_size, ids.tokens.dtype, ids.loss_mask) == (None, np.uint32, None)


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda record: [record["gone"]], r"a.jsonl: line 2: KeyError: 'gone'"),
        (lambda record: record.gone, r"a.jsonl: line 2: AttributeError: .*'gone'"),
        (make_chat_encoder(open_tokenizer("bytes")), r"a.jsonl: line 2: .* no field 'messages'"),
        (lambda _: [-1], r"a.jsonl: line 2 has token -1 at 0"),
        (lambda _: [259], r"a.jsonl: line 2 has token 259 at 0, outside \[0, 259\)"),
        (lambda _: 3, r"a.jsonl: line 2 must be integers in one dimension"),
    ],
)
def test_a_record_that_cannot_be_encoded_is_named(tmp_path, encode, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n')
    with pytest.raises(DataError, match=message):
        open_corpus(path, tokenizer=BYTES, encode=encode)


# ------------------------------------------------------------------- directories of other files


def test_a_directory_of_token_files_is_one_corpus_in_the_order_of_names(tmp_path):
    for name, documents in [("b", [[4], [5, 6]]), ("a/z", [[3]]), ("a/y", [[1, 2]])]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_corpus(tmp_path / f"{name}.tokens", documents, vocab_size=10)
    corpus = open_corpus(tmp_path)
    read = [corpus.read(i, 0, int(n)).tolist() for i, n in enumerate(corpus.lengths)]
    assert read == [[1, 2], [3], [4], [5, 6]]
    assert list(corpus.sources) == ["a/y.tokens", "a/z.tokens", "b.tokens"]
    assert corpus.vocab_size == 10
    with pytest.raises(ValueError, match="no names for `keep`"):
        open_corpus(tmp_path, keep=is_held_out)
    with pytest.raises(ValueError, match="no records for `encode`"):
        open_corpus(tmp_path, encode=len)
    with pytest.raises(DataError, match="vocabulary of 10 is larger than the tokenizer's, 9"):
        open_corpus(tmp_path, tokenizer=Few())
    data = bytearray((tmp_path / "a/z.tokens").read_bytes())
    data[4096] ^= 1
    (tmp_path / "a/z.tokens").write_bytes(data)
    with pytest.raises(DataError, match=r"a/z.tokens: .*fingerprint"):
        open_corpus(tmp_path)


class Few:
    vocab_size = 9


def test_a_directory_of_two_kinds_is_refused_with_one_of_each(tmp_path):
    token_file(tmp_path)
    np.save(tmp_path / "b.npy", np.array([1, 2], np.uint16))
    with pytest.raises(DataError, match=r"of two kinds, a.tokens and b.npy"):
        open_corpus(tmp_path)
    (tmp_path / "b.npy").unlink()
    write_tree(tmp_path, {"x/read.md": "text"})
    with pytest.raises(DataError, match=r"both x/read.md and a.tokens, text and tokens"):
        open_corpus(tmp_path)
    assert open_corpus(tmp_path, suffixes=()).lengths.tolist() == [3, 0, 50]
    assert texts(open_corpus(tmp_path, keep=lambda name: name != "a.tokens")) == ["text"]
    write_tree(tmp_path, {"x/c.jsonl": '{"text": "a"}'})
    with pytest.raises(DataError, match=r"both x/c.jsonl and a.tokens"):
        open_corpus(tmp_path, suffixes=())


def test_a_directory_of_json_lines_is_one_corpus(tmp_path):
    write_tree(tmp_path, {"b.jsonl": '{"text": "c"}', "a.jsonl": '{"text": "a"}\n\n{"text": "b"}'})
    corpus = open_corpus(tmp_path)
    assert texts(corpus) == ["a", "b", "c"]
    assert corpus.names == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:1"]
    assert list(corpus.sources) == ["a.jsonl", "b.jsonl"]
    assert texts(open_corpus(tmp_path, keep=lambda name: name == "a.jsonl:3")) == ["b"]


def test_token_files_take_no_eos_and_text_none_either(tmp_path):
    with pytest.raises(ValueError, match="says where documents end: no eos_id"):
        open_corpus(token_file(tmp_path), eos_id=4)
    write_tree(tmp_path, {"x/a.txt": "a"})
    with pytest.raises(ValueError, match="eos_id is for files of tokens"):
        open_corpus(tmp_path / "x", eos_id=4)


# ------------------------------------------------------------------------------------ what changed


def test_the_files_of_a_corpus_are_hashed(tmp_path):
    write_tree(tmp_path, {"a.txt": "a", "b/c.txt": "c", "d.cfg": "d", "e.txt": "e"})
    corpus = open_corpus(tmp_path, keep=lambda name: name != "e.txt")
    want = {name: hashlib.sha256(name[-5].encode()).hexdigest()[:16] for name in corpus.sources}
    assert corpus.sources == want
    assert list(want) == ["a.txt", "b/c.txt"]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n')
    lines = open_corpus(tmp_path / "a.jsonl").sources
    assert lines == {"a.jsonl": hashlib.sha256(b'{"text": "a"}\n').hexdigest()[:16]}
    tokens = open_corpus(token_file(tmp_path / "b"))
    assert tokens.sources == {"a.tokens": fingerprint(tokens)}


# ------------------------------------------------------------------------------------ many files


@pytest.fixture
def _few_descriptors():
    """Let this process open no more than 24 files beyond those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 24, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.case("D14")
@pytest.mark.usefixtures("_few_descriptors")
def test_more_files_than_a_process_may_open_are_read(tmp_path):
    write_tree(tmp_path / "text", {f"{number:03}.txt": str(number) for number in range(100)})
    assert texts(open_corpus(tmp_path / "text")) == [str(number) for number in range(100)]
    (tmp_path / "tokens").mkdir()
    shard = write_corpus(tmp_path / "tokens" / "000.tokens", [[1, 2]])
    for number in range(1, 100):
        shutil.copy(shard.file.path, tmp_path / "tokens" / f"{number:03}.tokens")
    corpus = open_corpus(tmp_path / "tokens")
    assert corpus.read(99, 0, 2).tolist() == [1, 2]
    check_unchanged(corpus)


def test_a_tokenizer_that_leaves_its_vocabulary_is_refused(tmp_path):
    tokenizer = SimpleNamespace(vocab_size=5, encode=lambda text: [ord(c) - 97 for c in text])
    for text, found in (("az", "token 25 at 1"), ("aA", "token -32 at 1")):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(DataError, match=rf"a\.txt has {found}, outside \[0, 5\)"):
            open_corpus(tmp_path, tokenizer=tokenizer)
