"""Layer 5: where files of data lie: a folder, an object store, whatever has names and ranges of bytes."""

from paceline.data.storage.base import Extent, FileInfo, Storage
from paceline.data.storage.local import LocalStorage
from paceline.data.storage.objects import ObjectStorage
from paceline.data.storage.opening import is_url, open_store
from paceline.data.storage.other import FsspecStorage
from paceline.data.storage.settings import StoreSettings

__all__ = [
    "Extent",
    "FileInfo",
    "FsspecStorage",
    "LocalStorage",
    "ObjectStorage",
    "Storage",
    "StoreSettings",
    "is_url",
    "open_store",
]
