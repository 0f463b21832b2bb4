"""Place of a data set: the storage and the files that are meant."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from paceline.data.storage import (
    FileInfo,
    LocalStorage,
    Storage,
    StoreSettings,
    find_local,
    open_storage,
    open_store,
)
from paceline.data.storage.base import NoListError
from paceline.errors import DataError

INDEX_FOLDER = ".paceline"
"""Folder beside the files that holds their index."""
_NUM_LOOK_UPS = 16
"""Number of files that are looked up at once."""


class Place(NamedTuple):
    """A data set's place."""

    storage: Storage
    name: str
    """Path of the one file that is meant; empty for all files."""
    digests: dict[str, Sequence[str]]
    """Digests of the blocks of files, by which a cache checks what arrives; filled in once an index is read."""

    @property
    def index_folder(self) -> str:
        """Path of the folder of its index, in the storage."""
        return f"{INDEX_FOLDER}/{self.name}" if self.name else INDEX_FOLDER

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.name}" if self.name else self.storage.url

    def list_files(self, known: Sequence[str] = ()) -> list[FileInfo]:
        """Return its files, without hidden ones.

        Args:
            known: Paths of files, which are looked up where the storage lists none.

        Raises:
            DataError: There are none.
        """
        if self.name:
            found = [file] if (file := self.storage.find(self.name)) else []
        else:
            try:
                listed = self.storage.list_files()
            except NoListError:
                if not known:
                    raise
                with ThreadPoolExecutor(_NUM_LOOK_UPS) as pool:
                    listed = [file for file in pool.map(self.storage.find, known) if file]
            found = [file for file in listed if not any(part.startswith(".") for part in file.path.split("/"))]
        if not found:
            raise DataError(f"{self} must hold files of data, but there are none; check the path")
        return found


def open_place(path: str | Path | Storage, store: StoreSettings | None = None) -> Place:
    """Return the place of a data set: a folder, one file, or any storage.

    Args:
        path: Path or URL of a folder or a file, or a storage.
        store: Time limits and caches of a store that an URL names.
    """
    digests: dict[str, Sequence[str]] = {}
    if isinstance(path, Storage):
        return Place(path, "", digests)
    local = find_local(path)
    if local is None:
        root, _, name = str(path).rstrip("/").rpartition("/")
        if not _names_file(root, name, store):
            root, name = str(path), ""
        return Place(open_storage(root, store, digests=digests.get), name, digests)
    if local.is_file():
        return Place(LocalStorage(local.parent), local.name, digests)
    return Place(LocalStorage(local), "", digests)


def _names_file(root: str, name: str, store: StoreSettings | None) -> bool:
    """Return whether an URL is that of a file, which has a suffix, in the folder `root`."""
    if "." not in name or root.endswith("/"):  # what is before it is a host or bucket
        return False
    parent = open_store(root, store)
    try:
        return parent.find(name) is not None
    finally:
        parent.close()
