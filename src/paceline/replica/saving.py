"""Checkpoints of your own loop: `save` and `load_latest`."""

import random
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from paceline.checkpoint.find import warn_of_damage
from paceline.comm.group import Group
from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.errors import CheckpointError, SettingsError
from paceline.parallel.model_shard import ModelShard
from paceline.replica.gathering import read_header, scatter
from paceline.replica.named_tensors import Stateful, capture_objects, restore_objects
from paceline.replica.replica import Replica
from paceline.replica.shared_saving import open_saver, start_saving
from paceline.replica.state import describe, restore


def save(folder: str | Path, *objects: Stateful, keep: int | None = 3, incremental: int = 0) -> None:
    """Save all that training depends on, after an `update`; every rank calls it, with the same objects.

    What is saved are the values of now, random generators of torch, NumPy and Python among them. They are written in
    the background, so that training goes on, and are durable once the next checkpoint is begun, or the group is left;
    where a signal stops the workers, when this returns.

    Args:
        folder: Directory of the checkpoints, on rank 0. It must be empty, or `load_latest` was called for it.
        objects: One replica or more, and whatever else has a `state_dict`: loaders, schedulers, averages. Of these rank
            0's counts.
        keep: Newest checkpoints that stay; None for all.
        incremental: Checkpoints between two full ones that write only what has changed since the one before; 0 for
            full ones alone.

    Raises:
        SettingsError: There is no replica among the objects, one is between `backward` and `update`, the folder
            holds checkpoints of a training that this one does not go on from, or `incremental` is below 0.
        CheckpointError: A checkpoint could not be written.
        DivergenceError: Replicas should be equal and are not.
    """
    PROGRESS.enter(time.monotonic(), b"save")
    replicas, others = _name(objects)
    for replica in replicas.values():
        if not replica.is_between_steps:
            raise SettingsError("a replica must be saved between its update and the next backward; call update before")
        if replica.dispatcher is not None and replica.membership.boundary_step is None:
            raise SettingsError(
                f"workers with sync {replica.sync.name} must be together to save, but each is at a step of its own; "
                "save where replica.should_save(every=...) says so"
            )
    shard = next(iter(replicas.values())).shard
    world = shard.world
    tensors, document = capture_objects(others)
    tensors = tensors if world.rank == 0 else {}
    for prefix, replica in replicas.items():
        more, about = describe(replica, prefix)
        tensors, document = tensors | more, document | about
    tensors |= {f"rank{world.rank}/random/{name}": state for name, state in _random_states(world).items()}
    step = world.membership.boundary_step or max(replica.num_updates for replica in replicas.values())
    found = _find_saver(Path(folder), shard, keep, incremental)
    if world.rank == 0:
        found.check_new(replicas.values())
    start_saving(found.saver, tensors, document | {"step": step}, step, world)
    if found.saver is not None:
        found.saver.finished()
        if world.membership.is_stopping:
            found.saver.wait()
    if world.membership.is_stopping:
        world.barrier(name="checkpoint")  # or a launcher would end rank 0 with the first that leaves
        world.membership.is_saved = True
    PROGRESS.enter(time.monotonic(), BETWEEN)


def load_latest(folder: str | Path, *objects: Stateful) -> bool:
    """Load the newest checkpoint of a folder that is whole; every rank calls it, with the same objects as `save`.

    With as many workers, on CPUs, what follows is what would have followed without the interruption, bit for bit. With
    another number of workers, or in another layout, the model, its optimizer and the position in the data go on
    exactly; see `paceline.replica.state`.

    Args:
        folder: Directory of the checkpoints, on rank 0; it need not exist.
        objects: The saved objects, in the same order.

    Returns:
        Whether there was one; if not, nothing has changed.

    Raises:
        CheckpointError: All checkpoints there are damaged, or the newest is of other objects.
        SettingsError: The checkpoint is of another optimizer.
    """
    replicas, others = _name(objects)
    shard = next(iter(replicas.values())).shard
    world = shard.world
    saver = _find_saver(Path(folder), shard, None, 0)
    checkpoint = saver.find(replicas.values()) if world.rank == 0 else None
    header = read_header(checkpoint, world)
    if header is None:
        return False
    if (saved := sum(name.startswith("replica") for name in header[0])) != len(replicas):
        raise CheckpointError(
            f"all objects of a checkpoint must be loaded, but {saved} replicas were saved, and {len(replicas)} given; "
            "give load_latest the same objects as save, in the same order"
        )
    for prefix, replica in replicas.items():
        try:
            restore(checkpoint, replica, prefix, hyper_parameters=True)
        except CheckpointError as error:
            if prefix:
                error.add_note(f"{prefix[:-1]} of {len(replicas)}, from 0; give load_latest the same order as save")
            raise
    restore_objects(checkpoint, others, world, all_saved=True)
    prefix = f"rank{world.rank}/random/"
    wanted = {name: whole for name, whole in header[1].items() if name.startswith(prefix)}
    loaded = dict(scatter(wanted, checkpoint.read if checkpoint is not None else None, world))
    _load_random_states({name.removeprefix(prefix): state for name, state in loaded.items()}, world)
    return True


