"""Place of a data set: the storage and the files that are meant."""

from pathlib import Path
from typing import NamedTuple

from paceline.data.storage import FileInfo, LocalStorage, Storage
from paceline.errors import DataError

INDEX_FOLDER = ".paceline"
"""Folder beside the files that holds their index."""


class Place(NamedTuple):
    """A data set's place."""

    storage: Storage
    name: str
    """Path of the one file that is meant; empty for all files."""

    @property
    def index_folder(self) -> str:
        """Path of the folder of its index, in the storage."""
        return f"{INDEX_FOLDER}/{self.name}" if self.name else INDEX_FOLDER

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.name}" if self.name else self.storage.url

    def list_files(self) -> list[FileInfo]:
        """Return its files, without hidden ones.

        Raises:
            DataError: There are none.
        """
        if self.name:
            found = [file] if (file := self.storage.find(self.name)) else []
        else:
            listed = self.storage.list_files()
            found = [file for file in listed if not any(part.startswith(".") for part in file.path.split("/"))]
        if not found:
            raise DataError(f"{self} must hold files of data, but there are none; check the path")
        return found


def open_place(path: str | Path | Storage) -> Place:
    """Return the place of a data set: a folder, one file, or any storage."""
    if isinstance(path, Storage):
        return Place(path, "")
    local = Path(path).expanduser()
    return Place(LocalStorage(local.parent), local.name) if local.is_file() else Place(LocalStorage(local), "")
