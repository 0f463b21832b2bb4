"""Trained models in stores: brought to this machine to be read, and written there."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from paceline.checkpoint.durable import MARKER_NAME
from paceline.checkpoint.manifest import DIRECTORY_NAME, DamagedError
from paceline.checkpoint.mirror import FILES_NAME, CheckpointMirror
from paceline.data.storage import Storage, is_url, open_store
from paceline.errors import CheckpointError, DataError, SettingsError, StorageError, storing

_SCHEME = re.compile("file://(.*)", re.DOTALL)


def to_path(place: str | Path) -> Path | None:
    """Return the path of a place on this machine, also of a ``file://`` one; None for an URL of elsewhere."""
    if is_url(place):
        return None
    match = _SCHEME.fullmatch(str(place))
    return Path(match[1] if match else place).expanduser()


def holds_copies(path: Path) -> bool:
    """Return whether a folder of this machine is one that a run copies its checkpoints to, or a copy in it."""
    return (path / FILES_NAME).is_file() or any(path.glob(f"step-*/{FILES_NAME}"))


def fetch_checkpoint(url: str, which: str = "newest", folder: Path | None = None) -> Path:
    """Bring a checkpoint of a run's `checkpoint_url` to this machine, unless it is here already.

    Args:
        url: URL of all checkpoints, or of one of them.
        which: ``newest`` for the newest that is whole, the step after which it was saved, or its name.
        folder: Folder for what is brought; by default one of the user's cache.

    Returns:
        Directory of the checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or the store cannot be reached.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    if DIRECTORY_NAME.fullmatch(name):
        url, which = root, name
    mirror = CheckpointMirror(url)
    folder = folder or _find_cache() / blake3(url.encode()).hexdigest(8)
    try:
        there = mirror.list_names()
        reasons = []
        for chosen in _choose(there, which, url):
            try:
                return _fetch(mirror, chosen, folder)
            except DamagedError as error:
                reasons.append(str(error))
    except (StorageError, DataError) as error:
        raise CheckpointError(f"the checkpoints of {url} must be reachable, but: {error}") from error
    raise CheckpointError(f"{url} must hold a checkpoint that is whole, but: {'; '.join(reasons)}")


def fetch_weights(url: str, name_of: Callable[[str], bool], folder: Path | None = None) -> Path | None:
    """Bring a file of weights, or the files of a folder of them, to this machine.

    Args:
        url: URL of a file or a folder.
        name_of: Function that tells whether a file's name is that of weights, or of what describes them.
        folder: See `fetch_checkpoint`.

    Returns:
        Path of the file or folder here; None if there are no such files.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    try:
        store = open_store(root if name_of(name) else url)
        listed = [store.find(name)] if name_of(name) else store.list_files()
        files = [file for file in listed if file is not None and "/" not in file.path and name_of(file.path)]
        if not files and name_of(name):
            raise DataError("there is no such file")
        marks = [[url, file.path, str(file.num_bytes), file.version] for file in files]
        folder = (folder or _find_cache()) / blake3(repr(marks).encode()).hexdigest(8)
        for file in files:
            if not file.version or not (folder / file.path).is_file():
                _fetch_file(store, file.path, folder)
    except (StorageError, DataError) as error:
        raise CheckpointError(f"the weights of {url} must be readable, but: {error}") from error
    if not files:
        return None
    return folder / name if name_of(name) else folder


def write_there(url: str, write: Callable[[Path], None]) -> None:
    """Write a new file or folder to a store.

    Args:
        url: URL of what is written.
        write: Function that writes it to a path of this machine.

    Raises:
        SettingsError: There is something already.
        CheckpointError: The store cannot be reached.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    try:
        store = open_store(root)
        if store.find(name) is not None or store.list_files(f"{name}/"):
            raise SettingsError(f"{url} must not exist yet, but there is something; give another name, or remove it")
        with tempfile.TemporaryDirectory(prefix="paceline-export-") as folder:
            path = Path(folder) / name
            write(path)
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            for file in files:
                store.write_from(file.relative_to(folder).as_posix(), file)
    except (StorageError, DataError) as error:
        raise CheckpointError(f"{url} must be writable, but: {error}") from error


def _choose(there: list[str], which: str, url: str) -> list[str]:
    """Return the names of the checkpoints that will do, the best one first."""
    if which == "newest" and there:
        return there
    for name in there:  # the latest attempt at a step comes first
        match = DIRECTORY_NAME.fullmatch(name)
        if match is not None and which in (name, str(int(match[1]))):
            return [name]
    steps = ", ".join(reversed(there)) or "none"
    best = "; which one is best only the run's own directory says" if which == "best" else ""
    raise CheckpointError(
        f"a checkpoint in a store must be newest or a step, but got {which!r} for {url}{best}; there are: {steps}"
    )


def _fetch(mirror: CheckpointMirror, name: str, folder: Path) -> Path:
    """Return the directory of a checkpoint here, which is brought if it is not, or is that of another run."""
    marker = mirror.read_marker(name)
    target = folder / f"{name}.{blake3(marker).hexdigest(8)}" / name
    if (target / MARKER_NAME).is_file() and (target / MARKER_NAME).read_bytes() == marker:
        return target
    with storing(target):
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        mirror.download(name, part)
        with storing(target):
            try:
                os.rename(part, target.parent)
            except OSError:  # another process has brought it meanwhile
                if not (target / MARKER_NAME).is_file():
                    raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _fetch_file(store: Storage, name: str, folder: Path) -> None:
    """Bring a file here, in the place of an older one."""
    content = store.read(name)
    target = folder / name
    with storing(target):
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=".part-", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.rename(part, target)


def _find_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "paceline" / "models"
