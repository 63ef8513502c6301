"""URLs of buckets, also where a flag has made a path of one, and the folder for local copies."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from trainkit.types import ConfigError

# `Path` makes s3:/bucket of s3://bucket, and flags for folders are paths.
_URL = re.compile(r"(s3|gs|az):(?:/+(.*))?")
# Other names of the three, and their servers' own: as paths they would become folders "gcs:".
_OTHER = re.compile(
    r"(s3|gs|az|s3a|s3n|r2|gcs|azure|abfss?|wasbs?|hdfs|https?):/.*", re.IGNORECASE | re.DOTALL
)
_ALIASES = {"s3a": "s3", "s3n": "s3", "r2": "s3", "gcs": "gs", "azure": "az"}


def find_url(path: str | Path) -> str | None:
    """Return the URL that a text or a path stands for, or None for a path of this machine.

    Args:
        path: A path, `s3://bucket/key`, or what `Path` makes of that.

    Returns:
        The URL, without slashes at its end.

    Raises:
        ConfigError: It has another scheme, as `gcs://` and `S3://`; it has no bucket; or it has a
            user, a password or a query: what a URL contains is written into logs.

    Examples:
        >>> find_url(Path("s3://bucket/run")), find_url("runs/pretrain")
        ('s3://bucket/run', None)
    """
    match = _URL.fullmatch(str(path))
    if match is None:
        other = _OTHER.fullmatch(str(path))
        if other is not None:
            scheme = other[1].lower()
            name = _ALIASES.get(scheme, scheme)
            names = f"{name}://" if name in ("s3", "gs", "az") else "s3://, gs:// or az://"
            raise ConfigError(
                f"find_url: {other[1]}:// is no name of a bucket here",
                where="url",
                got=f"{other[1]}://",
                want=f"{names}BUCKET/NAME",
                hint=f"write {names}, or a path of this machine",
            )
        return None
    scheme, rest = match[1], (match[2] or "").rstrip("/")
    parts = urlsplit(f"{scheme}://{rest}")
    # Neither the URL nor a part of it is in the message, as both may contain a key.
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"find_url: a {scheme}:// URL contains a user, a password or a query",
            where="url",
            want=f"{scheme}://BUCKET/NAME",
            hint="leave it out: credentials come from the environment, from ~/.aws, or from the "
            "machine's own account",
        )
    if not parts.netloc:
        raise ConfigError(
            f"find_url: {scheme}:// names no bucket", where="url", want=f"{scheme}://BUCKET/NAME"
        )
    if any(part in ("", ".", "..") for part in rest.split("/")):
        raise ConfigError(
            f"find_url: {scheme}://{rest} has an empty part, or one of dots",
            where="url",
            hint="name the object as the bucket lists it",
        )
    return f"{scheme}://{rest}"


def cache_folder(kind: str, url: str) -> Path:
    """Return the folder of this machine that belongs to a URL.

    It is below TRAINKIT_CACHE, or else below XDG_CACHE_HOME or ~/.cache.

    Args:
        kind: What is in it: "runs" for run directories.
        url: The URL, from `find_url`.

    Examples:
        >>> cache_folder("runs", "s3://bucket/run").parts[-4:]
        ('runs', 's3', 'bucket', 'run')
    """
    scheme, _, rest = url.partition("://")
    return cache_home() / kind / scheme / rest


def cache_home() -> Path:
    """Return the folder of local copies: TRAINKIT_CACHE, or trainkit below ~/.cache."""
    home = os.environ.get("TRAINKIT_CACHE")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainkit"
