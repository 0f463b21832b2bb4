"""Local SGD that begins late, that has hosts, and that chooses its period."""

import functools

import pytest
import torch
from stepping import descend, flatten, make_linear, make_sgd, run_step, train

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.comm.hosts import find_hosts
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import (
    AdaptiveLocalSGD,
    EveryStep,
    HierarchicalLocalSGD,
    LocalSGD,
    PostLocalSGD,
    adaptive_local_sgd,
    periodic,
)
from paceline.sync.adaptive_local_sgd import MeasuredSyncSchedule
from scripted_time import ScriptedTime


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


def test_post_local_is_every_step_before_and_local_after():
    every, local = EveryStep(), LocalSGD(period=3)
    assert torch.equal(train(3, PostLocalSGD(period=3, synchronous_steps=9), 8, uneven), train(3, every, 8, uneven))
    assert torch.equal(train(3, PostLocalSGD(period=3, synchronous_steps=0), 8, uneven), train(3, local, 8, uneven))


def test_post_local_changes_over_at_its_start():
    seen = train(3, PostLocalSGD(period=3, synchronous_steps=5), 11, uneven)
    assert torch.equal(seen[:, :5], train(3, EveryStep(), 5, uneven))
    common = seen[0, 4]
    for first in (5, 8):
        steps = range(first, first + 3)
        weights = [sum(uneven(rank, step) for step in steps) for rank in range(3)]
        ends = [descend(common, rank, steps) for rank in range(3)]
        common = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        assert not torch.equal(seen[0, first + 1], seen[1, first + 1])
        for rank in range(3):
            torch.testing.assert_close(seen[rank, first + 2], common, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("stop_at", [3, 4, 5, 7])
def test_post_local_goes_on_bit_for_bit_before_and_after_its_start(stop_at, tmp_path):
    rule = PostLocalSGD(period=3, synchronous_steps=4)

    def fail(path, reason):
        raise AssertionError(f"{path} is damaged: {reason}")

    def work(group, is_stopped):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module, 0.9), group=group, sync=rule)
        with CheckpointStore(tmp_path) as store:
            for step in range(9):
                if is_stopped and step == stop_at:
                    tensors, document = capture(replica)
                    if group.rank == 0:
                        store.save(tensors, document, step)
                    replica.close()
                    module = make_linear(seed=3, dtype=torch.float32)
                    replica = Replica(module, make_sgd(module, 0.9), group=group, sync=rule)
                    restore(store.find_newest_valid(fail) if group.rank == 0 else None, replica)
                run_step(replica, step, uneven(group.rank, step))
        replica.close()
        return flatten(module)

    straight = LocalGroup.run(3, lambda group: work(group, False))
    resumed = LocalGroup.run(3, lambda group: work(group, True))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_hosts_of_one_worker_make_local_sgd(size):
    hierarchical = HierarchicalLocalSGD(period=3, host_size=1)
    assert torch.equal(train(size, hierarchical, 8, uneven), train(size, LocalSGD(period=3), 8, uneven))


def test_one_host_makes_every_step():
    for rule in (HierarchicalLocalSGD(period=3), HierarchicalLocalSGD(period=3, host_size=8)):
        hosts = train(3, rule, 8, uneven)
        torch.testing.assert_close(hosts, train(3, EveryStep(), 8, uneven), rtol=1e-13, atol=1e-14)


def test_workers_of_a_host_are_one_worker_with_the_samples_of_all():
    """Five workers on hosts of two, the last one alone."""
    seen = train(5, HierarchicalLocalSGD(period=3, host_size=2), 6, uneven)
    hosts = [[0, 1], [2, 3], [4]]
    for step in range(6):
        for ranks in hosts:
            assert all(torch.equal(seen[rank, step], seen[ranks[0], step]) for rank in ranks)
    assert not torch.equal(seen[0, 1], seen[2, 1])
    means = []
    for ranks in hosts:
        where = flatten(make_linear())
        for step in range(3):  # SGD is linear in the gradients
            weights = [uneven(rank, step) for rank in ranks]
            ends = [descend(where, rank, [step]) for rank in ranks]
            where = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        means.append((sum(uneven(rank, step) for rank in ranks for step in range(3)), where))
    common = sum(weight * where for weight, where in means) / sum(weight for weight, _ in means)
    for rank in range(5):
        torch.testing.assert_close(seen[rank, 2], common, rtol=1e-12, atol=1e-13)


