"""Objects in a bucket: put, get, list and delete, with errors that say what to do.

Through obstore, because it puts at a fraction of the processor time of s3fs, is imported in a
twentieth of the time, and runs without an event loop or the interpreter's lock (figures on the page
"Store runs and corpora in a bucket").
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from threading import Thread, get_native_id
from typing import Any, Literal
from xml.etree import ElementTree as ET

import attrs

from trainkit.buckets.urls import find_url
from trainkit.types import ConfigError, DataError, DiskError, TrainkitError, needs_extra

_PART = 8 << 20  # bytes of a part of an upload, and of a block of a download
_PARALLEL = 4  # parts in flight, so that an upload needs 32 MiB
# Of an exception's text: what follows repeats it, and may be pages.
_MAX_TEXT = 300
# Of a URL in it: the user and the password of an endpoint, and a query, which may be signed.
_SECRETS = re.compile(r"(?<=//)[^/@\s]+@|\?[^\s\"')]+")
_HTTP = urllib.request.build_opener()


@attrs.frozen(eq=False)
class _Signing:
    settings: Mapping[str, str] = attrs.field(repr=False)
    bucket: str
    prefix: str
    http: Mapping[str, Any]


@attrs.frozen(eq=False)
class Store:
    """A folder of a bucket: the keys of all functions are relative to it.

    Attributes:
        url: The folder, as in messages.
        client: The client of obstore.
        signing: What a client that signs other requests needs; None where no S3 server listens.
    """

    url: str
    client: Any = attrs.field(repr=False)
    signing: _Signing | None = attrs.field(repr=False)


def open_store(url: str | Path, *, timeout: float = 30.0, patience: float = 20.0) -> Store:
    """Open a folder of a bucket; nothing is sent yet, see `check_store`.

    Credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE,
    AWS_REGION, AWS_ENDPOINT_URL; AZURE_STORAGE_ACCOUNT_NAME and so on), from ~/.aws, or from the
    machine's own account. They are held by the client alone, and are in no message.

    Args:
        url: `s3://bucket/folder`, or `gs://` and `az://`.
        timeout: Seconds that one request may take.
        patience: Seconds for which a request that fails with a 5xx or a timeout is repeated, at
            growing intervals.

    Raises:
        ConfigError: The URL is none, or obstore is missing, or its settings are wrong.

    Examples:
        >>> open_store("runs/pretrain")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: open_store: runs/pretrain is no URL of a bucket
    """
    full = find_url(url)
    if full is None:
        raise ConfigError(
            f"open_store: {url} is no URL of a bucket", where="url", want="s3://BUCKET/NAME"
        )
    with needs_extra("buckets"):
        from obstore import store as stores  # noqa: PLC0415 -- an extra
        from obstore.exceptions import BaseError  # noqa: PLC0415
    _start_client()
    # The intervals double from 0.1 s to 15 s.
    retries = {"max_retries": 10, "retry_timeout": timedelta(seconds=patience)}
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout),
        "connect_timeout": timedelta(seconds=min(timeout, 5.0)),
    }
    scheme, _, rest = full.partition("://")
    settings = _read_aws_settings() if scheme == "s3" else {}
    # Plain http is for a server of one's own, which only an explicit endpoint names.
    if settings.get("endpoint", "").startswith("http://"):
        options["allow_http"] = True
    bucket, _, prefix = rest.partition("/")
    open_url: Any = stores.from_url  # typed for each kind of server apart
    try:
        client = open_url(
            full, config=settings or None, retry_config=retries, client_options=options
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(
            f"open_store: {full} cannot be opened: {_shorten(error)}",
            where=full,
            hint="correct the settings of the object store in the environment",
        ) from None
    signing = _Signing(settings, bucket, prefix, options) if scheme == "s3" else None
    return Store(full, client, signing)


@lru_cache(maxsize=1)
def _start_client() -> None:
    """Start the client's threads, which sign and encrypt, with a low priority."""
    import obstore  # noqa: PLC0415 -- an extra
    from obstore.store import MemoryStore  # noqa: PLC0415

    def start() -> None:
        lower_priority()
        obstore.put(MemoryStore(), "a", b"")

    # They have the priority of the thread that uses the client first.
    thread = Thread(target=start)
    thread.start()
    thread.join()


