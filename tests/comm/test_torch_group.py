import time

import pytest
import torch

from paceline.comm import join
from paceline.errors import CommunicationError
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
    group = join(timeout_s=20, device="cpu")
    names = check_group(group)
    refused = refuse_dtype(group)
    check_words_of_failure(group)
    return {"names": names, "refused": refused, "kind": type(group).__name__}


def refuse_dtype(group):
    """Return what is raised for a tensor that gloo cannot sum."""
    try:
        group.all_reduce(torch.ones(3, dtype=torch.int16), name="int16").wait()
    except Exception as error:
        return {"is_communication": isinstance(error, CommunicationError), "message": str(error)}
    return None


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def contract(request):
    return run_processes(request.param, keep_contract)


def test_keeps_the_contract(contract):
    for result in contract:
        assert result.exit_code == 0, result.output
        assert result.value["names"] == [check.__name__ for check in GROUP_CHECKS]
        assert result.value["kind"] == "TorchGroup"


def test_a_call_that_the_backend_refuses_is_no_loss_of_peers(contract):
    """A new start cannot cure it, so it must not count as what one can cure."""
    for result in contract:
        refused = result.value["refused"]
        assert refused is not None
        assert not refused["is_communication"], refused["message"]


def run_steps(script, timeout_s, keep_group=True):
    """Sum at every step, and tell what went wrong and after how long."""
    group = join(timeout_s=timeout_s, device="cpu")
    if keep_group:
        KEPT.append(group)
    waited_s = 0.0
    try:
        for step in range(1, 4):
            faults.strike(script, rank=group.rank, step=step)
            began_s = time.monotonic()
            group.all_reduce(torch.ones(1000), name=f"sum of step {step}").wait()
    except CommunicationError as error:
        waited_s = time.monotonic() - began_s
        group.close(error)
        return {
            "error": type(error).__name__,
            "message": str(error),
            "waited_s": waited_s,
            "epoch": group.epoch,
        }
    group.close()
    return {"error": None, "epoch": group.epoch}


def run_script(num_ranks, script, *, timeout_s, keep_group=True, give_up_s=40, **options):
    script = [fault.model_dump() for fault in script]
    arguments = {"script": script, "timeout_s": timeout_s, "keep_group": keep_group}
    return run_processes(num_ranks, run_steps, arguments, timeout_s=give_up_s, **options)


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


def test_a_killed_rank_is_named_long_before_the_time_out():
    timeout_s = 30
    first, killed, other = run_script(3, [faults.kill(rank=1, step=2)], timeout_s=timeout_s)
    assert killed.exit_code == -9
    for survivor in (first, other):
        assert survivor.value["error"] == "CommunicationError", survivor.output
        assert survivor.value["waited_s"] < timeout_s / 3
        head, _, blamed = survivor.value["message"].partition(" lost its peers: ")
        assert head == f"operation 2 'sum of step 2' on rank {survivor.rank}"
        assert blamed.startswith("rank 1 "), f"the dead rank comes first: {blamed}"
        assert blamed.count("is dead or frozen: it was last heard of") == 1, "survivors are not called dead"


def test_a_frozen_rank_is_named_when_time_is_out():
    first, frozen = run_script(2, [faults.freeze(rank=1, step=2)], timeout_s=1, wait_for=[0])
    assert frozen.exit_code is None, "it was still there"
    assert first.value["error"] == "PeerTimeoutError", first.output
    assert "rank 1 (host " in first.value["message"]
    assert "is dead or frozen" in first.value["message"]


def test_a_frozen_rank_does_not_keep_the_others_from_ending():
    freeze = [faults.freeze(rank=1, step=2)]
    first, _ = run_script(2, freeze, timeout_s=1, wait_for=[0], give_up_s=10, keep_group=False)
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
    group = join(timeout_s=1, device="cpu")
    KEPT.append(group)
    faults.strike([faults.freeze(rank=0, step=1)], rank=group.rank, step=1)
    try:
        group.barrier()
    except CommunicationError as error:
        group.close(error)
        return str(error)
    return None


def test_a_frozen_store_keeps_nobody_waiting():
    store = open_store()
    port = store.port
    del store  # its port is free now; rank 0 takes it
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    _, waiting = run_processes(2, lose_the_store, environment=environment, wait_for=[1], timeout_s=10)
    assert waiting.exit_code == 0, f"rank 1 still waits: {waiting}"
    assert "'barrier'" in waiting.value
