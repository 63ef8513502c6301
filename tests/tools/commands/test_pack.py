"""The command `python -m trainkit pack`."""

import argparse

import pytest

from trainkit.packing import first_fit, make_balanced_fit, pack_bins, report_packing
from trainkit.text.corpora import write_corpus
from trainkit.tools.commands import pack
from trainkit.types import DataError, DiskError


def run_pack(*words):
    parser = argparse.ArgumentParser()
    pack.add(parser)
    return pack.run(parser.parse_args([*map(str, words)]))


@pytest.mark.parametrize("name", ["rows", "rows.xyz", ".png", ".", "rows.png.gz"])
def test_a_picture_in_no_format_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(
        ValueError, match=r"pack: --out: a picture ends in \.png, \.svg, \.pdf, got "
    ):
        run_pack(tmp_path / "no corpus", "--capacity", 8, "--out", tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_no_place_for_a_picture(tmp_path):
    (tmp_path / "rows.png").mkdir()
    with pytest.raises(DiskError, match=r"pack: --out: .*rows\.png is a directory"):
        run_pack(tmp_path / "no corpus", "--capacity", 8, "--out", tmp_path / "rows.png")


def test_the_pack_command_reports_what_pack_bins_would_do(tmp_path):
    from trainkit.text.corpora import open_corpus

    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text("x" * 7 * number)
    lengths = open_corpus(tmp_path / "texts").lengths
    words = "--capacity 48 --fit first_fit --group-size 4 --overlong drop --multiple-of 4"
    words += f" --max-documents 2 --seed 3 --out {tmp_path / 'rows.png'}"
    expected = pack_bins(
        lengths, 48, fit=first_fit, group_size=4, overlong="drop", multiple_of=4,
        max_documents=2, seed=3,
    )  # fmt: skip
    report, code = run_pack(tmp_path / "texts", *words.split())
    assert (report, code) == (report_packing(expected, lengths), 0)
    assert report["dropped_documents"] > 0
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    report, _ = run_pack(tmp_path / "texts", "--capacity", 64, "--balanced", 3)
    assert report == report_packing(pack_bins(lengths, 64, fit=make_balanced_fit(3)), lengths)
    assert report["rows"] == 6
    with pytest.raises(DiskError, match="nowhere is not a directory"):
        run_pack(tmp_path / "texts", "--capacity", 48, "--out", tmp_path / "nowhere" / "rows.png")


def test_a_packing_that_leaves_no_row_is_refused(tmp_path):
    corpus = tmp_path / "c.tokens"
    write_corpus(corpus, [[1] * 9, [], [2] * 12], vocab_size=9)
    words = (corpus, "--capacity", 4, "--out", tmp_path / "rows.png")
    with pytest.raises(DataError, match=r"no row is left of its 3 .* 2 .*--capacity 4") as error:
        run_pack(*words, "--overlong", "drop")
    assert (error.value.where, error.value.got) == (corpus, 0)
    assert not (tmp_path / "rows.png").exists()
    report, _ = run_pack(*words[:3], "--overlong", "truncate")
    assert report["rows"] == 2
    write_corpus(tmp_path / "empty.tokens", [[], []], vocab_size=9)
    with pytest.raises(DataError, match=r"no tokens: all 2 documents are empty"):
        run_pack(tmp_path / "empty.tokens", "--capacity", 4)
