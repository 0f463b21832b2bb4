"""Groups of processes whose launcher's store is a control server: every kind finds its ranks by it."""

import os

import pytest
import torch
import torch.distributed as dist

from paceline.comm import HostGroup, SharedMemoryGroup, TorchGroup, join
from paceline.comm.control import ControlStore, EpochOverError, store_of_epoch
from paceline.comm.heartbeat import HeartbeatBoard
from paceline.comm.join import open_store
from paceline.launch.processes import run_in_processes


def use_groups():
    """Sum in a group of each kind, and in what is made of it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(20)
    assert isinstance(store, ControlStore)
    places = (rank, size)
    groups = [
        TorchGroup(dist.PrefixStore("torch", store), *places, device=torch.device("cpu"), timeout_s=20),
        SharedMemoryGroup(dist.PrefixStore("shared", store), *places, timeout_s=20),
        HostGroup(dist.PrefixStore("hosts", store), *places, timeout_s=20, host=f"host {rank // 2}"),
    ]
    board = HeartbeatBoard(dist.PrefixStore("board", store), rank, range(size))
    board.begin(7, "here")
    sums = {}
    for group in groups:
        everyone, odd = group.duplicate("again"), [1, 3]
        tensor = torch.full((10_000,), float(rank))
        everyone.all_reduce(tensor, name="sum").wait()
        sums[type(group).__name__] = float(tensor[-1])
        if rank in odd:
            group.subgroup(odd, "odd").all_reduce(tensor, name="sum").wait()
            assert float(tensor[-1]) == 12.0
    board.close()
    for group in groups:
        group.barrier()
        group.close()
    sums["begun"] = min(board.read(other).begun for other in range(size))
    return sums


def test_every_kind_of_group_finds_its_ranks():
    sums = run_in_processes(4, use_groups)
    expected = {"TorchGroup": 6.0, "SharedMemoryGroup": 6.0, "HostGroup": 6.0, "begun": 7}
    assert sums == dict.fromkeys(range(4), expected)


def join_and_fence():
    """Join, and write as a worker of the epoch before."""
    with join(device="cpu", transport="network") as group:
        group.barrier()
        store = open_store(20)
        with pytest.raises(EpochOverError, match=rf"newest epoch of membership, {group.epoch}, but .* to 0"):
            store_of_epoch(store, group.epoch - 1).set("key", "zombie")
        return group.epoch


def test_workers_join_in_an_epoch_that_fences_those_before():
    assert run_in_processes(2, join_and_fence) == {0: 1, 1: 1}


def find_other_launcher():
    """Return the kind of store where torchrun was started by a worker of ours."""
    os.environ["MASTER_PORT"] = str(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return isinstance(open_store(20), ControlStore)


def test_a_torchrun_inside_keeps_its_own_store():
    assert run_in_processes(1, find_other_launcher) == {0: False}
