"""Stale-synchronous parallel: equal to synchronous SGD at bound 0, and never staler than the bound."""

import threading
import time

import pytest
import torch
from serving import ByHand
from stepping import make_linear, make_sgd, run_step, train

from paceline.comm import LocalGroup
from paceline.comm.rpc import NOTHING, RpcHeader
from paceline.errors import CommunicationError
from paceline.replica.replica import Replica
from paceline.sync import SSP
from paceline.sync.parameter_server.server import RequestKind


def _with_momentum(module):
    return make_sgd(module, momentum=0.9)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("make", [make_sgd, _with_momentum], ids=["sgd", "momentum"])
def test_bound_0_is_every_step(make, servers):
    def weigh(rank, step):
        return 1.0 + rank

    ours = train(3, SSP(staleness=0, num_servers=servers), 8, weigh, make)
    synchronous = train(3, "every_step", 8, weigh, make)
    torch.testing.assert_close(ours, synchronous, rtol=1e-12, atol=1e-12)


def test_bound_0_is_every_step_where_parts_change_and_some_have_nothing():
    def weigh(rank, step):
        return float((rank + 2 * step) % 3)

    ours = train(3, SSP(staleness=0), 8, weigh)
    torch.testing.assert_close(ours, train(3, "every_step", 8, weigh), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 3])
def test_one_worker_is_its_own_optimizer(staleness):
    def make(module):
        return torch.optim.AdamW(module.parameters(), lr=0.05)

    ours = train(1, SSP(staleness=staleness), 8, make_optimizer=make)
    torch.testing.assert_close(ours, train(1, "every_step", 8, make_optimizer=make), rtol=1e-12, atol=1e-12)


def test_a_read_sees_what_it_must_and_its_own():
    by_hand = ByHand(SSP(staleness=1), num_workers=2, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 0.0])  # clock 0: nothing of the other is needed
    torch.testing.assert_close(by_hand.have[0], torch.tensor([0.5, 0.0], dtype=torch.float64))
    pull = by_hand.push(0, [1.0, 0.0])
    assert not by_hand.may_pull(0), "the other's update of clock 0 is missing"
    by_hand.swap(1, [0.0, 1.0])
    assert by_hand.may_pull(0)
    pull()
    torch.testing.assert_close(by_hand.have[0], torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert by_hand.have[1].tolist() == [1.0, 0.5], "later updates are seen as they have come"


def test_parts_are_of_the_weight_of_a_complete_step():
    by_hand = ByHand(SSP(staleness=2), num_workers=2, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 0.0], weight=3.0)
    by_hand.swap(1, [0.0, 1.0], weight=1.0)  # step 0 is complete: its weight is 4
    before = by_hand.x.clone()
    by_hand.swap(0, [1.0, 0.0], weight=3.0)
    by_hand.swap(1, [0.0, 1.0], weight=1.0)
    torch.testing.assert_close(by_hand.x - before, torch.tensor([0.75, 0.25], dtype=torch.float64))


def _pause(by_hand, *workers):
    """Stop waiting for workers, as before a checkpoint."""
    for worker in workers:
        by_hand.server.handle(worker, RpcHeader(RequestKind.AWAY), NOTHING)


def _resume(by_hand, *workers):
    for worker in workers:
        reply = by_hand.server.handle(worker, RpcHeader(RequestKind.BACK, by_hand.clocks[worker]), NOTHING)()
        by_hand.clocks[worker] = reply[0].clock


@pytest.mark.parametrize("num_complete", [0, 1], ids=["before a complete step", "after one"])
def test_steps_of_one_worker_before_a_checkpoint_say_nothing_of_the_weight_of_a_step(num_complete):
    by_hand = ByHand(SSP(staleness=2), num_workers=2, start=(0.0, 0.0))
    for _ in range(num_complete):
        by_hand.swap(0, [1.0, 0.0])
        by_hand.swap(1, [0.0, 1.0])
    _pause(by_hand, 1)
    by_hand.swap(0, [1.0, 0.0])  # alone: the samples before the checkpoint are all handed out
    _pause(by_hand, 0)
    _resume(by_hand, 0, 1)
    by_hand.swap(0, [1.0, 0.0])
    by_hand.swap(1, [0.0, 1.0])
    expected = torch.tensor([num_complete + 2, num_complete + 1], dtype=torch.float64) / 2
    torch.testing.assert_close(by_hand.x, expected)


def test_a_step_after_a_loss_has_the_weight_of_the_living():
    by_hand = ByHand(SSP(staleness=2), num_workers=3, start=(0.0, 0.0))
    for worker in range(3):
        by_hand.swap(worker, [0.0, 0.0])
    by_hand.server.drop_caller(2, CommunicationError("struck by lightning"))
    for worker in range(2):
        by_hand.swap(worker, [0.0, 0.0])
    by_hand.swap(0, [1.0, 0.0])
    assert by_hand.x.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_gets_further_ahead_than_the_bound(staleness):
    """Worker 1 stands still until another is as far ahead as can be; whoever reads, reads within the bound."""
    done = [0, 0, 0]
    leads = []

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=SSP(staleness=staleness))
        for step in range(12):
            deadline_s = time.monotonic() + 30
            while group.rank == 1 and step == 6 and staleness not in leads:
                assert time.monotonic() < deadline_s, "the fast ones are let ahead as far as the bound"
                time.sleep(0.001)
            if group.rank == 1 and step == 6:
                time.sleep(0.05)  # nor further, were it let
            done[group.rank] = step  # its updates up to the step before are in
            run_step(replica, step)
            leads.append(step + 1 - min(done) - 1)
        replica.close()

    LocalGroup.run(3, work)
    assert max(leads) == staleness


def test_a_dead_worker_does_not_freeze_the_clock():
    reached = []

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=SSP(staleness=1))
        for step in range(12):
            if (group.rank, step) == (2, 3):
                raise RuntimeError("struck by lightning")
            run_step(replica, step)
        reached.append(group.rank)

    with pytest.raises(RuntimeError, match="lightning"):
        LocalGroup.run(3, work)
    assert sorted(reached) == [0, 1]


def test_a_worker_without_samples_is_waited_for_by_nobody():
    """The last samples go to whoever is fast; who gets none must not hold up those who do."""
    position = iter(range(0, 10**6, 4))
    lock = threading.Lock()
    noted = []

    def take(num_samples):
        with lock:
            start = next(position)
        return start, start + num_samples

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=SSP(staleness=0))
        replica.dispatcher.set_source(take, lambda *interval: noted.append(interval))
        for boundary in (40, 60):  # 10 intervals, and then 5, for 3 workers
            replica.dispatcher.set_boundary(boundary)
            while (interval := replica.dispatcher.claim(4)) is not None:
                run_step(replica, interval[0])
                replica.dispatcher.ack(interval)
            with replica.consensus():
                pass
        replica.close()

    LocalGroup.run(3, work)
    assert sorted(noted)[:10] == [(start, start + 4) for start in range(0, 40, 4)]


def test_after_a_barrier_all_step_together_again():
    ours, synchronous = [], []

    def work(group, sync, seen):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=sync)
        for step in range(6):
            with replica.consensus():
                pass
            run_step(replica, step)
        if group.rank == 0:
            seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
        replica.close()

    LocalGroup.run(3, lambda group: work(group, SSP(staleness=0), ours))
    LocalGroup.run(3, lambda group: work(group, "every_step", synchronous))
    torch.testing.assert_close(ours[0], synchronous[0], rtol=1e-12, atol=1e-12)
