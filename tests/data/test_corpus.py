"""What lies at a path becomes documents of tokens, or is refused by name."""

import errno
import hashlib
import os
import re
import socket
import sysconfig
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data import (
    TokenCorpus,
    byte_tokenizer,
    fingerprint,
    held_out,
    held_out_documents,
    is_library_source,
    open_corpus,
    open_tokens,
    standard_library,
    tokens,
    verify_tokens,
    write_corpus,
)
from trainkit.types import DataError, DiskError

BYTES = byte_tokenizer()


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
    with pytest.raises(DataError, match="none was kept"):
        open_corpus(tmp_path, keep=lambda _: False)
    write_tree(tmp_path, {"a.txt": ""})
    with pytest.raises(DataError, match="they are all empty"):
        open_corpus(tmp_path, tokenizer=Words())


def test_what_must_not_be_read_is_named(tmp_path, monkeypatch):
    # Tests may run as root, whom no mode keeps out.
    write_tree(tmp_path, {"x/a.txt": "a"})

    def refuse(path, *_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DataError, match=r"a.txt: Permission denied"):
            open_corpus(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}: Permission denied")):
            open_corpus(tmp_path)


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
        (b"[1]", "no field 'text'; found list"),
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
    for name in ("a.txt", "empty"):
        write_tree(tmp_path, {name: ""})
        with pytest.raises(
            DataError, match=rf"{name}: neither a directory, nor a .jsonl or .tokens"
        ):
            open_corpus(tmp_path / name)
    write_tree(tmp_path, {"a.jsonl": ""})
    with pytest.raises(DataError, match=r"a.jsonl: no documents"):
        open_corpus(tmp_path / "a.jsonl")
    write_tree(tmp_path, {"a.tokens": ""})
    with pytest.raises(DataError, match=r"a.tokens: this token file has no token file's beginning"):
        open_corpus(tmp_path / "a.tokens")


# ------------------------------------------------------------------------------------ token files

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), min_size=1, max_size=6)


@given(DOCUMENTS)
def test_what_was_written_is_read(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("corpus") / "a.tokens"
    for corpus in (write_corpus(path, iter(documents)), open_corpus(path)):
        assert corpus.lengths.tolist() == [len(document) for document in documents]
        read = [corpus.read(i, 0, len(document)).tolist() for i, document in enumerate(documents)]
        assert read == documents
        assert not corpus.tokens.flags.writeable
        assert not corpus.offsets.flags.writeable
    verify_tokens(path)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "kind"),
    [
        (256, None, "uint8"),
        (257, None, "uint16"),
        (65536, None, "uint16"),
        (65537, None, "uint32"),
        (None, None, "uint32"),
        (100, np.uint16, "uint16"),
        (None, "uint8", "uint8"),
    ],
)
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path, vocab_size, dtype, kind):
    corpus = write_corpus(tmp_path / "a.tokens", [[1]], vocab_size=vocab_size, dtype=dtype)
    assert corpus.tokens.dtype == kind
    assert corpus.vocab_size == vocab_size


def written(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2, 3], [], [4] * 50], vocab_size=100)
    return path


