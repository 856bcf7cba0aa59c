"""Shards in buckets: servers of S3 and of Google Cloud Storage in other processes, and credentials that expire."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import requests
from lightning_fabric.plugins.environments.lightning import find_free_network_port

from kerple.base.errors import UserError
from kerple.data.shards import Folder, verify
from tests.web_server import answer, serving

boto3 = pytest.importorskip("boto3", reason="no boto3: make test-slow installs requirements-remote.txt")
for package in ("moto", "s3fs", "gcsfs", "gcp_storage_emulator"):
    pytest.importorskip(package, reason=f"no {package}: make test-slow installs requirements-remote.txt")
pytestmark = pytest.mark.slow
KINDS = ["s3", "gs"]
REFUSED = {
    ("s3", "expired"): answer(403, content=b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"),
    ("s3", "denied"): answer(403, content=b"<Error><Code>AccessDenied</Code><Message>denied</Message></Error>"),
    ("gs", "credentials"): answer(401, content=b'{"error": {"code": 401, "message": "invalid credentials"}}'),
    ("gs", "Forbidden"): answer(403, content=b'{"error": {"code": 403, "message": "no storage.objects.get"}}'),
}


class Bucket(NamedTuple):
    """The URL of a folder in a bucket with the files of a prepared folder, and a function that deletes one of them."""

    url: str
    delete: Callable[[str], Any]


def use_server(kind: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a server for the URLs of S3 or of Google Cloud Storage."""
    variables = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    server = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}[kind]
    for name, value in (variables | {server: url, "AWS_MAX_ATTEMPTS": "1", "NO_GCE_CHECK": "true"}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class(kind).clear_instance_cache()  # connections to the server of another test


@pytest.fixture(params=KINDS)
def bucket(request, prepared, monkeypatch):
    port = find_free_network_port()
    url = f"http://127.0.0.1:{port}"
    programs = {
        "s3": ["moto.server", "-p", str(port)],
        "gs": ["gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"],
    }
    command = [sys.executable, "-m", *programs[request.param]]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        use_server(request.param, url, monkeypatch)
        if request.param == "s3":
            client = boto3.client("s3")
            client.create_bucket(Bucket="corpus")
            for path in prepared.glob("[!.]*"):
                client.upload_file(str(path), "corpus", f"shards/{path.name}")
            yield Bucket("s3://corpus/shards", lambda name: client.delete_object(Bucket="corpus", Key=f"shards/{name}"))
        else:
            requests.post(f"{url}/storage/v1/b", json={"name": "corpus"}).raise_for_status()
            upload = f"{url}/upload/storage/v1/b/corpus/o?uploadType=media&name=shards/"
            for path in prepared.glob("[!.]*"):
                requests.post(f"{upload}{path.name}", data=path.read_bytes()).raise_for_status()
            files = f"{url}/storage/v1/b/corpus/o/shards%2F"
            yield Bucket("gs://corpus/shards", lambda name: requests.delete(f"{files}{name}").raise_for_status())
    finally:
        server.kill()
        server.wait()


def test_shards_in_a_bucket_are_those_of_the_folder(bucket, prepared, tmp_path):
    folder = Folder(bucket.url, str(tmp_path), 1.0)
    verify(folder)
    assert folder.manifest == Folder(prepared).manifest
    copies = {path.name.partition("-")[2]: path.read_bytes() for path in Path(tmp_path, "shards").glob("[!.]*")}
    assert copies == {path.name: path.read_bytes() for path in prepared.glob("[!.m]*")}


def test_a_missing_bucket_and_a_missing_file_are_one_line(bucket, tmp_path):
    missing = f"{bucket.url.partition(':')[0]}://nowhere/x"
    with pytest.raises(UserError, match=rf"{missing}/manifest.json cannot be read \(FileNotFoundError"):
        Folder(missing, str(tmp_path), 1.0)
    bucket.delete("train-00001.tar")
    with pytest.raises(
        UserError, match=r"train-00001.tar cannot be read \(FileNotFound.*check the address, the server"
    ):
        verify(Folder(bucket.url, str(tmp_path), 1.0))


def test_missing_credentials_are_one_line(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        use_server("s3", server.url, monkeypatch)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert not os.path.exists(tmp_path / ".aws")
        began = time.monotonic()
        with pytest.raises(UserError, match=r"manifest.json cannot be read \(.*redentials"):
            Folder("s3://corpus/shards", str(tmp_path), 1.0)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize(("kind", "cause"), REFUSED)
def test_credentials_that_are_refused_are_one_line_and_copies_are_kept(prepared, tmp_path, monkeypatch, kind, cause):
    path = {"s3": "corpus/shards", "gs": "download/storage/v1/b/corpus/o/shards"}[kind]
    shutil.copytree(prepared, tmp_path / path)
    with serving(tmp_path) as server:
        use_server(kind, server.url, monkeypatch)
        folder = Folder(f"{kind}://corpus/shards", str(tmp_path / "cache"), 1.0)
        folder.shard("train", 0).close()
        number = len(server.handler.requests)
        server.handler.fault = REFUSED[kind, cause]
        message = rf"^data.directory: {folder.location}/train-00001.tar cannot be read .*{cause}.*your credentials"
        with pytest.raises(UserError, match=message):
            folder.shard("train", 1)
        assert len(server.handler.requests) == number + 1  # not repeated
        folder.shard("train", 0).close()
        server.handler.fault = None
        verify(folder)
