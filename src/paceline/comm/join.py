"""How a process finds its group: torchrun's environment, or a world of one."""

import os
import time
import uuid
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

from paceline.comm.control import ControlAccess, ControlStore, store_of_epoch
from paceline.comm.control.connection import DEFAULT_PATIENCE_S
from paceline.comm.group import Group, joined_group, note_joined
from paceline.comm.host_group import HostGroup
from paceline.comm.local_group import LocalGroup
from paceline.comm.progress import PROGRESS
from paceline.comm.reach import check_reach, listening
from paceline.comm.shared_memory import (
    SharedMemoryError,
    SharedMemoryGroup,
    SharedMemoryWarning,
    exchange_documents,
    find_obstacle,
    host_key,
    raise_together,
)
from paceline.comm.torch_group import TorchGroup
from paceline.errors import CommunicationError, SettingsError

DEFAULT_TIMEOUT_S = 300.0
_POLL_S = 0.02

Transport = Literal["auto", "shared_memory", "network"]


def join(
    *,
    device: str | torch.device | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    transport: Transport = "auto",
    hang_timeout_s: float | None = None,
) -> Group:
    """Join the other workers of this run, or make a world of one where no launcher started this process.

    Replicas and loaders made afterwards belong to the group. At the end of ``with paceline.join():`` the worker
    leaves: the block closes everything that belongs to the group, and if SIGTERM, SIGINT or SIGHUP stopped the loop,
    the process ends with exit code 75, which tells schedulers and `paceline train` that the run can be resumed.

    Args:
        device: Device that this worker computes on; by default its own GPU (number ``LOCAL_RANK``) if the host has one
            for each of its workers, else the CPU.
        timeout_s: Longest time of an operation before `PeerTimeoutError` says who is missing.
        transport: Transport of CPU tensors, the same on every worker. ``shared_memory``: shared memory inside a host,
            and messages between the hosts' leaders. ``network``: messages everywhere. ``auto``: shared memory if some
            host has several workers and all can share it, else the network; a warning says why they cannot share it.
            GPUs always use NCCL.
        hang_timeout_s: Time without progress, while others wait for it, after which a worker counts as hanging; then
            they stop waiting, with an error that says where it is. By default ten times its longest phase so far, at
            least 20 s (60 s for data), and 5 s if even its heartbeats stop; your code between phases, such as an
            evaluation of your own, may then take as long as it likes.

    Raises:
        SettingsError: The launcher's environment is incomplete, or `transport` is not available.
        CommunicationError: The other workers did not join within `timeout_s`.
    """
    _check_fork()
    if hang_timeout_s is not None and not hang_timeout_s > 0:
        raise SettingsError(
            f"hang_timeout_s must be more than 0, but got {hang_timeout_s!r}; leave it out for what suits the training"
        )
    PROGRESS.hang_timeout_s = hang_timeout_s
    chosen = torch.device(device) if device is not None else default_device()
    if transport not in get_args(Transport):
        raise SettingsError(f"transport must be one of {get_args(Transport)}, but got {transport!r}; choose one")
    group = _open(chosen, timeout_s, transport)
    note_joined(group)
    return group


def find_group(device: torch.device | None = None) -> Group:
    """Return the group that this process has joined, or a world of one if no launcher started other workers.

    Args:
        device: Device of a world of one.

    Raises:
        SettingsError: A launcher started several workers, but this one has not called `join`.
    """
    group = joined_group()
    if group is not None:
        return group
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SettingsError(
            f"this process must join the {os.environ['WORLD_SIZE']} workers that were started before it makes a "
            "replica or a loader, or each would train by itself; put the loop into `with paceline.join():`"
        )
    return LocalGroup(device=device)


def _open(chosen: torch.device, timeout_s: float, transport: Transport) -> Group:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return LocalGroup(device=chosen)
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise SettingsError(
            f"a launched worker must find {', '.join(needed)} in its environment, but {', '.join(missing)} "
            "is missing; start it with torchrun or `paceline train`, or unset the others to train alone"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return LocalGroup(device=chosen)
    try:
        store = open_store(timeout_s)
        generation = agree_generation(dist.PrefixStore("paceline", store), rank, size, timeout_s)
        if rank == 0 and isinstance(store, ControlStore):
            store.announce_epoch(generation)
        prefix = store_of_epoch(store, generation)
        return open_group(prefix, rank, size, device=chosen, timeout_s=timeout_s, epoch=generation, transport=transport)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CommunicationError(f"rank {rank} could not join the {size} workers at {address}: {error}") from error


def open_store(
    timeout_s: float = DEFAULT_TIMEOUT_S, *, patience_s: float = 0.0, access_file: Path | None = None
) -> dist.Store:
    """Return the store by which the workers of this start find each other: their launcher's, or torchrun's.

    Args:
        timeout_s: Longest time to wait for keys.
        patience_s: Time for which the launcher may be gone, until another one takes its place.
        access_file: File of the launcher's access, which another one writes again; None if none comes.

    Raises:
        RuntimeError: The store cannot be reached.
    """
    access = ControlAccess.from_environment(os.environ)
    # Where a worker of ours starts torchrun, its workers inherit the access to a launcher that is not theirs.
    if access is not None and (access.host, str(access.port)) == (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]):
        patience_s = max(patience_s, DEFAULT_PATIENCE_S)
        return ControlStore(access, timeout_s=timeout_s, patience_s=patience_s, access_file=access_file)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s))))[0]
    return store