def test_a_file_cut_anywhere_is_refused_with_both_sizes(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    for size in (*range(0, len(data), 97), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=re.escape(str(path))) as caught:
            open_corpus(path)
        if size >= 4096:
            assert (caught.value.got, caught.value.want) == (size, len(data))
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        open_corpus(path)


def test_a_flipped_bit_is_found_at_open_or_by_verify(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    header = 48 + int.from_bytes(data[8:16], "little")
    for place in [*range(0, header, 5), *range(4096, len(data), 3)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(DataError, match=re.escape(str(path))):
            verify_tokens(path)
        if place < header:
            with pytest.raises(DataError, match=re.escape(str(path))):
                open_tokens(path)


def test_a_header_that_says_another_dtype_or_version_is_refused(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"uint8"', b'"uint4"'))
    with pytest.raises(DataError, match="a header that is truncated or damaged"):
        open_corpus(path)
    size = int.from_bytes(data[8:16], "little")
    header = orjson.loads(data[48 : 48 + size])
    for change, message in [
        ({"version": 2}, "version 2; this trainkit reads 1"),
        ({"dtype": "object"}, "unknown dtype object"),
        ({"dtype": "uint16"}, "bytes instead of"),
        ({"tokens": 52}, "offsets that do not rise from 0 to 52"),
    ]:
        path.write_bytes(tokens._encode_header(header | change) + data[4096:])
        with pytest.raises(DataError, match=message):
            open_corpus(path)


def test_offsets_that_fall_and_tokens_outside_the_vocabulary_are_found(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    header = {"version": 1, "dtype": "uint8", "documents": 3, "tokens": 53, "vocab_size": 100}

    def forge(offsets, **changes):
        ends = np.array(offsets, "<i8").tobytes()
        body = data[4096:-32] + ends
        hashes = {"offsets_sha256": ends, "sha256": body}
        hashes = {name: hashlib.sha256(part).hexdigest() for name, part in hashes.items()}
        facts = header | hashes | changes
        path.write_bytes(tokens._encode_header(facts) + body)

    forge([0, 3, 3, 53])
    verify_tokens(path)
    forge([0, 3, 2, 53])
    with pytest.raises(DataError, match="offsets that do not rise from 0 to 53"):
        open_corpus(path)
    forge([0, 3, 3, 53], vocab_size=4)
    with pytest.raises(DataError, match="token 4 outside its vocabulary of 4"):
        verify_tokens(path)


def test_another_kind_of_file_with_the_suffix_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5000))
    (tmp_path / "a.npy").rename(tmp_path / "a.tokens")
    with pytest.raises(DataError, match="no token file's beginning"):
        open_corpus(tmp_path / "a.tokens")


def test_a_tokenizer_must_cover_a_token_files_vocabulary(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1]], vocab_size=300)
    with pytest.raises(DataError, match="vocabulary of 300 is larger than the tokenizer's, 259"):
        open_corpus(path, tokenizer=BYTES)
    assert open_corpus(path, tokenizer=Words()).vocab_size == 300


def test_keep_is_refused_for_a_token_file(tmp_path):
    with pytest.raises(ValueError, match="no names for `keep`"):
        open_corpus(written(tmp_path), keep=held_out)


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ([], {}, "no documents to write"),
        ([[1], [5, -1]], {}, r"document 1 has token -1 at 1, outside \[0, 4294967296\)"),
        ([[1], [2**32]], {}, "document 1 has token 4294967296 at 0"),
        ([[300]], {"dtype": "uint8"}, r"token 300 at 0, outside \[0, 256\)"),
        ([[99, 100]], {"vocab_size": 100}, r"token 100 at 1, outside \[0, 100\)"),
        ([[1.5]], {}, "document 0 must be integers"),
        ([["a"]], {}, "document 0 must be integers"),
        ([[[1]]], {}, "one dimension"),
    ],
)
def test_bad_documents_are_refused_and_nothing_is_left(tmp_path, documents, arguments, message):
    with pytest.raises(DataError, match=message):
        write_corpus(tmp_path / "a.tokens", documents, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .tokens"):
        write_corpus(tmp_path / "a.bin", [[1]])
    with pytest.raises(ValueError, match="dtype must be one of uint8, uint16, uint32, got int64"):
        write_corpus(tmp_path / "a.tokens", [[1]], dtype=np.int64)


def test_a_source_that_fails_leaves_the_old_file_as_it_was(tmp_path):
    path = written(tmp_path)
    before = path.read_bytes()

    def documents():
        yield [1]
        raise OSError(errno.EIO, "the source broke")

    with pytest.raises(OSError, match="the source broke") as caught:
        write_corpus(path, documents())
    assert not isinstance(caught.value, DiskError)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_corpus_may_be_rewritten_while_it_is_read(tmp_path):
    path = written(tmp_path)
    corpus = open_corpus(path)
    write_corpus(path, [[9]])
    assert corpus.read(0, 0, 3).tolist() == [1, 2, 3]
    assert open_corpus(path).read(0, 0, 1).tolist() == [9]


@pytest.mark.parametrize("documents", [[[1, 2]], [[1] * 100_000]])
def test_a_full_disk_is_named_with_what_is_free(tmp_path, monkeypatch, documents):
    opened = Path.open

    def open_full(path, mode="r", *args, **kwargs):
        return (
            opened(Path("/dev/full"), "wb") if mode == "xb" else opened(path, mode, *args, **kwargs)
        )

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DiskError, match=r"a.tokens: No space left on device.* \d+ bytes are free"):
        write_corpus(tmp_path / "a.tokens", documents)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DiskError, match=r"cannot write .*gone/a.tokens: No such file"):
        write_corpus(tmp_path / "gone" / "a.tokens", [[1]])
    with pytest.raises(DiskError, match=r"cannot write /proc/a.tokens"):
        write_corpus("/proc/a.tokens", [[1]])


