"""Stores for tests: one in memory, and moto's where `make store-server` has installed it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.data.storage import StoreSettings
from paceline.testing.object_server import FaultProxy, ObjectServer

MOTO = Path(__file__).parents[2] / ".store_server/bin/moto_server"
QUICK = StoreSettings(timeout_s=1.0, patience_s=20.0, disk_bytes=0)
"""Settings of stores that fail at once or not at all."""


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let S3 URLs lead to a server here; its credentials are made up."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@contextmanager
def faulty_store(
    monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes]
) -> Iterator[tuple[ObjectServer, FaultProxy]]:
    """A store in memory behind a proxy, to which S3 URLs lead."""
    with ObjectServer(objects).running() as server, FaultProxy(server.endpoint).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        yield server, proxy


@contextmanager
def moto_server() -> Iterator[str]:
    """Yield the URL of a server of moto's."""
    if not MOTO.exists():
        pytest.skip("moto is not installed; make store-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "AWS_EC2_METADATA_DISABLED": "true"},
    )
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        assert process.poll() is None, f"moto's server ended; {sys.version}"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
