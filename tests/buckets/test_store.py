"""Objects are put whole or not at all, and an error says what to do."""

from pathlib import Path

import pytest
from bucket_server import AZURITE, KEY, S3_SERVER, SECRET, error_body, name_settings

from trainkit.buckets import (
    cache_folder,
    check_store,
    clean_uploads,
    delete_files,
    find_url,
    get_bytes,
    get_file,
    get_range,
    list_files,
    open_store,
    put_bytes,
    put_file,
)
from trainkit.types import ConfigError, DiskError

of_s3 = pytest.mark.skipif(bool(AZURITE), reason="Azure has no such request or setting")


def test_what_is_put_is_got_listed_and_deleted(bucket, tmp_path):
    _, _, url = bucket
    store = open_store(url)
    check_store(store)
    data = bytes(range(251)) * 80_000  # three parts
    (tmp_path / "large").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")
    for name in ("large", "empty"):
        put_file(store, f"a/{name}", tmp_path / name)
    put_bytes(store, "b", b"123")
    assert list_files(store) == {"a/large": len(data), "a/empty": 0, "b": 3}
    assert list_files(store, "a") == {"a/large": len(data), "a/empty": 0}
    assert get_range(store, "a/large", 9_000_000, 5) == data[9_000_000:9_000_005]
    assert get_file(store, "a/large", tmp_path / "copy") == len(data)
    assert (tmp_path / "copy").read_bytes() == data
    assert get_file(store, "a/empty", tmp_path / "nothing") == 0
    assert get_bytes(store, "b") == b"123"
    delete_files(store, ["b", "not there"])
    assert set(list_files(store)) == {"a/large", "a/empty"}
    with pytest.raises(FileNotFoundError, match=f"get_bytes: there is no b in {url}"):
        get_bytes(store, "b")


@of_s3
def test_uploads_that_were_broken_off_are_cleaned_up(bucket):
    _, client, url = bucket
    name = url.split("/")[2]
    for key in ("run/a file+1", "run/other", "runs/of another"):
        upload = client.create_multipart_upload(Bucket=name, Key=key)
        client.upload_part(
            Bucket=name, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"x"
        )
    assert clean_uploads(open_store(url)) == 2
    left = client.list_multipart_uploads(Bucket=name)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/of another"]
    assert clean_uploads(open_store(url)) == 0


@pytest.mark.parametrize("how", [(500, "no"), (503, "slow down"), "hang"])
def test_a_request_that_fails_is_repeated(bucket, how):
    proxy, _, url = bucket
    left = [how, how] if how != "hang" else [how]
    proxy.fail = lambda method, _: left.pop() if method == "PUT" and left else None
    put_bytes(open_store(url, timeout=1.0), "a", b"1")
    assert not left
    assert get_bytes(open_store(url), "a") == b"1"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((404, error_body("NoSuchBucket")), ConfigError, "there is no bucket test-.*: create it"),
        (
            (301, error_body("PermanentRedirect", "use the specified endpoint")),
            ConfigError,
            "is in another region.*AWS_REGION",
        ),
        (
            (400, error_body("AuthorizationHeaderMalformed", "expecting 'eu-west-1'")),
            ConfigError,
            "is in another region.*AWS_REGION",
        ),
        (
            (401, error_body("MissingAuthenticationToken")),
            ConfigError,
            "no credentials .*AWS_PROFILE.*; for az:// set AZURE_STORAGE_ACCOUNT_NAME",
        ),
        ((403, error_body("AccessDenied")), ConfigError, "may not use the bucket"),
        ((403, error_body("InvalidAccessKeyId")), ConfigError, "does not accept the credentials"),
        ((500, error_body("InternalError")), DiskError, "cannot be reached.*AWS_ENDPOINT_URL"),
        ("hang", DiskError, "cannot be reached"),
    ],
)
def test_an_error_says_what_to_do_and_no_secret(bucket, answer, error, words):
    proxy, _, url = bucket
    proxy.fail = lambda *_: answer
    with pytest.raises(error, match=words) as caught:
        check_store(open_store(url, timeout=0.5, patience=1.0))
    assert KEY not in repr(caught.value.__dict__) + str(caught.value)
    assert SECRET not in repr(caught.value.__dict__) + str(caught.value)


