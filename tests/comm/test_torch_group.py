import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm import join, torch_group
from paceline.comm.channel import Channel
from paceline.errors import CommunicationError, PacelineError
from paceline.testing import (
    GROUP_CHECKS,
    check_group,
    check_words_of_failure,
    faults,
    open_store,
    run_processes,
)

KEPT = []
"""Groups that live until their process ends, so that letting go of one is a test of its own."""


def keep_contract():
    """Check everything that can be checked of one group, the end of which comes last."""
    group = join(timeout_s=20, device="cpu", transport="network")
    names = check_group(group)
    refused = refuse_dtype(group)
    late = miss_message(group)
    KEPT.append(group.duplicate("send").send(torch.zeros(10**6), (group.rank + 1) % group.size, tag=0, name="unheard"))
    check_words_of_failure(group)
    return {"names": names, "refused": refused, "late": late, "kind": type(group).__name__}


def miss_message(group):
    """Return what is raised on rank 0 for a message that rank 1 never sends."""
    duplicate = group.duplicate("late")
    duplicate.timeout_s = 0.2
    KEPT.append(duplicate)
    if group.rank == 0:
        try:
            duplicate.receive(torch.zeros(1), 1, tag=5, name="bucket 3").wait()
        except CommunicationError as error:
            return {"error": type(error).__name__, "message": str(error)}
    return None


def refuse_dtype(group):
    """Return what is raised for a tensor that gloo cannot sum."""
    try:
        group.all_reduce(torch.ones(3, dtype=torch.int16), name="int16").wait()
    except Exception as error:
        return {"is_communication": isinstance(error, CommunicationError), "message": str(error)}
    return None


def await_sends():
    """Return what arrived, and how many jobs the thread that waits for sends was given for three of them."""
    with join(timeout_s=20, device="cpu", transport="network") as group:
        peer = 1 - group.rank
        received = [torch.zeros(2) for _ in range(3)]
        works = [group.receive(tensor, peer, tag=tag, name="to here") for tag, tensor in enumerate(received)]
        sent = [torch.full((2,), 10.0 * group.rank + tag) for tag in range(3)]
        works += [group.send(tensor, peer, tag=tag, name="from here") for tag, tensor in enumerate(sent)]
        group._senders = senders = CountingChannel("senders")
        group.wait_for(works)
        return [tensor[0].item() for tensor in received], senders.num_jobs


class CountingChannel(Channel):
    num_jobs = 0

    def submit(self, job, sequence=0):
        self.num_jobs += 1
        return super().submit(job, sequence)


