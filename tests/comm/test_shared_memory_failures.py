import os
import re
import resource
import signal
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.comm import SharedMemoryGroup, SharedMemoryWarning, shared_memory
from paceline.comm.shared_memory import buffers
from paceline.errors import CommunicationError, MismatchError, SettingsError
from paceline.testing import faults, run_processes

pytestmark = pytest.mark.skipif(
    shared_memory.find_obstacle() is not None, reason=f"no shared memory here: {shared_memory.find_obstacle()}"
)

LARGE = 100_003


def open_group(name, *, timeout_s=20.0):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return SharedMemoryGroup(dist.PrefixStore(name, store), rank, size, timeout_s=timeout_s)


def catch(function):
    """Return what went wrong."""
    try:
        function()
    except (CommunicationError, MismatchError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return None


WAYS = {
    "small sum": lambda group, buffer: group.all_reduce(torch.ones(3), name="small sum").wait(),
    "shared sum": lambda group, buffer: group.all_reduce(buffer, name="shared sum").wait(),
    "sum in chunks": lambda group, buffer: group.all_reduce(torch.ones(LARGE), name="sum in chunks").wait(),
    "copy": lambda group, buffer: group.broadcast(torch.ones(LARGE), source=1, name="copy").wait(),
    "rows": lambda group, buffer: group.all_gather(torch.ones(3, LARGE), torch.ones(LARGE), name="rows").wait(),
    "allocation": lambda group, buffer: group.allocate(LARGE, torch.float32),
}


def lose_one():
    """Wait in every way at once while rank 1 is killed; return what each said."""
    group = open_group("lost", timeout_s=60)
    groups = {way: group.duplicate(way) for way in WAYS}
    shared = {way: member.allocate(LARGE, torch.float32) for way, member in groups.items()}
    said = {}

    def wait(way):
        said[way] = catch(lambda: WAYS[way](groups[way], shared[way]))

    threads = [threading.Thread(target=wait, args=(way,), daemon=True) for way in WAYS]
    group.barrier()
    inodes = " ".join(map(str, sorted(find_inodes("self"))))
    os.write(1, f"inodes {inodes}\n".encode())
    if group.rank == 1:
        time.sleep(0.5)  # the others wait by now
        os.kill(os.getpid(), signal.SIGKILL)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    time.sleep(0.5)  # whoever is slower must find this process alive
    return said


def find_inodes(process):
    """Return the inodes of shared segments that a process has mapped or open."""
    found = set()
    try:
        with open(f"/proc/{process}/maps") as file:
            found |= {int(line.split()[4]) for line in file if "memfd:paceline" in line}
        for name in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{name}"
            if "memfd:paceline" in os.readlink(path):
                found.add(os.stat(path).st_ino)
    except OSError:
        pass  # it has ended meanwhile
    return found


def test_a_killed_rank_is_named_before_time_is_out_in_every_way_of_waiting_and_leaves_nothing():
    results = run_processes(3, lose_one, timeout_s=50)
    first, killed, other = results
    assert killed.exit_code == -9
    for survivor in (first, other):
        assert survivor.exit_code == 0, survivor.output
        assert sorted(survivor.value) == sorted(WAYS)
        for way, said in survivor.value.items():
            assert said is not None, f"{way} went on"
            assert said["error"] == "CommunicationError", said
            blamed = said["message"].partition(f" on rank {survivor.rank} lost its peers: ")[2]
            assert re.match(r"rank 1 \(host .*, pid \d+\) is dead or frozen: its last heartbeat came", blamed), said
            assert blamed.count("is dead or frozen") == 1, "survivors are not called dead"
    shared = {int(inode) for r in results for inode in re.search(r"inodes (.*)", r.output).group(1).split()}
    assert len(shared) > len(WAYS)
    held = set().union(*(find_inodes(name) for name in os.listdir("/proc") if name.isdigit()))
    assert not held & shared, "a segment outlives its processes"
    assert not [name for name in os.listdir("/dev/shm") if "paceline" in name]


def freeze_one(script):
    group = open_group("frozen")
    group.all_reduce(torch.ones(3), name="first").wait()
    group._recorder.timeout_s = 1  # until here all have as long as they need
    faults.strike(script, rank=group.rank, step=1)
    return catch(lambda: group.all_reduce(torch.ones(3), name="second").wait())


def test_a_frozen_rank_is_told_from_one_that_computes():
    script = [faults.freeze(rank=1, step=1).model_dump()]
    waiting, frozen = run_processes(2, freeze_one, {"script": script}, wait_for=[0])
    assert frozen.exit_code is None, "it was still there"
    assert waiting.value["error"] == "PeerTimeoutError", waiting.output
    assert (
        "is dead or frozen: its last heartbeat came after it had begun operation 1 'first'" in waiting.value["message"]
    )


def be_late():
    """Come to a large operation, on rank 1, when the others have given up."""
    group = open_group("late")
    tensor = torch.ones(LARGE)
    group.all_reduce(tensor, name="first").wait()
    if group.rank == 1:
        group.store.wait(["rank 0 gave up", "rank 2 gave up"], timedelta(seconds=20))
        group._recorder.timeout_s = 1
        return catch(lambda: group.all_reduce(tensor, name="second").wait())
    work = group.all_reduce(tensor, name="second")
    group.store.set(f"rank {group.rank} began", "")
    group.store.wait(["rank 0 began", "rank 2 began"], timedelta(seconds=20))
    group._recorder.timeout_s = 1  # until here all have as long as they need
    said = catch(work.wait)
    group.store.set(f"rank {group.rank} gave up", "")
    return said


def run_different():
    """Run another operation on rank 1, in several ways, and return what is said of each."""
    whole = open_group("different")

    def attempt(name, usual, other):
        group = whole.duplicate(name)
        return catch(lambda: (other if group.rank == 1 else usual)(group))

    def add(tensor, name="sum"):
        return lambda group: group.all_reduce(tensor, name=name).wait()

    few, many = torch.ones(3), torch.ones(LARGE)
    said = {
        "name": attempt("name", add(few, "loss"), add(few, "norm")),
        "length": attempt("length", add(few), add(many)),
        "dtype": attempt("dtype", add(many), add(many.double())),
        "kind": attempt("kind", lambda group: group.allocate(LARGE, torch.float32), add(many)),
    }
    whole.barrier()
    return said


def run_out_of_memory(short):
    """Let rank `short` have no room for large buffers, and return what comes of it."""
    group = open_group(f"out of memory {short}")
    if group.rank == short:
        if group.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        else:
            buffers.reserve = has_no_room
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = group.allocate(LARGE, torch.float32)
        duplicate = group.duplicate("second")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    buffer.fill_(group.rank)
    group.all_reduce(buffer, name="sum").wait()
    total = torch.ones(1)
    duplicate.all_reduce(total, name="sum").wait()
    group.barrier()
    return {
        "buffer": buffer.unique().tolist(),
        "duplicate": [type(duplicate).__name__, float(total)],
        "warnings": [str(each.message) for each in caught if each.category is SharedMemoryWarning],
    }


def has_no_room(descriptor, first, length):
    raise OSError(28, "No space left on device")


def cannot_share(rank):
    """Let `rank` have no descriptors left, and return what is said."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    here = int(os.environ["RANK"])
    if here == rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
    try:
        SharedMemoryGroup(dist.PrefixStore(f"cannot {rank}", store), here, 3, timeout_s=20)
    except SettingsError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return None


def play():
    return {
        "cannot 0": cannot_share(0),
        "cannot 1": cannot_share(1),
        "late": be_late(),
        "different": run_different(),
        "out 0": run_out_of_memory(0),
        "out 1": run_out_of_memory(1),
    }


@pytest.fixture(scope="module")
def played():
    """What went wrong in each scene on each of three ranks: one start of processes serves all."""
    results = run_processes(3, play)
    for result in results:
        assert result.exit_code == 0, result.output
    return {name: [result.value[name] for result in results] for name in results[0].value}


def test_a_late_rank_is_named_when_time_is_out(played):
    first, late, other = played["late"]
    for rank, said in ((0, first), (2, other)):
        assert said["error"] == "PeerTimeoutError"
        head, _, blamed = said["message"].partition(", but did not: ")
        assert head == f"operation 2 'second' on rank {rank} must finish within 1 s"
        assert blamed.startswith("rank 1 (host ")
        assert blamed.count("is alive but behind: it has begun operation 1 'first' and computes") == 1
    assert late is not None


def test_different_operations_are_told_by_what_each_rank_runs(played):
    parts = {
        "name": ("rank 0 runs 'loss' (all_reduce of 3 torch.float32)", "rank 1 runs 'norm' (all_reduce of 3 "),
        "length": ("rank 0 runs 'sum' (all_reduce of 3 ", "rank 1 runs 'sum' (all_reduce of 100003 torch.float32)"),
        "dtype": ("rank 0 runs 'sum' (all_reduce of 100003 torch.float32)", "(all_reduce of 100003 torch.float64)"),
        "kind": ("rank 0 runs 'allocation of 100003 torch.float32' (allocate)", "rank 1 runs 'sum' (all_reduce of "),
    }
    for said in played["different"]:
        for way, expected in parts.items():
            assert said[way] is not None, f"{way} went on"
            assert said[way]["error"] == "MismatchError", "a new start would end the same way"
            assert "operation 1 must be the same on every rank, but " in said[way]["message"]
            for part in expected:
                assert part in said[way]["message"], way


@pytest.mark.parametrize("short", [0, 1])
def test_all_fall_back_together_where_memory_is_short(played, short):
    values = played[f"out {short}"]
    for value in values:
        assert value["buffer"] == [3.0]
        assert value["duplicate"] == ["TorchGroup" if short == 0 else "SharedMemoryGroup", 3.0]
    buffer, *duplicate = values[0]["warnings"]
    reason = "File too large" if short == 0 else "No space left"
    assert f"allocation of {LARGE} torch.float32 could not be made in shared memory (rank {short}: " in buffer
    assert reason in buffer
    assert "filterwarnings" in buffer
    assert len(duplicate) == (1 if short == 0 else 0)
    assert [value["warnings"] for value in values[1:]] == [[], []], "one rank tells it for all"


@pytest.mark.parametrize(("rank", "reason"), [(0, "Too many open files"), (1, "no file descriptor free")])
def test_a_rank_that_cannot_share_is_named_on_all(played, rank, reason):
    for message in played[f"cannot {rank}"]:
        assert f"but some cannot (rank {rank}: " in message
        assert reason in message
        assert "transport='network'" in message