@dataclass
class _Saver:
    """What writes to a folder on this rank until the group is left."""

    store: CheckpointStore
    saver: AsyncSaver | None
    """None where rank 0 writes for this one."""
    known: weakref.WeakSet[Replica] = field(default_factory=weakref.WeakSet)
    """Replicas that the checkpoints there are of: those that began the folder, or have looked for what it holds."""

    def find(self, replicas: Iterable[Replica]) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, on rank 0."""
        self._wait()
        found = self.store.find_newest_valid(warn_of_damage)
        self.known.update(replicas)
        return found

    def check_new(self, replicas: Iterable[Replica]) -> None:
        """Refuse, on rank 0, to mix two trainings, also if one process runs them one after the other."""
        strangers = [replica for replica in replicas if replica not in self.known]
        if strangers:
            self._wait()
        if strangers and (there := self.store.list_checkpoints()):
            raise SettingsError(
                f"a folder of checkpoints must be empty for a new training, but {self.store.directory} holds "
                f"{there[0].name}; call paceline.load_latest before the loop to go on from it, or choose another folder"
            )
        self.known.update(strangers)

    def _wait(self) -> None:
        if self.saver is not None:
            self.saver.wait()


def _find_saver(folder: Path, shard: ModelShard, keep: int | None, incremental: int) -> _Saver:
    membership = shard.world.membership
    savers: dict[Path, _Saver] = membership.savers
    folder = folder.absolute()
    if folder not in savers:
        store = CheckpointStore(folder, keep, incremental)
        savers[folder] = _Saver(store, open_saver(store, shard))
        membership.close_with(store.close)
        if (saver := savers[folder].saver) is not None:
            membership.close_with(saver.close)
            if saver.is_shared and shard.mesh is not None:
                shard.mesh.close_with(partial(_drop, savers, folder))
    savers[folder].store.keep = keep if keep is not None else savers[folder].store.keep
    savers[folder].store.incremental = max(incremental, savers[folder].store.incremental)
    return savers[folder]


def _drop(savers: dict[Path, _Saver], folder: Path) -> None:
    """Finish what ranks save together, while they still have a group."""
    dropped = savers.pop(folder)
    if dropped.saver is not None:
        dropped.saver.close()
    dropped.store.close()


def _name(objects: Iterable[Stateful]) -> tuple[dict[str, Replica], dict[str, Stateful]]:
    """Return replicas by the prefix of their names, and other objects by name."""
    found = list(objects)
    replicas = [one for one in found if isinstance(one, Replica)]
    others = [one for one in found if not isinstance(one, Replica)]
    if not replicas:
        raise SettingsError(
            f"a replica must be among what is saved, but got {[type(one).__name__ for one in found]}; give the "
            "paceline.Replica of your loop"
        )
    for one in others:
        if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
            raise SettingsError(
                f"what is saved must have state_dict and load_state_dict, but {type(one).__name__} has not; leave it "
                "out"
            )
    prefixes = [""] if len(replicas) == 1 else [f"replica{number}/" for number in range(len(replicas))]
    names = [f"{number} {type(one).__name__}" for number, one in enumerate(others)]
    return dict(zip(prefixes, replicas, strict=True)), dict(zip(names, others, strict=True))


def _random_states(world: Group) -> dict[str, Tensor]:
    """Return the states of the global random generators."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss]),
        "numpy gauss": torch.tensor([cached], dtype=torch.float64),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(world.device)} if world.device.type == "cuda" else {})


def _load_random_states(states: dict[str, Tensor], world: Group) -> None:
    """Take on saved states, if there are any: a rank that is new has none."""
    if not states:
        return
    torch.set_rng_state(states["torch"])
    gauss = states["python gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    numpy: tuple[Any, ...] = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss)
    np.random.set_state((*numpy, states["numpy gauss"].item()))
    if "cuda" in states and world.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], world.device)