def count_devices(interface):
    """Return how many of gloo's devices there are with one group, and with four."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    counts = []
    group = join(timeout_s=20, device="cpu", transport="network")
    for name in ("", "a", "b", "c"):
        KEPT.append(group.duplicate(name) if name else group)
        total = torch.ones(2)
        KEPT[-1].all_reduce(total, name="ones").wait()
        assert total.tolist() == [2.0, 2.0]
        descriptors = [entry.path for entry in os.scandir("/proc/self/fd")]
        counts.append(
            sum(os.readlink(path) == "anon_inode:[eventpoll]" for path in descriptors if os.path.lexists(path))
        )
    group.all_reduce(torch.zeros(1), name="end").wait()
    return counts


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=[pytest.mark.slow, pytest.mark.campaign]), 3],
    ids=["2 ranks", "3 ranks"],
)
def contract(request):
    return run_processes(request.param, keep_contract)


def test_keeps_the_contract(contract):
    for result in contract:
        assert result.exit_code == 0, result.output
        assert result.value["names"] == [check.__name__ for check in GROUP_CHECKS]
        assert result.value["kind"] == "TorchGroup"


@pytest.mark.parametrize("interface", ["", "lo", "lo,lo"])
def test_groups_share_the_devices_of_their_process(interface):
    num_devices = len(interface.split(","))
    for result in run_processes(2, count_devices, {"interface": interface}):
        assert result.exit_code == 0, result.output
        assert len(set(result.value)) == 1, "each device wakes a hundred times a second"
        assert result.value[0] >= num_devices


def test_a_call_that_the_backend_refuses_is_no_loss_of_peers(contract):
    """A new start cannot cure it, so it must not count as what one can cure."""
    for result in contract:
        refused = result.value["refused"]
        assert refused is not None
        assert not refused["is_communication"], refused["message"]


def test_a_message_that_does_not_come_is_told_with_both_its_ends(contract):
    late = contract[0].value["late"]
    assert late["error"] == "PeerTimeoutError"
    assert late["message"].startswith(
        "message 'bucket 3' from rank 1 to rank 0 must finish within 0.2 s, but did not: "
    )
    assert "rank 1 (host " in late["message"]


def fail_and_stay():
    """Rank 1 stops with an error, and stays until the others have noticed: 0 waits for it in a duplicate, 2 for 0."""
    group = join(timeout_s=30, device="cpu", transport="network")
    KEPT.append(group)
    duplicate = group.duplicate("messages")
    if group.rank == 1:
        group.close(ValueError("the disk is full"))
        group.store.wait(["rank 0 noticed", "rank 2 noticed"], timedelta(seconds=25))
        return None
    try:
        if group.rank == 0:
            duplicate.receive(torch.ones(3), 1, tag=0, name="message").wait()
        else:
            group.receive(torch.ones(3), 0, tag=0, name="message").wait()
    except CommunicationError as error:
        group.close(error)
        group.store.set(f"rank {group.rank} noticed", "")
        group.store.wait(["rank 0 noticed", "rank 2 noticed"], timedelta(seconds=25))
        return {"message": str(error)}
    return None


def test_who_stops_with_an_error_need_not_end_for_the_others_to_notice():
    results = run_processes(3, fail_and_stay)
    assert results[1].exit_code == 0, results[1].output
    for rank in (0, 2):
        assert results[rank].exit_code == 0, results[rank].output
        blamed = results[rank].value["message"].partition(" lost its peers: ")[2]
        assert blamed.startswith("rank 1 "), blamed
        assert "ValueError: the disk is full" in blamed


def send_without_end():
    """Send more and more to rank 1, which receives for a moment and is gone in the middle of a message."""
    group = join(timeout_s=30, device="cpu", transport="network")
    KEPT.append(group)
    group.barrier()
    if group.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for number in range(10**6):
            operation = group.send if group.rank == 0 else group.receive
            works = [operation(torch.zeros(10**6), 1 - group.rank, tag=tag, name=f"{number}") for tag in range(8)]
            for work in works:
                work.wait()
    except CommunicationError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return None


def test_a_sender_does_not_wait_for_a_receiver_that_is_gone():
    sender, _ = run_processes(2, send_without_end)
    assert sender.exit_code == 0, sender.output
    assert " from rank 0 to rank 1 lost its peers: rank 1 (host" in sender.value["message"]
    assert sender.value["error"] == "CommunicationError", "before time is out"


def run_another():
    """Rank 1 runs another operation than the others, each of which waits until time is out."""
    group = join(timeout_s=20, device="cpu", transport="network")
    KEPT.append(group)
    group.barrier()
    group.timeout_s = 2.0
    tensor = torch.ones(1000)
    try:
        if group.rank == 1:
            group.broadcast(tensor, source=1, name="parameters").wait()
        group.all_reduce(tensor, name="sum").wait()
    except PacelineError as error:
        group.close(error)
        return {"error": type(error).__name__, "message": str(error)}
    return None


def test_ranks_that_run_different_operations_are_named_with_them():
    first, other = run_processes(2, run_another)
    for rank in (first, other):
        assert rank.exit_code == 0, rank.output
        assert rank.value["error"] == "MismatchError", rank.value
        assert (
            "rank 0 runs 'sum' (all_reduce of 1000 torch.float32), rank 1 runs 'parameters' (broadcast of "
            in (rank.value["message"])
        )


def run_steps(script, timeout_s, keep_group=True):
    """Sum at every step, within `timeout_s` from the one on in which something is to happen; tell what went wrong."""
    group = join(timeout_s=20, device="cpu", transport="network")
    if keep_group:
        KEPT.append(group)
    try:
        for step in range(1, 4):
            if step == min((fault["step"] for fault in script), default=0):
                group.timeout_s = timeout_s
            faults.strike(script, rank=group.rank, step=step)
            group.all_reduce(torch.ones(1000), name=f"sum of step {step}").wait()
    except CommunicationError as error:
        group.close(error)
        return {"error": type(error).__name__, "message": str(error), "epoch": group.epoch}
    group.close()
    return {"error": None, "epoch": group.epoch}


def run_script(num_ranks, script, *, timeout_s, keep_group=True, **options):
    script = [fault.model_dump() for fault in script]
    arguments = {"script": script, "timeout_s": timeout_s, "keep_group": keep_group}
    return run_processes(num_ranks, run_steps, arguments, **options)


def test_a_late_rank_is_named_with_the_operation_it_is_behind_in():
    first, late, other = run_script(3, [faults.delay(rank=1, step=3, duration_s=4)], timeout_s=1)
    for waiting in (first, other):
        assert waiting.value["error"] == "PeerTimeoutError", waiting.output
        head, _, blamed = waiting.value["message"].partition(", but did not: ")
        assert head == f"operation 3 'sum of step 3' on rank {waiting.rank} must finish within 1 s"
        assert "is alive but behind: it has begun operation 2 'sum of step 2' and computes" in blamed
        assert blamed.count("is alive but behind") == 1, "only the late rank is behind"
        assert blamed.startswith("rank 1 "), f"the late rank comes first, not another that waits for it: {blamed}"
    assert late.value["error"] is not None


def test_a_killed_rank_is_named_before_time_is_out():
    first, killed, other = run_script(3, [faults.kill(rank=1, step=2)], timeout_s=30)
    assert killed.exit_code == -9
    for survivor in (first, other):
        assert survivor.value["error"] == "CommunicationError", survivor.output
        head, _, blamed = survivor.value["message"].partition(" lost its peers: ")
        assert head == f"operation 2 'sum of step 2' on rank {survivor.rank}"
        assert blamed.startswith("rank 1 "), f"the dead rank comes first: {blamed}"
        assert blamed.count("is dead or frozen: its last heartbeat came") == 1, "survivors are not called dead"


def test_a_frozen_rank_is_named_when_time_is_out():
    first, frozen = run_script(2, [faults.freeze(rank=1, step=2)], timeout_s=1, wait_for=[0])
    assert frozen.exit_code is None, "it was still there"
    assert first.value["error"] == "PeerTimeoutError", first.output
    assert "rank 1 (host " in first.value["message"]
    assert "is dead or frozen" in first.value["message"]


def test_a_frozen_rank_does_not_keep_the_others_from_ending():
    freeze = [faults.freeze(rank=1, step=2)]
    first, _ = run_script(2, freeze, timeout_s=1, wait_for=[0], keep_group=False)
    assert first.exit_code == 0, f"rank 0 did not get past letting go of its group: {first}"


def test_restarted_ranks_meet_again_over_the_store_of_the_dead():
    store = open_store()
    epochs = []
    for num_ranks, script in [(2, [faults.kill(rank=0, step=1)]), (3, []), (2, [])]:
        results = run_script(num_ranks, script, timeout_s=10, store=store)
        values = [result.value for result in results if result.value is not None]
        epochs.append({value["epoch"] for value in values})
        if not script:
            assert [value["error"] for value in values] == [None] * num_ranks, results
    assert [len(found) for found in epochs] == [1, 1, 1], "all ranks of a start are in one epoch"
    assert sorted(set().union(*epochs)) == [1, 2, 3]


def lose_the_store():
    """Rank 0 holds the store itself and freezes, as a whole host may; rank 1 must still find an end."""
    group = join(timeout_s=20, device="cpu", transport="network")
    KEPT.append(group)
    group.barrier()
    group.timeout_s = 1
    faults.strike([faults.freeze(rank=0, step=1)], rank=group.rank, step=1)
    try:
        group.barrier()
    except CommunicationError as error:
        group.close(error)
        return str(error)
    return None


@pytest.mark.slow
def test_a_frozen_store_keeps_nobody_waiting():
    store = open_store()
    port = store.port
    del store  # its port is free now; rank 0 takes it
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    _, waiting = run_processes(2, lose_the_store, environment=environment, wait_for=[1])
    assert waiting.exit_code == 0, f"rank 1 still waits: {waiting}"
    assert "'barrier'" in waiting.value


def test_several_sends_are_awaited_by_one_job():
    results = run_processes(2, await_sends)
    assert [tuple(result.value) for result in results] == [([10.0, 11.0, 12.0], 1), ([0.0, 1.0, 2.0], 1)]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="sockets are listed by Linux")
def test_connections_are_at_the_address_that_the_launcher_gives(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv(torch_group.HOST_ADDRESS, "127.0.0.2")
    devices = torch_group._gloo_devices.__wrapped__(os.getpid())
    assert " 0200007F:" in Path("/proc/self/net/tcp").read_text(), "127.0.0.2 must be listened at"
    del devices


def test_who_comes_alone_has_the_time_of_an_operation():
    with pytest.raises(CommunicationError, match=r"must connect with ranks 1 within 0\.3 s, but did not"):
        torch_group.TorchGroup(dist.HashStore(), 0, 2, device=torch.device("cpu"), timeout_s=0.3)
