"""Saving while training goes on: the tensors are copied at once, and a thread writes the copy."""

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.checkpoint.storage import TensorBlock
from paceline.checkpoint.store import CheckpointStore, SavedCheckpoint
from paceline.comm.streams import record


class AsyncSaver:
    """Saves to a store in the background, one checkpoint at a time.

    Memory: one copy of the tensors in CPU memory (pinned, for those of a GPU), made at the first save and
    reused by the next ones, until `close`. Tensors that share memory are each copied. Hashing and writing
    take one thread, which leaves the interpreter's lock to training nearly all of the time.

    An error in the background is raised once, by the next call of `start`, `finished`, `wait` or `close`.
    A process that ends without `close` still finishes the save; a failure is then a warning.
    """

    def __init__(self, store: CheckpointStore, process_group: ProcessGroup | None = None) -> None:
        """Make an idle saver.

        Args:
            store: Store to save to; the caller closes it.
            process_group: Process group for `CheckpointStore.save`. Training must not use it, because
                the background thread communicates over it at any time.
        """
        self._store = store
        self._process_group = process_group
        self._buffers: dict[str, Tensor] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: list[Future[SavedCheckpoint]] = []  # one or none; shared with the finalizer
        self._unreported: list[SavedCheckpoint] = []
        self._finalize = weakref.finalize(self, _finish, self._executor, self._in_flight)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._finalize()  # an error of the save would hide the present one

    def start(
        self, tensors: Mapping[str, Tensor], document: Mapping[str, Any], step: int, *, is_best: bool = False
    ) -> None:
        """Begin to save the present values. If a save is still in flight, wait for it first.

        Raises:
            CheckpointError: The save before this one failed; this one did not begin.
        """
        if self._in_flight:
            self._unreported.append(self._take_result())
        self._copy(tensors)
        document = copy.deepcopy(dict(document))
        copied = [record(device) for device in {tensor.device for tensor in tensors.values()}]
        save = partial(_save_copied, copied, self._store)  # without this object, or nobody could drop it
        self._in_flight.append(
            self._executor.submit(save, self._buffers, document, step, self._process_group, is_best=is_best)
        )

    def start_blocks(
        self,
        blocks: Mapping[str, Sequence[TensorBlock]],
        document: Mapping[str, Any],
        step: int,
        *,
        is_best: bool = False,
    ) -> None:
        """Begin to save this process's blocks of tensors, as `start` does, by `CheckpointStore.save_blocks`.

        Raises:
            CheckpointError: The save before this one failed; this one did not begin.
        """
        assert self._process_group is not None, "processes that save together need a group"
        if self._in_flight:
            self._unreported.append(self._take_result())
        keys = {f"{name} {place}": block for name, parts in blocks.items() for place, block in enumerate(parts)}
        self._copy({key: block.tensor for key, block in keys.items()})
        copied = {
            name: [part._replace(tensor=self._buffers[f"{name} {place}"]) for place, part in enumerate(parts)]
            for name, parts in blocks.items()
        }
        document = copy.deepcopy(dict(document))
        self._in_flight.append(
            self._executor.submit(self._store.save_blocks, copied, document, step, self._process_group, is_best=is_best)
        )

    @property
    def is_shared(self) -> bool:
        """Whether other processes save together with this one."""
        return self._process_group is not None

    def finished(self) -> list[SavedCheckpoint]:
        """Return the saves that have finished and were not reported yet, the oldest first. Never waits.

        Raises:
            CheckpointError: A save failed.
        """
        if self._in_flight and self._in_flight[0].done():
            self._unreported.append(self._take_result())
        reported, self._unreported = self._unreported, []
        return reported

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the save in flight and return it, or None; `finished` does not report it again.

        Raises:
            CheckpointError: The save failed.
        """
        return self._take_result() if self._in_flight else None

    def close(self) -> None:
        """Wait for the save in flight and free the buffers.

        Raises:
            CheckpointError: The save failed.
        """
        try:
            self.wait()
        finally:
            self._finalize()
            self._buffers = {}

    def _take_result(self) -> SavedCheckpoint:
        future = self._in_flight[0]
        try:
            return future.result()
        finally:
            if future.done():  # it is not, when the waiting was interrupted
                self._in_flight.clear()

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        buffers = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or not _fits(buffer, tensor):
                buffer = torch.empty_like(
                    tensor.detach(),
                    device="cpu",
                    pin_memory=tensor.is_cuda,
                    memory_format=torch.contiguous_format,
                )
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            buffers[name] = buffer
        self._buffers = buffers


def _save_copied(copied: list[Any], store: CheckpointStore, *arguments: Any, is_best: bool) -> SavedCheckpoint:
    """Save buffers, once they hold the copies: from a GPU these are queued, and only this thread waits for them."""
    for event in copied:
        if event is not None:
            event.synchronize()
    return store.save(*arguments, is_best=is_best)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    is_same = buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and type(buffer) is type(tensor.detach())
    return is_same and getattr(buffer, "placements", None) == getattr(tensor, "placements", None)


def _finish(executor: ThreadPoolExecutor, in_flight: list[Future[SavedCheckpoint]]) -> None:
    executor.shutdown(wait=True)
    for future in in_flight:
        if error := future.exception():
            warnings.warn(f"the last checkpoint is missing: {error}", stacklevel=2)
    in_flight.clear()
