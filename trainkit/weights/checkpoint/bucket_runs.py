"""Runs whose directory is a URL: the local folder of one, and what is fetched into it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from trainkit.buckets.files import lock_folder
from trainkit.buckets.store import (
    Store,
    get_bytes,
    get_file,
    list_files,
    list_objects,
    open_store,
)
from trainkit.buckets.urls import cache_folder, cache_home, find_url
from trainkit.files import commit_folder, convert_disk_errors
from trainkit.types import ConfigError, Log, log_info
from trainkit.weights.checkpoint.manifest import (
    MANIFEST,
    inspect_files,
    is_plain_file_name,
    list_checkpoints,
    parse_checkpoint_name,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.safe_files import check_free_space

# What a run goes on with, beside a checkpoint.
_FILES = ("run.json", "config.toml", "metrics.jsonl", "events.jsonl")


def find_run_folder(run_dir: str | Path) -> Path:
    """Return the folder in which a run works: of a URL the one in the cache.

    Examples:
        >>> find_run_folder("runs/pretrain")
        PosixPath('runs/pretrain')
    """
    url = find_url(run_dir)
    return Path(run_dir) if url is None else cache_folder("runs", url)


def fetch_run(run_dir: str | Path, request: str | Path = "auto", *, log: Log = log_info) -> Path:
    """Bring the newest whole checkpoint of a run in a bucket into its local folder.

    If the newest that verifies is there already, nothing is copied but the files that are missing.
    One that is damaged in the bucket is copied too, so that `resume` skips it as it skips a local
    one, and the one before it is fetched.

    Args:
        run_dir: A URL; or a path, which is returned as it is.
        request: What the run resumes from: "auto", "never" (nothing is fetched), or a checkpoint.
        log: Called with what is fetched, and with what is damaged.

    Returns:
        The local folder.

    Raises:
        ConfigError: The bucket cannot be used; or the folder and the bucket hold two runs.
        DiskError: The server does not answer, or there is no room.

    Effects:
        Writes to the local folder, one process of a machine at a time.

    Examples:
        >>> fetch_run("runs/pretrain")
        PosixPath('runs/pretrain')
    """
    url = find_url(run_dir)
    folder = find_run_folder(run_dir)
    if url is None or request == "never":
        return folder
    store = open_store(url)
    with lock_folder(folder, by="fetch_run"):
        remote = list_remote(list_files(store))
        _check_run(store, folder)
        if request == "auto":
            is_newer = _fetch_newest(store, folder / "checkpoints", remote, log)
        else:
            is_newer = False
        for name in _FILES:
            if is_newer or not (folder / name).exists():
                with contextlib.suppress(FileNotFoundError):
                    _replace(store, name, folder / name)
    return folder


def fetch_request(request: str | Path, *, log: Log = log_info) -> str | Path:
    """Return what a run resumes from, after fetching it if it is the URL of a checkpoint.

    Args:
        request: "auto", "never", the path of a checkpoint, or its URL.
        log: Called with what is fetched.

    Raises:
        ConfigError: There is no such checkpoint in the bucket, or the bucket cannot be used.
        DiskError: See `fetch_run`.

    Effects:
        Writes to the local folder of that run.

    Examples:
        >>> fetch_request("auto")
        'auto'
    """
    url = find_url(request)
    if url is None:
        return request
    run, _, name = url.rpartition("/checkpoints/")
    if not run or parse_checkpoint_name(name) is None:
        raise ConfigError(
            f"resume: {url} is no checkpoint",
            where=url,
            want="auto, never, or s3://BUCKET/RUN/checkpoints/step_...",
        )
    folder = cache_folder("runs", run)
    store = open_store(run)
    with lock_folder(folder, by="fetch_run"):
        path = folder / "checkpoints" / name
        if _is_whole(path):
            return path
        if name not in list_remote(list_files(store, f"checkpoints/{name}")):
            raise ConfigError(f"resume: there is no whole {url}", where=url)
        _download(store, name, path, log)
    return path


def fetch_lines(run_dir: str | Path, *, log: Log = log_info) -> Path:
    """Copy what a run in a bucket has written about itself, without its checkpoints.

    Args:
        run_dir: A URL; or a path, which is returned as it is.
        log: Called with the folder.

    Returns:
        A folder in the cache, not that in which the run works: the lines of the last save, or of
        this machine if the run was here, are in `find_run_folder`.

    Raises:
        ConfigError: There is no run at the URL, or the bucket cannot be used.
        DiskError: See `fetch_run`.

    Effects:
        Replaces the files in the folder.

    Examples:
        >>> fetch_lines("runs/pretrain")
        PosixPath('runs/pretrain')
    """
    url = find_url(run_dir)
    if url is None:
        return Path(run_dir)
    store = open_store(url)
    folder = cache_folder("reports", url)
    with lock_folder(folder, by="fetch_lines"):
        found = []
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                _replace(store, name, folder / name)
                found.append(name)
        if not found:
            raise ConfigError(f"fetch_lines: there is no run at {url}", where=url)
    log(f"fetched the lines of {url} into {folder}")
    return folder


def fetch_model(path: str | Path, *, log: Log = log_info) -> Path:
    """Return a local copy of a run, a checkpoint or a Hugging Face folder of a bucket.

    Of a run its newest whole checkpoint is copied into its folder (`fetch_run`). The files of
    another folder are copied into the cache, once for the names, sizes and ETags that they have.

    Args:
        path: A URL; or a path, which is returned as it is.
        log: Called with what is fetched.

    Raises:
        ConfigError: There is nothing at the URL, or the bucket cannot be used.
        DiskError: See `fetch_run`.

    Effects:
        Writes into the cache, one process of a machine at a time.

    Examples:
        >>> fetch_model("runs/pretrain")
        PosixPath('runs/pretrain')
    """
    url = find_url(path)
    if url is None:
        return Path(path)
    root, _, name = url.rpartition("/")
    if root.endswith("/checkpoints"):
        return Path(fetch_request(url, log=log))
    store = open_store(url)
    objects = list_objects(store, "")
    if list_remote({key: size for key, (size, _) in objects.items()}):
        return fetch_run(url, log=log)
    if "config.json" not in objects:
        raise ConfigError(
            f"fetch_model: there is no run and no Hugging Face folder at {url}",
            where=url,
            want="a folder with checkpoints/, or with config.json",
        )
    record = orjson.dumps([url, objects], option=orjson.OPT_SORT_KEYS)
    home = cache_home() / "models" / hashlib.sha256(record).hexdigest()[:16]
    with lock_folder(home, by="fetch_model"):
        folder = home / name
        if not folder.exists():
            _download_files(store, {key: key for key in objects}, folder, log)
    return folder


def list_remote(sizes: dict[str, int]) -> list[str]:
    """Return the names of the checkpoints among the keys of a run, newest first.

    Without its manifest, which is put last, it is none.

    Examples:
        >>> list_remote(
        ...     {"checkpoints/step_00000002/manifest.json": 9, "checkpoints/step_00000003/a": 9}
        ... )
        ['step_00000002']
    """
    names = {key.split("/")[1] for key in sizes if _is_manifest(key)}
    return sorted(names, key=lambda name: parse_checkpoint_name(name) or (0, 0), reverse=True)


def _is_manifest(key: str) -> bool:
    parts = key.split("/")
    is_named = len(parts) == 3 and parts[0] == "checkpoints" and parts[2] == MANIFEST
    return is_named and parse_checkpoint_name(parts[1]) is not None


def _fetch_newest(store: Store, directory: Path, remote: list[str], log: Log) -> bool:
    """Fetch the newest checkpoint that verifies, unless it is here; return whether it was."""
    local = [path.name for path in list_checkpoints(directory)]
    names = sorted(
        {*local, *remote}, key=lambda name: parse_checkpoint_name(name) or (0, 0), reverse=True
    )
    for name in names:
        path = directory / name
        if _is_whole(path):
            return False
        if name in remote:
            # What was damaged is fetched again when the bucket has other objects.
            objects = list_objects(store, f"checkpoints/{name}")
            known = directory / f".damaged-{name}"
            if known.exists() and known.read_bytes() == orjson.dumps(objects):
                log(f"{store.url}/checkpoints/{name} is damaged, as when it was fetched before")
                continue
            _download(store, name, path, log)
            problems = verify_checkpoint(path)
            if not problems:
                known.unlink(missing_ok=True)
                return True
            log(f"{store.url}/checkpoints/{name} is damaged: {problems[0]}")
            known.write_bytes(orjson.dumps(objects))
    return False


def _is_whole(path: Path) -> bool:
    if not (path / MANIFEST).is_file():
        return False
    # Hashing is expensive, and one process of a machine suffices for it.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return not inspect_files(path)[0]
    return not _verify_once(path, (path / MANIFEST).stat().st_mtime_ns)


@lru_cache(maxsize=4)  # a recipe asks three times before its first step
def _verify_once(path: Path, modified: int) -> tuple[str, ...]:
    del modified
    return tuple(verify_checkpoint(path))


def _download(store: Store, name: str, path: Path, log: Log) -> None:
    keys = list_files(store, f"checkpoints/{name}")
    # Other names no manifest has.
    files = {x: key for key in keys if is_plain_file_name(x := key.rpartition("/")[2])}
    _download_files(store, files, path, log)


def _download_files(store: Store, files: Mapping[str, str], path: Path, log: Log) -> None:
    """Copy objects, whose keys are given by names, into a folder that then appears at once."""
    sizes = list_files(store)
    total = sum(sizes[key] for key in files.values())
    log(f"fetching {store.url}, {total / 2**20:.1f} MiB, into {path}")
    staging = path.with_name(f".staging-fetch-{path.name}")
    with convert_disk_errors(path, by="fetch_run"):
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process
        staging.mkdir(parents=True)
        free = shutil.disk_usage(staging).free
    check_free_space(f"fetch_run: {store.url}", path, free=free, needed=total)
    for file, key in files.items():
        with convert_disk_errors(path, by="fetch_run"):
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
        get_file(store, key, staging / file)
    with convert_disk_errors(path, by="fetch_run"):
        if path.exists():  # a damaged one, in its place
            shutil.rmtree(path)
        commit_folder(staging, path)


def _replace(store: Store, key: str, path: Path) -> None:
    new = path.with_name(f".fetch-{path.name}")
    new.unlink(missing_ok=True)
    get_file(store, key, new)
    new.replace(path)


def _check_run(store: Store, folder: Path) -> None:
    """Raise if the folder holds another run than the bucket, as after the bucket was emptied."""
    try:
        remote = _read_id(get_bytes(store, "run.json"))
        local = _read_id((folder / "run.json").read_bytes())
    except FileNotFoundError:
        return
    if None not in (local, remote) and local != remote:
        raise ConfigError(
            f"fetch_run: {store.url} holds the run {remote}, and its folder {folder} the run "
            f"{local}",
            where=store.url,
            got=local,
            want=remote,
            hint=f"remove {folder} to go on with the run in the bucket, or choose another --out",
        )


def _read_id(data: bytes) -> Any:
    try:
        return orjson.loads(data)["run"]
    except (orjson.JSONDecodeError, KeyError, TypeError):  # damaged: `get_run_id` replaces it
        return None
