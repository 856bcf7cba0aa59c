"""Shards in a bucket, from a server of S3 in another process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kerple.base.errors import UserError
from kerple.data.shards import Folder, verify

boto3 = pytest.importorskip("boto3", reason="no boto3: make test-slow installs requirements-remote.txt")
pytest.importorskip("moto", reason="no moto: make test-slow installs requirements-remote.txt")
s3fs = pytest.importorskip("s3fs", reason="no s3fs: make test-slow installs requirements-remote.txt")
pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(prepared, monkeypatch):
    """The URL of a folder in a bucket, with the files of a prepared folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in (variables | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        s3fs.S3FileSystem.clear_instance_cache()  # of the server of another test
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpus")
        for path in prepared.glob("[!.]*"):
            client.upload_file(str(path), "corpus", f"shards/{path.name}")
        yield "s3://corpus/shards", client
    finally:
        server.kill()
        server.wait()


def test_shards_in_a_bucket_are_those_of_the_folder(bucket, prepared, tmp_path):
    url, _ = bucket
    folder = Folder(url, str(tmp_path), 1.0)
    verify(folder)
    assert folder.manifest == Folder(prepared).manifest
    copies = {path.name.partition("-")[2]: path.read_bytes() for path in Path(tmp_path, "shards").glob("[!.]*")}
    assert copies == {path.name: path.read_bytes() for path in prepared.glob("[!.m]*")}


def test_a_missing_bucket_and_refused_credentials_are_one_line(bucket, tmp_path, monkeypatch):
    url, client = bucket
    with pytest.raises(UserError, match=r"s3://nowhere/x/manifest.json cannot be read"):
        Folder("s3://nowhere/x", str(tmp_path), 1.0)
    client.delete_object(Bucket="corpus", Key="shards/train-00001.tar")
    with pytest.raises(UserError, match=r"train-00001.tar cannot be read .*check the address, the server and your"):
        verify(Folder(url, str(tmp_path), 1.0))
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not os.path.exists(tmp_path / ".aws")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"manifest.json cannot be read \(.*redentials"):
        Folder(url, str(tmp_path), 1.0)
    assert time.monotonic() - began < 60
