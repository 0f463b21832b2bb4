"""Layer 5: where files of data lie: a folder, an object store, whatever has names and ranges of bytes."""

from paceline.data.storage.base import Extent, FileInfo, Storage
from paceline.data.storage.blocks import StoreCounters
from paceline.data.storage.cached import CachedStorage, read_counters
from paceline.data.storage.disk_cache import CacheWarning, DiskCache
from paceline.data.storage.local import LocalStorage
from paceline.data.storage.objects import ObjectStorage
from paceline.data.storage.opening import find_local, is_url, open_storage, open_store
from paceline.data.storage.other import FsspecStorage
from paceline.data.storage.settings import StoreSettings
from paceline.data.storage.shared import SharedStorage

__all__ = [
    "CacheWarning",
    "CachedStorage",
    "DiskCache",
    "Extent",
    "FileInfo",
    "FsspecStorage",
    "LocalStorage",
    "ObjectStorage",
    "SharedStorage",
    "Storage",
    "StoreCounters",
    "StoreSettings",
    "find_local",
    "is_url",
    "open_storage",
    "open_store",
    "read_counters",
]
