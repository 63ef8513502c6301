"""The run directory is made and probed, and whoever else can write it is told of."""

import errno
import os
from pathlib import Path

import pytest

from trainkit.run.directory import make_run_dir
from trainkit.types import ConfigError, DiskError


def test_a_run_directory_is_made_and_probed(tmp_path):
    made = make_run_dir(tmp_path / "a" / "b")
    assert made.is_dir()
    assert list(made.iterdir()) == []
    assert make_run_dir(str(made)) == made


@pytest.mark.case("L11")
def test_a_url_is_refused_and_is_no_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3://bucket/scores is in a bucket, and only runs that"):
        make_run_dir(Path("s3://bucket/scores"))
    assert not [*tmp_path.iterdir()]


def test_a_run_directory_that_cannot_be_written_is_refused_by_name(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="file is a file"):
        make_run_dir(file)
    for path in (file / "below", "/proc/trainkit", "/dev/full/run"):
        with pytest.raises(DiskError, match=f"user {os.geteuid()} cannot write {path}"):
            make_run_dir(path)
    assert file.read_text() == "kept"


def test_a_probe_that_finds_the_disk_full_is_a_disk_error(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainkit.run.directory.os.fsync", full)
    with pytest.raises(DiskError, match="No space left on device"):
        make_run_dir(tmp_path)
    assert list(tmp_path.iterdir()) == []


def in_mode(path, mode):
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    return path


@pytest.mark.case("K19")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750])
def test_a_directory_of_the_users_own_is_trusted(mode, tmp_path):
    make_run_dir(in_mode(tmp_path / "run", mode), strict_owner=True, log=pytest.fail)


@pytest.mark.case("K19")
def test_whoever_else_can_write_the_directory_is_told_of_or_refused(tmp_path, monkeypatch):
    told, path = [], in_mode(tmp_path / "run", 0o777)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_gid + 1)
    assert make_run_dir(path, log=told.append) == path
    assert f"{path} can be written by everybody (mode 777)" in told
    assert any("by the group" in problem for problem in told)
    with pytest.raises(ConfigError, match="can be written by everybody"):
        make_run_dir(path, strict_owner=True)


@pytest.mark.case("K19")
def test_a_directory_of_somebody_else_is_told_of(tmp_path, monkeypatch):
    told, owner = [], 12345
    if os.geteuid() == 0:
        os.chown(tmp_path, owner, -1)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    make_run_dir(tmp_path, log=told.append)
    assert f"belongs to user {owner}" in told[0]


@pytest.mark.case("K20")
@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755), (0, 0o777)])
def test_a_run_directory_obeys_the_umask(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        made = make_run_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o777 == mode