def test_threads_of_a_process_share_its_host():
    assert LocalGroup.run(3, find_hosts) == [[[0, 1, 2]]] * 3


@pytest.mark.parametrize(
    ("period", "step_s", "exchange_s", "chosen"),
    [
        (8, 1.0, 1.0, 9),  # 1 / (1 + 9) is a tenth
        (8, 1.0, 0.1, 4),  # half as long at most
        (8, 1.0, 9.0, 16),  # twice as long at most
        (1, 1.0, 0.0, 1),
        (60, 0.0, 1.0, 100),
    ],
)
def test_the_period_is_the_shortest_that_keeps_the_share(period, step_s, exchange_s, chosen):
    rule = AdaptiveLocalSGD(communication_share=0.1, max_period=100)
    assert rule.choose_period(period, step_s, exchange_s) == chosen


def test_all_workers_decide_by_the_slowest_step_and_the_shortest_wait():
    """The clocks are scripted: rank 1 computes 3 s a step, the others 1 s and wait for it; the wire takes 2 s."""
    rule = AdaptiveLocalSGD(period=4, communication_share=0.25, interval_s=0.0)

    def work(group):
        now_s = [100.0 * group.rank]
        schedule = MeasuredSyncSchedule(rule, clock=lambda: now_s[0])
        sync_steps = []
        for number in range(30):
            now_s[0] += 3.0 if group.rank == 1 else 1.0
            if schedule.is_due(number):
                waited_s = 2.0 + (0.0 if group.rank == 1 else 2.0 * schedule.period)
                now_s[0] += waited_s
                schedule.record(number, waited_s, group)
                sync_steps.append(number)
                if number == 5:  # a new start goes on with what was decided
                    state = schedule.state()
                    schedule = MeasuredSyncSchedule(rule, clock=lambda: now_s[0])
                    schedule.load_state(state)
        return sync_steps

    sync_steps = LocalGroup.run(3, work)
    # 2 / (2 + 2 * 3) is a quarter: from 4 the period becomes 2.
    assert sync_steps == [list(range(3, 30, 2))] * 3


def test_a_slow_network_makes_the_period_longer(monkeypatch):
    """By scripted clocks: a step takes 1 ms, an exchange 200 ms."""
    scripted = ScriptedTime()
    all_reduce = LocalGroup.all_reduce

    def slow(self, tensor, *, name):
        if name.startswith("parameters"):
            scripted.sleep(0.2)
        return all_reduce(self, tensor, name=name)

    monkeypatch.setattr(LocalGroup, "all_reduce", slow)
    monkeypatch.setattr(periodic, "time", scripted)
    schedule = functools.partial(adaptive_local_sgd.MeasuredSyncSchedule, clock=scripted.perf_counter)
    monkeypatch.setattr(adaptive_local_sgd, "MeasuredSyncSchedule", schedule)
    rule = AdaptiveLocalSGD(period=1, communication_share=0.5, interval_s=0.0)

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        sent = []
        for step in range(12):
            scripted.sleep(0.001)
            sent.append(run_step(replica, step).wire_bytes > 0)
        _, shared = replica.state.sync_state()
        replica.close()
        return sent, shared["sync_schedule"].tolist()

    (sent, schedule), other = LocalGroup.run(2, work)
    assert other == (sent, schedule)
    assert [step for step, is_sent in enumerate(sent) if is_sent] == [0, 2, 6]
    assert schedule == [8, 14]


def test_a_period_that_is_never_changed_is_local_sgd():
    adaptive = AdaptiveLocalSGD(period=3, interval_s=3600.0)
    assert torch.equal(train(3, adaptive, 8, uneven), train(3, LocalSGD(period=3), 8, uneven))