def lower_priority() -> None:
    """Let this thread run where others leave a core: a training step must not wait for it.

    Effects:
        Raises the nice value of the thread by 10, for good.

    Examples:
        >>> from threading import Thread
        >>> Thread(target=lower_priority).start()
    """
    with contextlib.suppress(OSError):  # a system that does not let a thread do so
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)


def _read_aws_settings() -> dict[str, str]:
    """Return what obstore does not read itself: ~/.aws, and the endpoint of either variable."""
    found: dict[str, str] = {}
    profile = os.environ.get("AWS_PROFILE", "default")
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    for variable, default, sections in (
        ("AWS_CONFIG_FILE", "~/.aws/config", (f"profile {profile}", profile)),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", (profile,)),
    ):
        parser = configparser.RawConfigParser()
        # A file that cannot be parsed is for the tool that wrote it; a missing key is said later.
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(Path(os.environ.get(variable, default)).expanduser())
        for section in filter(parser.has_section, sections):
            found |= {names[key]: x for key, x in parser.items(section) if key in names}
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # variables precede files, and keys belong together
        for name in ("access_key_id", "secret_access_key", "session_token"):
            found.pop(name, None)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT")
    found |= {"region": region} if region else {}
    return found | ({"endpoint": endpoint.rstrip("/")} if endpoint else {})


def check_store(store: Store) -> None:
    """Check that a folder of a bucket can be listed, written, read and cleared.

    Raises:
        ConfigError: There is no such bucket, it is in another region, or it does not let this
            account in; says which, and what to do.
        DiskError: The server does not answer.

    Effects:
        Puts a small object, and deletes it.
    """
    key = ".trainkit-probe"
    list_files(store, key)
    put_bytes(store, key, b"probe")
    if get_range(store, key, 1, 3) != b"rob":
        raise DiskError(
            f"check_store: {store.url} returns other bytes than were put",
            where=store.url,
            hint="its server does not read ranges; use another",
        )
    delete_files(store, [key])


def put_file(store: Store, key: str, path: Path) -> None:
    """Put a file; a large one in parts, of which a failure leaves none.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: See `check_store`.
        DiskError: See `check_store`.

    Effects:
        Writes an object, which appears whole or not at all.
    """
    import obstore  # noqa: PLC0415 -- an extra

    # Before, as the client has one exception for a file and for a bucket that is not there.
    size = path.stat().st_size
    with _explain(store, "put_file", key):
        obstore.put(
            store.client,
            key,
            path if size else b"",  # an empty file has no parts
            chunk_size=_PART,
            max_concurrency=_PARALLEL,
        )


def put_bytes(store: Store, key: str, data: bytes) -> None:
    """Put some bytes as an object, whole or not at all; raises as `put_file`.

    Effects:
        Writes an object.
    """
    import obstore  # noqa: PLC0415 -- an extra

    with _explain(store, "put_bytes", key):
        obstore.put(store.client, key, data)


def get_bytes(store: Store, key: str) -> bytes:
    """Return an object, a small one; raises as `get_file`."""
    import obstore  # noqa: PLC0415 -- an extra

    with _explain(store, "get_bytes", key):
        return bytes(obstore.get(store.client, key).bytes())


def get_range(store: Store, key: str, start: int, size: int, *, etag: str = "") -> bytes:
    """Return `size` bytes of an object, from byte `start` on.

    Args:
        store: The folder of the bucket.
        key: The object.
        start: The first byte.
        size: The number of bytes.
        etag: The ETag that the object must have; "" does not compare.

    Raises:
        DataError: The object has another ETag.
        FileNotFoundError: There is no such object.
        ConfigError: See `check_store`.
        DiskError: See `check_store`.
    """
    import obstore  # noqa: PLC0415 -- an extra

    if size == 0:
        return b""
    with _explain(store, "get_range", key):
        found = obstore.get(store.client, key, options={"range": (start, start + size)})
        data = bytes(found.bytes())
    # Compared here, as not every server compares it on request.
    if etag and _read_etag(found.meta) != etag:
        raise DataError(
            f"get_range: {store.url}/{key} was replaced while it was read",
            where=f"{store.url}/{key}",
            got=_read_etag(found.meta),
            want=etag,
            hint="start again, which reads the new one; give a new file a new name instead",
        )
    if len(data) != size:
        raise DiskError(
            f"get_range: {store.url}/{key} returned {len(data)} bytes instead of {size}",
            where=f"{store.url}/{key}",
        )
    return data


