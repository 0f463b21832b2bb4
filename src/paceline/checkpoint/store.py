"""A directory of checkpoints: each save makes a new one, and the newest complete one is loaded."""

import contextlib
import errno
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.durable import (
    MARKER_NAME,
    WriterLock,
    open_regular,
    remove_checkpoint,
    sync_directory,
    write_file,
)
from paceline.checkpoint.incremental import CHUNK_BYTES, Base, can_share, find_independent
from paceline.checkpoint.manifest import DIRECTORY_NAME, DamagedError
from paceline.checkpoint.mirror import CheckpointMirror, fetch_newest
from paceline.checkpoint.storage import (
    SafetensorsWriter,
    TensorBlock,
    WrittenBlocks,
    finish_blocks,
    save_tensors,
    write_blocks,
)
from paceline.errors import CheckpointError, SettingsError, StorageError, advise_on_storage, storing

BEST_NAME = "best.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of a finished save."""

    path: Path
    num_bytes: int
    """Bytes that were written."""
    duration_s: float
    step: int
    shared_bytes: int = 0
    """Bytes of files that it shares with earlier checkpoints."""


class CheckpointStore:
    """Checkpoints of one run: directories ``step-00000123`` (``step-00000123-2`` for a second of that step).

    One process writes: the first save takes a lock that is held until `close`, or the end of the process. Any
    number may read. Directories with other names, and other files inside, are never touched. The file ``best.json``
    names the best checkpoint, which stays beside the newest.
    """

    def __init__(
        self, directory: Path, keep: int | None = 3, incremental: int = 0, mirror: CheckpointMirror | None = None
    ) -> None:
        """Make a store; nothing is created or read yet.

        Args:
            directory: Directory of the checkpoints.
            keep: Number of committed checkpoints to keep beside the best one; None for all. One that
                `find_newest_valid` found damaged does not count, and is removed when the oldest that counts is newer.
                Others are not read again to be counted.
            incremental: Number of incremental checkpoints between two full ones; 0 for full ones alone. The first one
                of a process is full. With `keep` of 2 or more, the newest that shares no file with the newest of all
                stays too: one damaged file must not spoil all.
            mirror: Store that each checkpoint is copied to, and the newest is brought from.

        Raises:
            SettingsError: `keep` or `incremental` is too small.
        """
        if keep is not None and keep < 1:
            raise SettingsError(f"keep must be at least 1, but got {keep}; use None to keep all checkpoints")
        if incremental < 0:
            raise SettingsError(f"incremental must be at least 0, but got {incremental}; use 0 for full checkpoints")
        self.directory = directory
        self.keep = keep
        self.incremental = incremental
        self.mirror = mirror
        self._newest: Checkpoint | None = None
        self._num_since_full = 0
        self._lock = WriterLock(directory)
        self._damaged: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that another process may write here."""
        self._lock.release()

    def save(
        self,
        tensors: Mapping[str, Tensor],
        document: Mapping[str, Any],
        step: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        is_best: bool = False,
    ) -> SavedCheckpoint:
        """Write a new checkpoint; it is durable when this returns. Then remove those beyond `keep`.

        Args:
            tensors: Tensors to save, by name; tensors that share memory are each written.
            document: Everything else, as plain JSON values. NaN and infinities are preserved.
            step: Step after which it is saved.
            process_group: Ranks that hold shards of `tensors`. All of them call this, and rank 0's
                document is saved; all ranks must see the directory. None if this process holds all
                tensors in full.
            is_best: Whether the checkpoint becomes the best one.

        Raises:
            StorageError: The disk failed; older checkpoints are untouched, and the new one is removed.
            CheckpointError: The write failed otherwise; the same holds.
        """
        assert step >= 0
        start_s = time.perf_counter()
        is_coordinator = process_group is None or dist.get_rank(process_group) == 0
        path, content, base = self._begin(document, step, process_group)
        try:
            writer = SafetensorsWriter(path, content, step, chunk_bytes=self._chunk_bytes, base=base)
            save_tensors(tensors, writer, process_group)
        except (OSError, CheckpointError, CheckpointException) as error:
            self._newest = None  # a file of it may be gone: the next is full
            if is_coordinator:
                with contextlib.suppress(OSError):  # the next save tries again
                    remove_checkpoint(path)
            tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            raise _explain(path, error, tensor_bytes + len(content)) from error
        return self._note_saved(path, start_s, is_coordinator, is_shared=base is not None, is_best=is_best)

    def save_blocks(
        self,
        blocks: Mapping[str, Sequence[TensorBlock]],
        document: Mapping[str, Any],
        step: int,
        process_group: dist.ProcessGroup,
        *,
        is_best: bool = False,
    ) -> SavedCheckpoint:
        """Write a new checkpoint as `save` does, together with other processes, each its own blocks of tensors.

        No process holds, sends or reads what another one writes. The checkpoint is of whole tensors, as if one process
        had saved them: it loads into any layout.

        Args:
            blocks: Blocks that this process writes, by the tensor's name; all together they make each tensor once.
            document: Everything else; rank 0's is saved.
            step: Step after which it is saved.
            process_group: The processes, which all see the directory.
            is_best: Whether the checkpoint becomes the best one.

        Raises:
            StorageError: The disk of one failed; older checkpoints are untouched, and the new one is removed.
            CheckpointError: The write failed otherwise; the same holds.
        """
        start_s = time.perf_counter()
        rank = dist.get_rank(process_group)
        path, content, base = self._begin(document, step, process_group)
        num_bytes = sum(block.tensor.nbytes for parts in blocks.values() for block in parts)
        outcome: WrittenBlocks | CheckpointError
        try:
            outcome = write_blocks(path, rank, blocks, chunk_bytes=self._chunk_bytes, base=base)
        except (OSError, CheckpointError) as error:
            outcome = _explain(path, error, num_bytes, rank)
        gathered: list[Any] | None = [None] * dist.get_world_size(process_group) if rank == 0 else None
        dist.gather_object(outcome, gathered, group=process_group, group_dst=0)
        failed: list[CheckpointError | None] = [None]
        if gathered is not None:
            failed = [self._finish(path, content, step, gathered, base)]
        dist.broadcast_object_list(failed, group=process_group, group_src=0)
        if failed[0] is not None:
            self._newest = None  # a file of it may be gone: the next is full
            raise failed[0]
        return self._note_saved(path, start_s, rank == 0, is_shared=base is not None, is_best=is_best)

    @property
    def _chunk_bytes(self) -> int | None:
        return CHUNK_BYTES if self.incremental else None

    def _note_saved(
        self, path: Path, start_s: float, is_coordinator: bool, *, is_shared: bool, is_best: bool
    ) -> SavedCheckpoint:
        """Remove surplus checkpoints, now that there is a new one, which the next may share files with."""
        checkpoint = Checkpoint.open(path)
        self._newest = checkpoint if self.incremental else None  # the records of its chunks take about 1 KB each
        self._num_since_full = self._num_since_full + 1 if is_shared else 0
        if is_coordinator:
            if is_best:
                self.mark_best(path)
            self._prune(path)
            if self.mirror is not None:
                self.mirror.upload(path, self.keep)
        shared = checkpoint.shared_bytes
        return SavedCheckpoint(
            path, checkpoint.num_bytes - shared, time.perf_counter() - start_s, checkpoint.step, shared
        )

    def _finish(
        self, path: Path, document: bytes, step: int, gathered: Sequence[Any], base: Base | None
    ) -> CheckpointError | None:
        """Commit what all processes have written, or remove it and return the first error."""
        error = next((one for one in gathered if isinstance(one, CheckpointError)), None)
        try:
            if error is None:
                finish_blocks(path, document, step, gathered, base)
        except (OSError, CheckpointError) as failure:
            error = _explain(path, failure, len(document))
        if error is not None:
            with contextlib.suppress(OSError):  # the next save tries again
                remove_checkpoint(path)
        return error

    def mark_best(self, path: Path) -> None:
        """Make a committed checkpoint the best one, atomically.

        Raises:
            StorageError: The disk is full, or another failure of the file system.
        """
        part = self.directory / f"{BEST_NAME}.part"
        with storing(self.directory / BEST_NAME):
            part.unlink(missing_ok=True)
            write_file(part, json.dumps({"checkpoint": path.name}).encode())
            os.rename(part, self.directory / BEST_NAME)
            sync_directory(self.directory)

    def find_best(self) -> Path | None:
        """Return the directory of the best checkpoint, unverified; None if there is none.

        Raises:
            CheckpointError: The file that names it is damaged.
        """
        try:
            with open_regular(self.directory / BEST_NAME) as file:
                name = json.loads(file.readall())["checkpoint"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.directory / BEST_NAME} must name the best checkpoint, but it cannot be read ({error}); "
                "remove it"
            ) from error
        path = self.directory / str(name)
        return path if DIRECTORY_NAME.fullmatch(path.name) and (path / MARKER_NAME).exists() else None

    def list_checkpoints(self) -> list[Path]:
        """Return the directories of all committed checkpoints, the newest first, unverified."""
        return [path for path in self.list_directories() if (path / MARKER_NAME).exists()]

    def find_newest_valid(self, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that is complete, or None.

        The newest has the highest step, then the latest attempt at that step.

        Each candidate is read in full, so with many ranks one of them should look and send its path to the others for
        `Checkpoint.open`. Loading verifies again what it reads: a resume reads the files twice.

        Args:
            on_damaged: Function called with path and reason for each damaged one.
        """
        if self.mirror is not None:
            fetch_newest(self.mirror, self.directory, next(iter(self.list_checkpoints()), None))
        for path in self.list_directories():
            try:
                checkpoint = Checkpoint.open(path)
                checkpoint.verify()
            except DamagedError as error:
                self._damaged.add(path)
                on_damaged(path, error.reason)
            else:
                return checkpoint
        return None

    def list_directories(self) -> list[Path]:
        """Return the directories of all checkpoints, the newest first, also of those that were never finished."""
        found = []
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    match = DIRECTORY_NAME.fullmatch(entry.name)
                    if match and entry.is_dir(follow_symlinks=False):
                        found.append((int(match[1]), int(match[2] or 1), Path(entry.path)))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} must be a directory of checkpoints, but {error.strerror}; choose another"
            ) from error
        return [path for *_, path in sorted(found, reverse=True)]

    def _begin(
        self, document: Mapping[str, Any], step: int, process_group: dist.ProcessGroup | None
    ) -> tuple[Path, bytes, Base | None]:
        """Make the directory on rank 0; return it on all ranks, with the encoded document and the base to share with.

        Raises:
            CheckpointError: Rank 0 could not make it.
        """
        if process_group is None:
            content = _encode(document)
            path = self._make_new_directory(step)
            return path, content, self._open_base(self._choose_base(path))
        content = b""
        outcome: list[tuple[str, str] | CheckpointError | None] = [None]
        if dist.get_rank(process_group) == 0:
            try:
                content = _encode(document)
                path = self._make_new_directory(step)
                outcome = [(path.name, self._choose_base(path))]
            except CheckpointError as error:  # the others wait for the outcome
                outcome = [error]
        dist.broadcast_object_list(outcome, group=process_group, group_src=0)
        (names,) = outcome
        if isinstance(names, CheckpointError):
            raise names
        assert names is not None
        return self.directory / names[0], content, self._open_base(names[1])

    def _choose_base(self, directory: Path) -> str:
        """Return the name of the checkpoint that a new one in `directory` shares files with; empty for a full one."""
        newest = self._newest
        if newest is None or self._num_since_full >= self.incremental or newest.path in self._damaged:
            return ""
        try:
            return newest.path.name if can_share(newest.path, directory) else ""
        except OSError as error:
            with contextlib.suppress(OSError):  # the next save tries again
                remove_checkpoint(directory)
            raise _explain(directory, error, 0) from error

    def _open_base(self, name: str) -> Base | None:
        if not name:
            return None
        assert self._newest is not None
        assert self._newest.path.name == name, "all ranks have saved the same checkpoints"
        return Base(self._newest.path, self._newest.manifest)

    def _make_new_directory(self, step: int) -> Path:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            for path in self._names(step):
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return path
        except OSError as error:
            raise _explain(self.directory, error, 0) from error
        raise AssertionError("there is always a free name")

    def _names(self, step: int) -> Iterator[Path]:
        taken = [path.name for path in self.list_directories()]
        attempts = [
            int(match[2] or 1) for match in map(DIRECTORY_NAME.fullmatch, taken) if match and int(match[1]) == step
        ]
        attempt = max(attempts, default=0)
        while True:  # a file or a link may have the name
            attempt += 1
            yield self.directory / (f"step-{step:08d}" + (f"-{attempt}" if attempt > 1 else ""))

    def _prune(self, written: Path) -> None:
        directories, committed = self.list_directories(), self.list_checkpoints()
        whole = [path for path in committed if path not in self._damaged]
        kept = {*whole[: self.keep], written}
        if self.incremental and self.keep != 1 and (apart := find_independent(written, whole)) is not None:
            kept.add(apart)
        oldest_kept = max(map(directories.index, kept))
        if (best := self.find_best()) is not None:
            kept.add(best)
        for position, path in reversed(list(enumerate(directories))):
            if path not in committed:
                is_surplus = position > directories.index(written)
            else:
                is_surplus = path not in kept and (path not in self._damaged or position > oldest_kept)
            if is_surplus:
                _remove_surplus(path)