def test_a_bucket_that_is_gone_and_a_server_that_is_gone(bucket, monkeypatch):
    _, _, url = bucket
    gone = f"{url.partition('://')[0]}://not-here/run"
    with pytest.raises(ConfigError, match="there is no bucket not-here"):
        check_store(open_store(gone))
    if not S3_SERVER:  # SeaweedFS makes a bucket that an account puts to
        with pytest.raises(ConfigError, match="there is no bucket not-here"):
            put_bytes(open_store(gone), "a", b"1")
    for name, value in name_settings("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DiskError, match="cannot be reached"):
        check_store(open_store(url, patience=0.5))


@of_s3
def test_an_account_that_may_not_list_uploads_is_told_no_signed_url(bucket):
    proxy, _, url = bucket
    proxy.fail = lambda *_: (403, "no")
    with pytest.raises(DiskError, match="answers 403") as caught:
        clean_uploads(open_store(url))
    assert "Signature" not in str(caught.value)
    assert caught.value.__cause__ is None


@of_s3
def test_a_server_without_a_list_of_uploads_is_said(bucket):
    proxy, _, url = bucket
    proxy.fail = lambda *_: (200, "<html><br>welcome")
    with pytest.raises(DiskError, match="has no list of unfinished uploads"):
        clean_uploads(open_store(url))


@of_s3
def test_a_password_in_the_endpoint_is_in_no_message(bucket, monkeypatch):
    _, _, url = bucket
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://somebody:hidden@127.0.0.1:9")
    with pytest.raises(DiskError, match="cannot be reached") as caught:
        check_store(open_store(url, patience=0.5))
    assert "hidden" not in str(caught.value)


@of_s3
def test_credentials_come_from_a_profile(bucket, monkeypatch, tmp_path):
    proxy, _, url = bucket
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    (tmp_path / "no-credentials").write_text(
        f"[other]\naws_access_key_id = no\n"
        f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "no-config").write_text(f"[profile mine]\nendpoint_url = {proxy.endpoint}\n")
    check_store(open_store(url))
    assert proxy.requests
    assert SECRET not in repr(open_store(url))


@pytest.mark.parametrize(
    "url", ["s3://user:password@bucket/a", "s3://bucket/a?X-Amz-Credential=secret", "s3://"]
)
def test_a_url_with_a_secret_or_without_a_bucket_is_refused(url):
    for form in (url, Path(url)):
        with pytest.raises(ConfigError) as caught:
            find_url(form)
        assert "password" not in str(caught.value).replace("a user, a password or", "")
        assert "secret" not in str(caught.value)


def test_a_url_is_known_where_a_flag_has_made_a_path_of_it(monkeypatch, tmp_path):
    assert find_url(Path("s3://bucket") / "hard") == "s3://bucket/hard"
    assert find_url("s3://bucket/run/") == "s3://bucket/run"
    assert find_url("s3:///bucket/run") == find_url(Path("s3:///bucket/run")) == "s3://bucket/run"
    assert [find_url(x) for x in ("runs/a", "/s3/b", "s3", "a/s3:/b")] == [None] * 4
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path))
    assert cache_folder("runs", "s3://bucket/a/b") == tmp_path / "runs/s3/bucket/a/b"
    with pytest.raises(ConfigError, match="an empty part, or one of dots"):
        find_url("s3://bucket/../other")


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("S3://bucket/run", "write s3://,"),
        ("gcs://bucket/run", "write gs://,"),
        ("azure://bucket/run", "write az://,"),
        ("https://server/bucket", "write s3://, gs:// or az://,"),
    ],
)
def test_another_name_of_a_bucket_becomes_no_folder(url, want):
    for form in (url, Path(url)):
        with pytest.raises(ConfigError, match="is no name of a bucket here") as caught:
            find_url(form)
        assert caught.value.hint.startswith(want)
