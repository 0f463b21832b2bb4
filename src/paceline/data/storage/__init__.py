"""Layer 5: where files of data lie: a folder, an object store, whatever has names and ranges of bytes."""

from paceline.data.storage.base import FileInfo, Storage
from paceline.data.storage.local import LocalStorage

__all__ = ["FileInfo", "LocalStorage", "Storage"]
