"""An object store on this machine, and a proxy in front of it that fails as a test wants."""

import base64
import contextlib
import hmac
import http.client
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import warnings
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY, SECRET = "AKIAEXAMPLEOFATEST", "secretofatest0123456789A"  # base64, as Azure's keys are
ACCOUNT = "account1"  # of Azurite
# Servers that .ci/bucket has started.
S3_SERVER = os.environ.get("TRAINKIT_S3_SERVER")
AZURITE = os.environ.get("TRAINKIT_AZURITE")


@contextlib.contextmanager
def serve():
    """Yield the endpoint of moto's server; or of another make, which .ci/bucket has started."""
    if other := AZURITE or S3_SERVER:
        yield other
        return
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A process of its own: its sockets and warnings are not this one's.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: can_connect(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def can_connect(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_client(endpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )


class Handler(BaseHTTPRequestHandler):
    """Forwards a request to `server.upstream`, or fails as `server.fail` says."""

    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy = self.server.proxy
        proxy.requests.append((self.command, self.path))
        what = proxy.fail(self.command, self.path)
        if what == "hang":
            proxy.released.wait(60)
            self.close_connection = True
            return
        if what is not None:
            self.answer(what[0], [("Content-Type", "application/xml")], what[1].encode())
            return
        upstream = http.client.HTTPConnection(proxy.upstream, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        with contextlib.closing(upstream), upstream.getresponse() as answer:
            data = answer.read()
        self.answer(answer.status, answer.getheaders(), data)

    def answer(self, status, headers, data):
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        dropped = ("transfer-encoding", "connection", *([] if is_head else ["content-length"]))
        for name, value in headers:
            if name.lower() not in dropped:
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(b"" if is_head else data)

    def log_message(self, *_):
        pass


for _method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(Handler, f"do_{_method}", Handler.forward)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # a client that a test has killed
        pass


class Proxy:
    """Forwards requests; `fail(method, path)` may return (status, body) or "hang"."""

    def __init__(self, upstream):
        self.upstream = urllib.parse.urlsplit(upstream).netloc
        self.requests = []
        self.fail = lambda *_: None
        self.released = threading.Event()
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.proxy = self
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def name_settings(endpoint):
    """Return the variables of the environment with which a server is used."""
    if AZURITE:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": endpoint,
        }
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@contextlib.contextmanager
def open_bucket(endpoint):
    """Yield (proxy, client, URL): a folder of its own in a bucket; Azurite has no such client."""
    bucket = f"test-{secrets.token_hex(4)}"
    client = None if AZURITE else make_client(endpoint)
    if client is None:
        create_container(endpoint, bucket)
    else:
        client.create_bucket(Bucket=bucket)
    proxy = Proxy(endpoint)
    try:
        yield proxy, client, f"{'az' if AZURITE else 's3'}://{bucket}/run"
    finally:
        proxy.close()
        if client is not None:
            for entry in client.list_objects_v2(Bucket=bucket).get("Contents", []):
                client.delete_object(Bucket=bucket, Key=entry["Key"])
            with contextlib.suppress(Exception):
                client.delete_bucket(Bucket=bucket)
            client.close()


def create_container(endpoint, name):
    """Create Azure's kind of a bucket, which obstore cannot: a request that is signed here."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [f"{key}:{value}" for key, value in headers.items()]
    path = f"/{ACCOUNT}/{name}"
    # The emulator has the account in its path, after that of the rule.
    text = "\n".join(["PUT", *[""] * 11, *lines, f"/{ACCOUNT}{path}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(SECRET), text.encode(), "sha256"))
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature.decode()}"
    request = urllib.request.Request(
        f"{endpoint}{path}?restype=container", headers=headers, method="PUT"
    )
    with urllib.request.urlopen(request):
        pass


def error_body(code, message=""):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


def wait_until(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
