"""A rank's coordinates in a layout, and its groups."""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import _disable_current_modes

from paceline.comm.connecting import connect
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.topology.layout import AXES, Axes, Axis

T = TypeVar("T")
_num_meshes: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
"""Number of meshes made of each world so far, the same on all its ranks: their groups must not be confused."""

_users: set["Mesh"] = set()
"""Meshes that use the default group that one of them made."""


_NEVER_SENT = 2**31 - 1
"""Tag that no message has."""


def disconnect() -> None:
    """Close the connections of torch's groups, which ends operations under way in other threads; on CPUs.

    gloo has no call for that, but it does so when a message is late: here, one that is never sent.
    """
    nothing = torch.zeros(1)
    for group in list(_world.pg_map) if dist.is_initialized() else []:
        with contextlib.suppress(RuntimeError):
            backend: Any = group._get_backend(torch.device("cpu"))
            for peer in set(range(group.size())) - {group.rank()}:
                with contextlib.suppress(RuntimeError):
                    backend.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def abandon_meshes() -> None:
    """End torch's default group, whose peers are lost, without waiting for them; the meshes that use it end with it."""
    disconnect()
    for group in list(_world.pg_map) if _users else []:
        # Its destructor would wait for operations that have failed: it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if _users:
        _users.clear()
        dist.destroy_process_group()


class Mesh:
    """A rank's coordinates on the axes of a layout, with its groups.

    Paceline's own exchanges run on `group`; torch's operations along an axis (DTensor, FSDP2, pipelining) run on
    `device_mesh`, whose process groups need torch's default group, which is made here and ended by `close`.

    Args:
        world: Group of all ranks; processes, unless there is only one rank.
        axes: Axes of the layout.

    Raises:
        SettingsError: The ranks are threads, which cannot share torch's default group.
    """

    def __init__(self, world: Group, axes: Axes) -> None:
        self.world = world
        self.axes = axes
        self._number = _num_meshes.get(world, 0)
        _num_meshes[world] = self._number + 1
        self._groups: dict[tuple[Axis, ...], Group] = {}
        self._device_mesh: DeviceMesh | None = None
        self._closers: list[Callable[[], None]] = []

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks along `axes`."""
        return self.axes.size(*axes)

    def coordinate(self, axis: Axis) -> int:
        """Return this rank's coordinate on `axis`."""
        return self.axes.coordinate(self.world.rank, axis)

    def ranks(self, *axes: Axis) -> list[int]:
        """Return the ranks of the world with this rank's coordinates except on `axes`, ascending."""
        return self.axes.ranks_along(self.world.rank, *axes)

    def group(self, *axes: Axis) -> Group:
        """Return the group of the ranks along `axes`; every rank of the world asks for the same, in the same order."""
        key = tuple(sorted(set(axes), key=AXES.index))
        if key not in self._groups:
            ranks = self.ranks(*key)
            if len(ranks) == self.world.size:
                self._groups[key] = self.world
            elif len(ranks) == 1:
                self._groups[key] = LocalGroup(
                    device=self.world.device, epoch=self.world.epoch, names=self.world.names_of(ranks)
                )
                self._groups[key].membership = self.world.membership
            else:
                self._groups[key] = self.subgroup(ranks, f"axes {' '.join(key)}")
        return self._groups[key]

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """Return a group of some ranks of the world; see `Group.subgroup`."""
        group = self.world.subgroup(ranks, f"mesh {self._number}: {name}")
        group.membership = self.world.membership
        return group

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of all axes, by name; ``device_mesh["tensor"]`` is that of one axis."""
        if self._device_mesh is None:
            self._open_default_group()
            self._device_mesh = self._connect(self._make_device_mesh)
        return self._device_mesh

    def _make_device_mesh(self) -> DeviceMesh:
        with _disable_current_modes():  # ranks are numbers in a rehearsal without contents too
            return init_device_mesh(
                self.world.device.type, self.axes.sizes, mesh_dim_names=tuple(str(axis) for axis in AXES)
            )

    def _connect(self, run: Callable[[], T]) -> T:
        """Return what a function of torch's returns that connects all ranks."""
        world = self.world
        if world.device.type != "cpu" or world.size == 1 or world.store is None:
            return run()
        others = [name for name in world.names if name != world.names[world.rank]]
        return connect(run, world.store, world.epoch, others, world.timeout_s)

    def process_group(self, axis: Axis) -> dist.ProcessGroup:
        """Return torch's process group along `axis`."""
        return self.device_mesh.get_group(axis)

    def open_process_group(self, timeout_s: float) -> dist.ProcessGroup:
        """Return a new group of torch's of all ranks, through host memory, for a thread of its own.

        It ends with the mesh. Every rank calls this.

        Args:
            timeout_s: Time that ranks wait for each other.
        """
        self._open_default_group()
        timeout = timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = self._connect(lambda: dist.new_group(backend="gloo", timeout=timeout))
        return group

    @property
    def store(self) -> dist.Store | None:
        """Store that the ranks share, with keys of this mesh alone; None if they are threads."""
        return self.world.store and dist.PrefixStore(f"mesh {self._number}", self.world.store)

    def close_with(self, close: Callable[[], None]) -> None:
        """Call `close` before the mesh ends."""
        self._closers.append(close)

    def close(self) -> None:
        """End torch's default group with the last mesh that uses it. The world closes Paceline's groups."""
        while self._closers:
            self._closers.pop()()
        self._device_mesh = None
        if self in _users:
            _users.discard(self)
            if not _users:
                dist.destroy_process_group()

    def _open_default_group(self) -> None:
        if dist.is_initialized():
            if _users:
                _users.add(self)
            if (dist.get_rank(), dist.get_world_size()) != (self.world.rank, self.world.size):
                raise SettingsError(
                    f"torch's default process group must be of the same {self.world.size} ranks, but this is its rank "
                    f"{dist.get_rank()} of {dist.get_world_size()}; leave it to Paceline"
                )
            return
        store = self.store
        if store is None:
            if self.world.size > 1:
                raise SettingsError(
                    f"the ranks of a layout must be processes, but got a {type(self.world).__name__}; start them with "
                    "`paceline train` or torchrun"
                )
            store = dist.PrefixStore(f"mesh {self._number}", dist.HashStore())
        open_group = partial(
            dist.init_process_group,
            "gloo" if self.world.device.type == "cpu" else "nccl",
            store=store,
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=timedelta(seconds=self.world.timeout_s),
        )
        self._connect(open_group)
        _users.add(self)