def test_reading_outside_a_document_is_refused(tmp_path):
    corpus = open_corpus(written(tmp_path))
    for document, start, length in [(3, 0, 1), (-1, 0, 1), (0, 1, 3), (0, -1, 2), (1, 0, 1)]:
        with pytest.raises(ValueError, match=f"document {document}"):
            corpus.read(document, start, length)


# ------------------------------------------------------------------------------------ the library


def test_held_out_files_are_one_in_twenty_by_name_alone():
    names = [f"package/module_{number}.py" for number in range(4000)]
    chosen = [name for name in names if held_out(name)]
    assert 150 < len(chosen) < 250
    held = [number for number in range(60) if held_out(f"{number}.py")]
    assert held == [6, 11, 20, 43, 56]  # for ever: another answer would move files across
    assert all(held_out(name, one_in=1) for name in names)
    with pytest.raises(ValueError, match="one_in must be at least 1, got 0"):
        held_out("a", one_in=0)


def test_documents_are_held_out_by_name_or_by_number(tmp_path):
    named = open_corpus(write_tree(tmp_path, {f"{number}.py": "" for number in range(60)}))
    assert held_out_documents(named).tolist() == [held_out(name) for name in named.names]
    assert held_out_documents(named).sum() == 5
    numbered = write_corpus(tmp_path / "a.tokens", [[1]] * 60)
    assert numbered.names is None
    assert held_out_documents(numbered).tolist() == [held_out(str(n)) for n in range(60)]


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
    corpus = open_corpus(standard_library(), keep=is_library_source)
    assert texts(corpus) == ["json", "os", "case"]


def test_the_standard_library_opens_as_a_corpus():
    corpus = open_corpus(
        standard_library() / "json", keep=lambda name: is_library_source("json/" + name)
    )
    assert corpus.lengths.sum() > 10_000
    assert "JSONDecoder" in "".join(texts(corpus))


def test_changed_offsets_are_seen_when_a_token_file_is_opened(tmp_path):
    path = tmp_path / "c.tokens"
    write_corpus(path, [[1, 2, 3], [4, 5]], vocab_size=9)
    data = bytearray(path.read_bytes())
    data[-16] = 2  # the first document ends one token earlier: still rising, still the same size
    path.write_bytes(data)
    with pytest.raises(DataError, match="offsets that were changed"):
        open_corpus(path)


def test_a_fingerprint_follows_the_content_and_is_read_from_a_token_file(tmp_path):
    paths = [tmp_path / f"{i}.tokens" for i in range(3)]
    contents = [[[1, 2], [3]], [[1, 2], [3]], [[1, 2, 3]]]
    corpora = [write_corpus(path, c, vocab_size=9) for path, c in zip(paths, contents, strict=True)]
    first, same, other = map(fingerprint, corpora)
    assert first == same != other
    in_memory = [TokenCorpus(c.tokens, c.offsets) for c in corpora]
    first, same, other = map(fingerprint, in_memory)
    assert first == same != other
