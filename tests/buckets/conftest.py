"""One server for the tests of a process, and a bucket with a proxy for each test."""

import bucket_server
import pytest


@pytest.fixture(scope="session")
def endpoint():
    pytest.importorskip("obstore")
    with bucket_server.serve() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(endpoint, monkeypatch, tmp_path):
    """Yield (proxy, client, URL), with credentials of the bucket in the environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with bucket_server.open_bucket(endpoint) as (proxy, client, url):
        for name, value in bucket_server.name_settings(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
        monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
        yield proxy, client, url
