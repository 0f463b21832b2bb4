"""A group whose other ranks do not exist, for rehearsals without any computation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from paceline.comm.group import DoneWork, Group, Work
from paceline.errors import SettingsError


class AbsentGroup(Group):
    """A rank of a group of any size, whose operations do nothing; every other rank counts as equal to this one."""

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Leave `tensor` unchanged."""
        return DoneWork()

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Leave `tensor` unchanged."""
        return DoneWork()

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Leave `output` unchanged."""
        return DoneWork()

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Leave `output` unchanged."""
        return DoneWork()

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send nothing."""
        return DoneWork()

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Leave `tensor` unchanged."""
        return DoneWork()

    def duplicate(self, name: str) -> "AbsentGroup":
        """Return another absent group."""
        return AbsentGroup(self.rank, self.size, self.device)

    def subgroup(self, ranks: Sequence[int], name: str) -> "AbsentGroup":
        """Return another absent group, with that number of ranks."""
        return AbsentGroup(self.place_in(ranks), len(ranks), self.device)

    def gather_documents(self, document: Any, *, name: str) -> list[Any]:
        """Return this rank's own document for every rank."""
        return [document] * self.size

    def barrier(self, *, name: str = "barrier") -> None:
        """Return at once."""

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing."""


@contextmanager
def absent_world(rank: int, size: int) -> Iterator[AbsentGroup]:
    """While active, this process is a rank of a world whose other ranks do not exist, in torch's eyes too.

    Raises:
        SettingsError: The process has torch's default process group already.
    """
    if dist.is_initialized():
        raise SettingsError(
            "torch's default process group must not exist in a process that rehearses a layout, but it does; ask for "
            "the memory of a layout before it is made"
        )
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    make = DeviceMesh.__init__
    DeviceMesh.__init__ = _with_contents(make)  # type: ignore[method-assign]
    _clear_sharding_prop_cache()  # it knows meshes of other worlds, which are equal but for their groups
    try:
        yield AbsentGroup(rank, size, torch.device("cpu"))
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def _with_contents(make: Callable[..., None]) -> Callable[..., None]:
    """Return a function whose tensors have contents in a rehearsal too, such as the ranks of a mesh."""

    def run(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            make(*args, **kwargs)

    return run
