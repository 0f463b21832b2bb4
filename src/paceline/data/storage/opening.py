"""The storage at a path or URL."""

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.data.storage.base import Storage
from paceline.data.storage.blocks import Digests, find_tag
from paceline.data.storage.cached import CachedStorage
from paceline.data.storage.disk_cache import DiskCache
from paceline.data.storage.local import LocalStorage
from paceline.data.storage.objects import OBJECT_SCHEMES, ObjectStorage
from paceline.data.storage.other import FsspecStorage
from paceline.data.storage.settings import StoreSettings
from paceline.data.storage.shared import SharedStorage
from paceline.errors import SettingsError

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0


def is_url(place: str | Path) -> bool:
    """Return whether a place is an URL, not a path of this machine; ``file://`` is a path."""
    match = _URL.fullmatch(str(place))
    return match is not None and match[1] != "file"


def find_local(place: str | Path) -> Path | None:
    """Return the path of a place on this machine, also of a ``file://`` one; None for an URL of elsewhere.

    Raises:
        SettingsError: The path of a ``file://`` URL does not begin at the root.
    """
    match = _URL.fullmatch(str(place))
    if match is None:
        return Path(place).expanduser()
    if match[1] != "file":
        return None
    if not match[2].startswith("/"):
        raise SettingsError(f"{place} must name a path from the root, but does not; write it like file:///folder")
    return Path(match[2])


def open_store(place: str | Path, settings: StoreSettings | None = None) -> Storage:
    """Return the storage at a path or URL, as it is: nothing is kept here of what is read.

    Args:
        place: Folder of this machine, or URL of a folder: ``s3://``, ``gs://``, ``az://``, ``http(s)://``, or another
            one that fsspec knows.
        settings: Time limits of a store that an URL names.

    Raises:
        SettingsError: The URL is of no known kind, or its credentials are missing.
        MissingExtraError: A package is not installed.
    """
    settings = settings or StoreSettings()
    if (local := find_local(place)) is not None:
        return LocalStorage(local)
    match = _URL.fullmatch(str(place))
    assert match is not None
    scheme, rest = match[1], match[2]
    if not rest.strip("/") and scheme != "memory":
        raise SettingsError(f"{place} must name a bucket or host, but names none; write it like s3://bucket/folder")
    if scheme in OBJECT_SCHEMES:
        return ObjectStorage(str(place), settings)
    return FsspecStorage(str(place), lambda request: _retry(request, settings.patience_s))


def open_storage(
    place: str | Path, settings: StoreSettings | None = None, *, digests: Digests | None = None
) -> Storage:
    """Return the storage at a path or URL; what an URL names is read through caches in memory and on disk.

    Processes that this one forks may read it too.

    Args:
        place: Folder of this machine, or URL of a folder: ``s3://``, ``gs://``, ``az://``, ``http(s)://``, or another
            one that fsspec knows.
        settings: Time limits and caches of a store that an URL names.
        digests: Function that gives the BLAKE3 digests of a file's blocks of 1 MiB, which are checked as these arrive.

    Raises:
        SettingsError: The URL is of no known kind, or its credentials are missing.
        MissingExtraError: A package is not installed.
    """
    settings = settings or StoreSettings()
    store = open_store(place, settings)
    if isinstance(store, LocalStorage):
        return store
    disk = None
    if settings.disk_bytes:
        disk = DiskCache(settings.disk_folder or _find_cache(), settings.disk_bytes, find_tag(store.url))
    cached = CachedStorage(
        store,
        memory_bytes=settings.memory_bytes,
        disk=disk,
        digests=digests,
        num_parallel=settings.num_parallel,
        hands_on=settings.hands_on,
    )
    return SharedStorage(cached)


def _find_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "paceline" / "blocks"


def _retry(request: Callable[[], T], patience_s: float) -> T:
    """Return what a request returns, made again where the network or the store failed it."""
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return request()
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except (OSError, TimeoutError):
            if time.monotonic() - began_s + pause_s > patience_s:
                raise
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