def _remove_surplus(path: Path) -> None:
    try:
        remove_checkpoint(path)
    except OSError as error:
        warnings.warn(
            f"old checkpoint {path} could not be removed: {error.strerror}; the next save tries again",
            stacklevel=4,
        )


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a checkpoint's document must be plain JSON, but {error}; put tensors among the tensors"
        ) from error


def _explain(path: Path, error: BaseException, num_bytes: int, rank: int | None = None) -> CheckpointError:
    where = f"checkpoint {path}" if rank is None else f"checkpoint {path}, rank {rank},"
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        where = f"checkpoint {path}, rank {rank},"
    if not isinstance(error, OSError):
        return CheckpointError(f"{where} could not be written: {error}")
    advice = advise_on_storage(error)
    if error.errno == errno.ENOSPC:
        advice = _advise_on_full_disk(path, num_bytes, advice)
    return StorageError(f"{where} could not be written: {error.strerror}; {advice}")


def _advise_on_full_disk(path: Path, num_bytes: int, advice: str) -> str:
    """Return `advice` with the numbers of a disk that is too full for `num_bytes`; 0 if nothing was to be written."""
    status = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
    free_bytes = status.f_bavail * status.f_frsize
    if status.f_files and not status.f_favail:
        return "remove files there, or choose another directory: the device can hold no more of them"
    if not num_bytes:
        return advice
    if num_bytes > free_bytes:
        missing = num_bytes - free_bytes
        return f"free {missing:,} bytes: it needs {num_bytes:,}, and {free_bytes:,} are free on the device"
    blocks = f"each of its files takes whole blocks of {status.f_frsize:,}"
    return f"{advice}: it needs {num_bytes:,} bytes ({blocks}), and {free_bytes:,} are free on the device"