def get_file(store: Store, key: str, path: Path) -> int:
    """Copy an object into a new file, and return its bytes.

    Raises:
        FileNotFoundError: There is no such object.
        ConfigError: See `check_store`.
        DiskError: See `check_store`; or the file cannot be written.

    Effects:
        Writes a file, which has reached the disk in the end; an error leaves a part of it.
    """
    import obstore  # noqa: PLC0415 -- an extra

    with _explain(store, "get_file", key):
        size = obstore.head(store.client, key)["size"]
    with path.open("xb") as file, ThreadPoolExecutor(_PARALLEL) as pool:

        def copy(start: int) -> None:
            data = get_range(store, key, start, min(_PART, size - start))
            if os.pwrite(file.fileno(), data, start) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        # By ranges: one that breaks off is repeated, and not all of the object.
        list(pool.map(copy, range(0, size, _PART)))
        os.fsync(file.fileno())
    return size


def list_files(store: Store, prefix: str = "") -> dict[str, int]:
    """Return the bytes of every object below a prefix, a folder, by its key.

    Raises:
        ConfigError: See `check_store`.
        DiskError: See `check_store`.
    """
    import obstore  # noqa: PLC0415 -- an extra

    with _explain(store, "list_files", prefix):
        pages = obstore.list(store.client, prefix=prefix or None)
        return {entry["path"]: entry["size"] for page in pages for entry in page}


def list_objects(store: Store, name: str) -> dict[str, tuple[int, str]]:
    """Return (bytes, ETag) of an object, or of all objects below a folder ("" is all), by key.

    Raises:
        ConfigError: See `check_store`.
        DiskError: See `check_store`.
    """
    import obstore  # noqa: PLC0415 -- an extra

    if name:
        with contextlib.suppress(FileNotFoundError), _explain(store, "list_objects", name):
            found = obstore.head(store.client, name)
            return {name: (found["size"], _read_etag(found))}
    with _explain(store, "list_objects", name):
        pages = obstore.list(store.client, prefix=name or None)
        return {x["path"]: (x["size"], _read_etag(x)) for page in pages for x in page}


def _read_etag(meta: Any) -> str:
    return (meta["e_tag"] or "").strip('"')  # Azure's lists have no quotes


def delete_files(store: Store, keys: Iterable[str]) -> None:
    """Delete objects one by one in their order; one that is not there is no error.

    Raises:
        ConfigError: See `check_store`.
        DiskError: See `check_store`.

    Effects:
        Deletes objects.
    """
    import obstore  # noqa: PLC0415 -- an extra

    for key in keys:
        with contextlib.suppress(FileNotFoundError), _explain(store, "delete_files", key):
            obstore.delete(store.client, key)


def clean_uploads(store: Store) -> int:
    """Abort the uploads in parts that a killed process has left, and return how many there were.

    Their parts are in no list of objects, and cost what objects cost.

    Raises:
        ConfigError: See `check_store`.
        DiskError: See `check_store`.

    Effects:
        Deletes the parts of unfinished uploads in this folder: call it before the first `put_file`.
    """
    if store.signing is None:
        return 0
    prefix = urllib.parse.quote(f"{store.signing.prefix}/".lstrip("/"), safe="/")
    listed = _send(store, store.signing, "GET", f"?uploads=&prefix={prefix}")
    try:
        found = ET.fromstring(listed)  # noqa: S314 -- of the user's server
    except ET.ParseError:
        raise DiskError(
            f"clean_uploads: {store.url} has no list of unfinished uploads",
            where=store.url,
            hint="let the bucket delete unfinished uploads after some days",
        ) from None
    # Servers differ in whether they name the namespace.
    uploads = [
        {child.tag.rpartition("}")[2]: child.text or "" for child in upload}
        for upload in found.iter()
        if upload.tag.rpartition("}")[2] == "Upload"
    ]
    for upload in uploads:
        key = urllib.parse.quote(upload["Key"], safe="/")
        token = urllib.parse.quote(upload["UploadId"], safe="")
        _send(store, store.signing, "DELETE", f"/{key}?uploadId={token}")
    return len(uploads)