def open_group(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float,
    epoch: int,
    transport: Transport,
) -> Group:
    """Return the group of the ranks that meet in `store`, all of whose keys belong to it; see `join`."""
    if device.type != "cpu":
        return TorchGroup(store, rank, size, device=device, timeout_s=timeout_s, epoch=epoch)
    return _open_cpu_group(store, rank, size, timeout_s=timeout_s, epoch=epoch, transport=transport)


def _open_cpu_group(
    store: dist.Store, rank: int, size: int, *, timeout_s: float, epoch: int, transport: Transport
) -> Group:
    """Return the group for the transport that all ranks agree on."""
    with listening(size) as address:
        mine = {"transport": transport, "host": host_key(), "obstacle": find_obstacle(), "address": address}
        documents = exchange_documents(dist.PrefixStore("transport", store), rank, size, mine, timeout_s)
        hosts, addresses = ([document[key] for document in documents] for key in ("host", "address"))
        if len(set(hosts)) > 1:
            reach_store = dist.PrefixStore("reach", store)
            check_reach(reach_store, rank, addresses, hosts, timeout_s=timeout_s, epoch=epoch)
    asked = [document["transport"] for document in documents]
    if len(set(asked)) > 1:
        raise SettingsError(
            f"transport must be the same on every worker, but got {asked} by rank; pass the same to all"
        )
    num_hosts = len(set(hosts))
    obstacles = [document["obstacle"] if hosts.count(document["host"]) > 1 else None for document in documents]
    try:
        if transport == "network" or (transport == "auto" and num_hosts == size):
            return TorchGroup(store, rank, size, device=torch.device("cpu"), timeout_s=timeout_s, epoch=epoch)
        raise_together(obstacles)
        shared = dist.PrefixStore("shared", store)
        if num_hosts == 1:
            return SharedMemoryGroup(shared, rank, size, timeout_s=timeout_s, epoch=epoch)
        return HostGroup(shared, rank, size, timeout_s=timeout_s, epoch=epoch, host=hosts[rank])
    except SharedMemoryError as error:
        if transport == "shared_memory":
            raise
        if rank == 0:
            warnings.warn(
                f"workers talk over the network, also inside a host, which is slower: {error}; "
                "to silence this, join(transport='network')",
                SharedMemoryWarning,
                stacklevel=3,
            )
    return TorchGroup(store, rank, size, device=torch.device("cpu"), timeout_s=timeout_s, epoch=epoch)


def agree_generation(store: dist.Store, rank: int, size: int, timeout_s: float) -> int:
    """Return a number that only the processes of this start of the run agree on.

    A launcher that restarts workers gives them the store of the dead ones, full of old addresses, and its own
    restart count differs from host to host. So rank 0 opens a new generation, every other rank enters its
    name into the newest one, and rank 0 confirms it once all are in. If an earlier process of the same rank has
    already entered, the rank waits for a newer generation. Starts of different sizes never share a generation.
    """
    deadline_s = time.monotonic() + timeout_s
    me = uuid.uuid4().hex
    if rank == 0:
        generation = int(store.add("generations", 1))
        while not store.check([f"{generation}/{size}/entry/{other}" for other in range(1, size)]):
            _sleep_until(deadline_s, f"generation {generation} must have {size} workers, but some did not enter it")
        store.set(f"{generation}/{size}/confirmed", me)
        return generation
    generation = 0
    entered = False
    while not (entered and store.check([f"{generation}/{size}/confirmed"])):
        newest = int(store.add("generations", 0))
        if newest > generation:
            generation = newest
            entered = store.compare_set(f"{generation}/{size}/entry/{rank}", "", me) == me.encode()
        _sleep_until(deadline_s, f"rank {rank} waited for rank 0, which did not confirm one")
    return generation


def _check_fork() -> None:
    """Raise `SettingsError` if this process was forked from one that used a GPU, so that it can use none itself."""
    if torch.cuda._is_in_bad_fork():
        raise SettingsError(
            "CUDA must not be initialised before a worker is forked, but was, in the process that it was forked from; "
            "start workers with `paceline train`, torchrun or the start methods spawn or forkserver"
        )


def _sleep_until(deadline_s: float, complaint: str) -> None:
    if time.monotonic() > deadline_s:
        raise CommunicationError(f"{complaint} in time; check that every worker was started")
    time.sleep(_POLL_S)


def default_device() -> torch.device:
    """Return this process's own GPU, if the host has one for each process; else the CPU."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= local_size:
        return torch.device("cuda", local_rank)
    if num_gpus and local_rank == 0:
        warnings.warn(
            f"training is on CPUs, since this host has {num_gpus} GPUs for {local_size} processes; start at most one "
            "process for each GPU, servers included",
            stacklevel=3,
        )
    return torch.device("cpu")