def _send(store: Store, signing: _Signing, method: Literal["GET", "DELETE"], request: str) -> bytes:
    """Send a request that the client does not have, signed by the client."""
    import obstore  # noqa: PLC0415 -- an extra
    from obstore.store import S3Store  # noqa: PLC0415

    region = signing.settings.get("region", "us-east-1")
    server = signing.settings.get("endpoint", f"https://s3.{region}.amazonaws.com")
    # It signs the URL of an object: the request is put into the endpoint, and what it appends, a
    # slash and a name, becomes the value of a parameter that servers ignore.
    endpoint = f"{server}/{signing.bucket}{request}&x-id="
    with _explain(store, "clean_uploads", ""):
        signer: Any = S3Store(
            signing.bucket,
            config={
                **signing.settings,
                "endpoint": endpoint,
                "virtual_hosted_style_request": True,
            },
            client_options=dict(signing.http),
        )
        signed = obstore.sign(signer, method, "trainkit", timedelta(minutes=1))
    seconds = signing.http["timeout"].total_seconds()
    message = urllib.request.Request(signed, method=method)  # noqa: S310 -- http of an endpoint
    try:
        with _HTTP.open(message, timeout=seconds) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        # From None: the signed URL is as good as a key for a minute.
        what = getattr(error, "code", None) or getattr(error, "reason", error)
        raise DiskError(
            f"clean_uploads: {store.url} answers {what}",
            where=store.url,
            hint="let the account list and abort uploads, or let the bucket delete unfinished "
            "uploads after some days",
        ) from None


@contextlib.contextmanager
def _explain(store: Store, by: str, key: str) -> Iterator[None]:
    """Replace an error of the client by one that says what to do."""
    from obstore.exceptions import BaseError  # noqa: PLC0415 -- an extra

    try:
        yield
    except FileNotFoundError as error:
        if not any(mark in str(error) for mark in _NO_BUCKET):
            raise FileNotFoundError(f"{by}: there is no {key} in {store.url}") from None
        raise _describe(error, store, by) from None
    except (BaseError, OSError) as error:
        raise _describe(error, store, by) from None


def _describe(error: Exception, store: Store, by: str) -> TrainkitError:
    text = str(error)
    bucket = store.url.partition("://")[2].partition("/")[0]
    found = next((row for row in _CAUSES if any(mark in text for mark in row[0])), None)
    if found is None:
        return DiskError(
            f"{by}: {store.url} cannot be reached: {_shorten(error)}",
            where=store.url,
            hint="look at the network and at the server (AWS_ENDPOINT_URL); the same command goes "
            "on from the last checkpoint",
        )
    _, what, hint = found
    return ConfigError(f"{by}: {what.format(bucket=bucket)}", where=store.url, hint=hint)


_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # of S3, of Azure
_CAUSES = (
    # The first that matches counts: a server that is asked for credentials mentions a region too.
    (
        ("169.254.169.254", "NoCredentials", "MissingAuthenticationToken"),
        "there are no credentials for the bucket {bucket}",
        (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile of "
            "~/.aws; for az:// set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
        ),
    ),
    (
        _NO_BUCKET,
        "there is no bucket {bucket}",
        "create it, or name another in the URL; with a server of your own set AWS_ENDPOINT_URL",
    ),
    (
        (
            "PermanentRedirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraint",
            "redirect without LOCATION",
            "incorrectly configured region",
        ),
        "the bucket {bucket} is in another region than the one that is set",
        "set AWS_REGION to the region of the bucket",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
        "the bucket {bucket} does not accept the credentials",
        "look whether they are current, and for this server: AWS_ACCESS_KEY_ID, AWS_PROFILE",
    ),
    (
        ("AccessDenied", "403 Forbidden", "401 Unauthorized", "AllAccessDisabled"),
        "this account may not use the bucket {bucket}",
        "let it list the bucket, and get, put and delete objects",
    ),
)


def _shorten(error: Exception) -> str:
    """Return the beginning of a client's error; what follows repeats it in other words."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    return _SECRETS.sub("", text)[:_MAX_TEXT]
