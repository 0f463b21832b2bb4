"""Asynchronous SGD: what a delay is, what makes up for it, and that nobody is waited for."""

import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from serving import ByHand, paper
from stepping import descend, flatten, make_linear, make_samples, make_sgd, run_step, train

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.comm.rpc import NOTHING, RpcHeader
from paceline.errors import CommunicationError, PeerTimeoutError, SettingsError
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.replica.survivors import stand_alone
from paceline.sync import ASGD
from paceline.sync.farewells import Farewells, read_lost
from paceline.sync.parameter_server.blocks import PackedTensors, copy_all
from paceline.sync.parameter_server.server import RequestKind

MITIGATED = {
    "by default": ASGD(),
    "plain": paper(),
    "scaled": paper(scale_rate=True),
    "compensated": paper(compensation=0.5),
    "adaptive": paper(compensation=0.5, compensation_decay=0.9),
    "corrected": paper(correct_momentum=True),
    "all": paper(scale_rate=True, compensation=2.0, compensation_decay=0.5, correct_momentum=True),
}
SOFT = paper(pushes_per_step=3)


@pytest.mark.parametrize("name", sorted(MITIGATED))
def test_one_worker_is_sgd_to_the_last_bit_with_every_mitigation(name):
    def make(module):
        return make_sgd(module, momentum=0.9)

    ours = train(1, MITIGATED[name], 8, make_optimizer=make)
    assert torch.equal(ours, train(1, "every_step", 8, make_optimizer=make))


def test_one_worker_is_adamw_too_and_keeps_its_groups():
    def make(module):
        groups = [{"params": [module.weight], "weight_decay": 0.1}, {"params": [module.bias], "lr": 0.3}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    assert torch.equal(train(1, "asgd", 8, make_optimizer=make), train(1, "every_step", 8, make_optimizer=make))


def test_a_delay_counts_the_updates_of_others_between_pull_and_push():
    by_hand = ByHand(paper(), num_workers=3)
    for worker, delay in [(0, 0), (0, 0), (1, 2), (1, 0), (2, 4), (0, 3)]:
        before = by_hand.shard.delays.copy()
        by_hand.swap(worker, [1.0, 1.0])
        assert by_hand.shard.delays - before == {delay: 1}
    assert by_hand.shard.version == 6


def test_a_push_without_samples_changes_nothing():
    by_hand = ByHand(paper(), momentum=0.9)
    by_hand.swap(0, [1.0, 1.0])
    before = by_hand.x.clone()
    by_hand.swap(1, [5.0, 5.0], weight=0.0)
    assert torch.equal(by_hand.x, before)
    assert torch.equal(by_hand.have[1], before)
    assert by_hand.shard.version == 1


def test_scaled_rates_divide_by_one_plus_the_delay():
    by_hand = ByHand(paper(scale_rate=True), learning_rate=0.5, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 0.0])
    by_hand.swap(0, [1.0, 0.0])
    by_hand.swap(1, [0.0, 1.0])  # two updates came between
    torch.testing.assert_close(by_hand.x, torch.tensor([-1.0, -0.5 / 3], dtype=torch.float64))


def test_several_pushes_make_one_step_with_their_mean_whoever_they_are_of():
    by_hand = ByHand(SOFT, learning_rate=0.5, start=(0.0, 0.0))
    for worker, gradient in [(0, [1.0, 0.0]), (0, [2.0, 0.0]), (1, [0.0, 6.0])]:
        assert torch.equal(by_hand.x, torch.zeros(2, dtype=torch.float64))
        by_hand.swap(worker, gradient)
    torch.testing.assert_close(by_hand.x, torch.tensor([-0.5, -1.0], dtype=torch.float64))
    for worker in (0, 1):
        by_hand.swap(worker, [3.0, 3.0])
    assert by_hand.shard.version == 1
    assert by_hand.shard.delays == {0: 4, 1: 1}, "worker 0 pushed once before it had the step"


def test_a_mean_of_scaled_pushes_divides_each_by_one_plus_its_delay():
    by_hand = ByHand(paper(pushes_per_step=2, scale_rate=True), learning_rate=1.0, start=(0.0, 0.0))
    by_hand.swap(0, [0.0, 0.0])
    by_hand.swap(0, [0.0, 0.0])
    by_hand.swap(0, [1.0, 0.0])
    by_hand.swap(1, [0.0, 1.0])  # one step came between
    torch.testing.assert_close(by_hand.x, torch.tensor([-0.5, -0.25], dtype=torch.float64))


def test_a_mean_of_scaled_pushes_is_a_step_at_their_mean_rate_for_optimizers_that_divide_by_gradients_too():
    def make(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, betas=(0.0, 0.0), eps=0.0)

    by_hand = ByHand(paper(pushes_per_step=2, scale_rate=True), make=make, learning_rate=1.0, start=(0.0, 0.0))
    for worker in (0, 0, 0, 1):
        by_hand.swap(worker, [3.0, -3.0])  # the last comes after a step: its delay is 1
    torch.testing.assert_close(by_hand.x, torch.tensor([-1.75, 1.75], dtype=torch.float64))


def test_what_waits_for_more_pushes_is_not_lost_when_no_more_can_come():
    by_hand = ByHand(SOFT, learning_rate=0.5, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 2.0])
    by_hand.swap(1, [3.0, 4.0])
    for worker in (0, 1):
        assert torch.equal(by_hand.x, torch.zeros(2, dtype=torch.float64))
        by_hand.server.handle(worker, RpcHeader(RequestKind.AWAY), NOTHING)()
    torch.testing.assert_close(by_hand.x, torch.tensor([-1.0, -1.5], dtype=torch.float64))


def test_pushes_of_as_many_workers_are_steps_of_synchronous_sgd_where_nobody_is_ahead():
    """Workers that push in turn all see the same parameters but for the last of a step, so here gradients are given."""
    soft, plain = ByHand(paper(pushes_per_step=2), momentum=0.9), ByHand(paper(), num_workers=1, momentum=0.9)
    for step in range(4):
        gradients = torch.tensor([[step, 1.0], [2.0, step]], dtype=torch.float64)
        for worker in (0, 1):
            soft.swap(worker, gradients[worker])
        plain.swap(0, gradients.mean(0))
    torch.testing.assert_close(soft.x, plain.x, rtol=1e-14, atol=0)


def test_compensation_adds_what_the_gradient_missed_to_first_order():
    by_hand = ByHand(paper(compensation=0.7), learning_rate=0.5)
    old = by_hand.x.clone()
    by_hand.swap(0, [1.0, -3.0])
    drifted = by_hand.x.clone()
    gradient = torch.tensor([2.0, 0.5], dtype=torch.float64)
    by_hand.swap(1, gradient)
    expected = drifted - 0.5 * (gradient + 0.7 * gradient**2 * (drifted - old))
    torch.testing.assert_close(by_hand.x, expected, rtol=1e-14, atol=0)


def test_adaptive_compensation_divides_by_the_root_of_the_mean_square():
    by_hand = ByHand(paper(compensation=0.7, compensation_decay=0.5), learning_rate=0.5)
    old = by_hand.x.clone()
    first, second = torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=torch.float64)
    by_hand.swap(0, first)
    drifted = by_hand.x.clone()
    by_hand.swap(1, second)
    mean = 0.25 * first**2 + 0.5 * second**2
    expected = drifted - 0.5 * (second + 0.7 * second**2 / (mean + 1e-7).sqrt() * (drifted - old))
    torch.testing.assert_close(by_hand.x, expected, rtol=1e-14, atol=0)


def test_a_server_goes_on_with_the_mean_squares_it_saved():
    def start():
        return ByHand(paper(compensation=0.7, compensation_decay=0.5), learning_rate=0.5)

    straight, resumed = start(), start()
    for by_hand in (straight, resumed):
        by_hand.swap(0, [1.0, -3.0])
    _, saved = resumed.server.handle(0, RpcHeader(RequestKind.SAVE), NOTHING)()
    old, resumed = resumed, start()
    resumed.server.handle(0, RpcHeader(RequestKind.LOAD), saved)
    for worker, tensor in enumerate(old.have):
        packed = PackedTensors(old.shard.blocks)
        copy_all(packed.tensors, [tensor])
        resumed.server.handle(worker, RpcHeader(RequestKind.REPORT), packed.bytes)
    resumed.clocks, resumed.versions = old.clocks, old.versions
    for by_hand in (straight, resumed):
        by_hand.swap(1, [2.0, 0.5])
    assert torch.equal(straight.x, resumed.x)


def test_momentum_is_lowered_by_what_the_mean_delay_adds():
    by_hand = ByHand(paper(correct_momentum=True), momentum=0.9, learning_rate=1.0, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 0.0])
    by_hand.swap(1, [0.0, 0.0])  # delay 1, mean 1/2: implicit momentum 1/3
    torch.testing.assert_close(by_hand.x[0].item(), -1.0 - (0.9 - 1 / 3), rtol=1e-12, atol=0)
    assert by_hand.shard.optimizer.param_groups[0]["momentum"] == 0.9


def test_the_first_of_adams_betas_is_its_momentum():
    def make(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.95))

    by_hand = ByHand(paper(correct_momentum=True), make=make, start=(0.0, 0.0))
    by_hand.swap(0, [1.0, 1.0])
    by_hand.swap(1, [0.0, 0.0])  # delay 1, mean 1/2: implicit momentum 1/3
    [state] = by_hand.shard.optimizer.state.values()
    torch.testing.assert_close(state["exp_avg"], torch.full((2,), 0.1 * (0.9 - 1 / 3), dtype=torch.float64))
    assert by_hand.shard.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValidationError, match="compensation must be more than 0 with compensation_decay"):
        paper(compensation_decay=0.9)
    with pytest.raises(SettingsError, match=r"the optimizer must have momentum with correct_momentum.*Adagrad"):
        train(
            1, paper(correct_momentum=True), 1, make_optimizer=lambda module: torch.optim.Adagrad(module.parameters())
        )
    with pytest.raises(SettingsError, match=r"must have momentum with correct_momentum, but got SGD without"):
        train(1, paper(correct_momentum=True), 1, make_optimizer=lambda module: torch.optim.SGD(module.parameters()))
    with pytest.raises(SettingsError, match=r"num_servers must be at most the number of processes.* got 3 for 2"):
        train(2, paper(num_servers=3), 1)


@pytest.mark.parametrize("pushes_per_step", [1, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_every_push_counts_once_whoever_comes_first(servers, pushes_per_step):
    """With gradients that do not depend on parameters the order cannot matter: all of them are in."""

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        before = flatten(module)
        gradients = []
        for step in range(20):
            gradients.append(torch.full_like(before, 0.1 * group.rank + step))
            replica.backward(sum((p * (0.1 * group.rank + step)).sum() for p in module.parameters()), weight=1.0)
            replica.update()
        with replica.consensus():
            change = flatten(module) - before
            delays = replica._synchroniser.count_delays()
            group.barrier()
        replica.close()
        return torch.stack(gradients).sum(0), change, delays

    rule = paper(num_servers=servers, pushes_per_step=pushes_per_step)
    results = LocalGroup.run(3, work)
    total = sum(gradients for gradients, _, _ in results)
    for _, change, delays in results:
        torch.testing.assert_close(change, -0.05 * total / pushes_per_step, rtol=1e-12, atol=1e-12)
        assert sum(delays.counts.values()) == 60


def _lossy(name):
    density = {"density": 0.3} if name in ("top_k", "random_k") else {}
    return {"name": name, "dense_below": 0, **density}


@pytest.mark.parametrize("name", ["top_k", "int8", "one_bit"])
def test_what_a_codec_holds_back_of_a_push_comes_later(name):
    def work(group):
        module = torch.nn.Linear(40, 30, bias=False)
        torch.nn.init.zeros_(module.weight)
        replica = Replica(module, make_sgd(module, learning_rate=1.0), group=group, sync=paper(codec=_lossy(name)))
        generator = torch.Generator().manual_seed(group.rank)
        total = torch.zeros(30, 40)
        for _ in range(6):
            gradient = torch.randn(30, 40, generator=generator)
            total += gradient
            replica.backward((module.weight * gradient).sum(), weight=1.0)
            replica.update()
        held_back = replica.state.sync_state()[0]
        with replica.consensus():
            arrived = -module.weight.detach().clone()
        replica.close()
        return total, arrived, sum(tensor.reshape(30, 40) for name, tensor in held_back.items() if "worker" in name)

    results = LocalGroup.run(2, work)
    gradients, held_back = sum(result[0] for result in results), sum(result[2] for result in results)
    assert held_back.norm() > 1e-3 * gradients.norm(), "the codec must be lossy here"
    torch.testing.assert_close(results[0][1] + held_back, gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["top_k", "random_k", "int8", "one_bit", "power_sgd", "fp16"])
def test_pulled_differences_lead_to_the_servers_parameters(name):
    by_hand = ByHand(
        paper(pull_codec=_lossy(name)), start=tuple(float(n) for n in torch.randn(3000, generator=_seeded()))
    )
    start = by_hand.have[1]
    by_hand.swap(0, torch.randn(3000, generator=_seeded()))
    for _ in range(60):
        by_hand.swap(1, torch.zeros(3000), weight=0.0)
    mirror = by_hand.server._mirrors[1].known.tensors[0]
    assert torch.equal(mirror, by_hand.have[1]), "the server must know what the worker has, to the last bit"
    assert (by_hand.x - by_hand.have[1]).norm() < 0.1 * (by_hand.x - start).norm()


def _seeded():
    return torch.Generator().manual_seed(1)


def test_a_slow_worker_holds_up_nobody_and_the_fast_one_does_more():
    used = {0: 0, 1: 0}
    position = iter(range(0, 10**6, 4))
    noted = []
    both_have_some = threading.Barrier(2, timeout=30)

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync="asgd")
        replica.dispatcher.set_source(
            lambda n: (start := next(position), start + n), lambda *interval: noted.append(interval)
        )
        replica.dispatcher.set_boundary(100)
        while (interval := replica.dispatcher.claim(4)) is not None:
            if not used[group.rank]:
                both_have_some.wait()
            deadline_s = time.monotonic() + 30
            while group.rank == 1 and used[0] < 2 * used[1] + 2 and len(noted) < 24:
                assert time.monotonic() < deadline_s, "the fast worker waits for the slow one"
                time.sleep(0.001)
            run_step(replica, interval[0])
            used[group.rank] += replica.dispatcher.ack(interval)
        replica.close()

    LocalGroup.run(2, work)
    assert sum(used.values()) == 25
    assert used[0] > used[1] > 0
    assert sorted(noted) == [(start, start + 4) for start in range(0, 100, 4)]


def test_when_a_worker_dies_the_others_stop_and_only_its_samples_are_not_used():
    position = iter(range(0, 10**6, 4))
    noted, has_claimed = [], threading.Event()

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync="asgd")
        replica.dispatcher.set_source(
            lambda n: (start := next(position), start + n), lambda *interval: noted.append(interval)
        )
        replica.dispatcher.set_boundary(10**6)
        if group.rank == 2:
            claimed.append(replica.dispatcher.claim(4))
            has_claimed.set()
            raise RuntimeError("struck by lightning")
        has_claimed.wait()
        while (interval := replica.dispatcher.claim(4)) is not None:
            run_step(replica, interval[0])
            replica.dispatcher.ack(interval)
        stopped[group.rank] = str(replica.dispatcher.lost)
        if (handed_over := stand_alone(replica)) is None:
            return
        with replica.consensus():
            consensus = flatten(module)
        tensors, _ = capture(replica)
        servers = {name: tensors[f"rank0/shared/parameter/{name}"].flatten() for name, _ in module.named_parameters()}
        assert torch.equal(consensus, torch.cat(list(servers.values())))
        saved.append(handed_over.lost_ranks)

    claimed, stopped, saved = [], {}, []
    with pytest.raises(RuntimeError, match="lightning"):
        LocalGroup.run(3, work)
    assert stopped == dict.fromkeys((0, 1), "rank 2 is lost, so that all others stop")
    assert saved == [[2]], "by the first worker alone"
    assert not set(claimed) & set(noted)
    used_up = next(position)
    assert sorted([*noted, *claimed]) == [(start, start + 4) for start in range(0, used_up, 4)]


def test_a_dead_server_is_an_error_that_names_it():
    told = []
    others_told = threading.Barrier(2, timeout=30)

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=paper(num_servers=2))
        run_step(replica, 0)
        group.barrier()
        if group.rank == 1:
            raise RuntimeError("struck by lightning")
        try:
            for step in range(1, 1000):
                run_step(replica, step)
        except CommunicationError as error:
            told.append(str(error))
            others_told.wait()  # or the second would hear of the first instead

    with pytest.raises(RuntimeError, match="lightning"):
        LocalGroup.run(3, work)
    assert len(told) == 2
    assert all("the server on rank 1 is lost" in words for words in told)


def test_a_request_to_stop_reaches_all_and_leaves_no_sample_out():
    position = iter(range(0, 10**6, 4))
    noted = []

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync="asgd")
        replica.dispatcher.set_source(
            lambda n: (start := next(position), start + n), lambda *interval: noted.append(interval)
        )
        replica.dispatcher.set_boundary(10**5)
        while (interval := replica.dispatcher.claim(4)) is not None:
            if group.rank == 1 and interval[0] > 40:
                replica.membership.request_stop("a test")
            run_step(replica, interval[0])
            replica.dispatcher.ack(interval)
        stopping = replica.dispatcher.is_stopping
        replica.close()
        return stopping

    assert LocalGroup.run(2, work) == [True, True]
    assert sorted(noted) == [(4 * n, 4 * n + 4) for n in range(len(noted))]


def test_what_a_worker_has_is_its_own_outside_of_the_consensus():
    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync="asgd")
        for step in range(3):
            run_step(replica, step)
        own = flatten(module)
        with replica.consensus():
            agreed = flatten(module)
        assert torch.equal(flatten(module), own)
        replica.close()
        return agreed

    agreed = LocalGroup.run(3, work)
    assert all(torch.equal(agreed[0], other) for other in agreed)


def test_descend_is_what_one_worker_does():
    start = flatten(make_linear())
    assert torch.equal(train(1, "asgd", 4)[0, -1], descend(start, 0, range(4)))
    assert make_samples(0, 0)[0].dtype == torch.float64


def test_a_killed_run_goes_on_with_its_clocks_delays_and_parameters():
    """Two workers that take turns, so that all is decided: the second half is the same with a restart before it."""

    def take_turns(group, replica, steps):
        for step in steps:
            for rank in range(group.size):
                if rank == group.rank:
                    run_step(replica, step)
                group.barrier()

    def make(group):
        module = make_linear()
        rule = paper(
            compensation=0.5, correct_momentum=True, num_servers=2, codec=_lossy("int8"), pull_codec=_lossy("int8")
        )
        return module, Replica(module, make_sgd(module, momentum=0.9), group=group, sync=rule)

    def work(group, is_killed):
        module, replica = make(group)
        take_turns(group, replica, range(4))
        if is_killed:
            tensors, document = capture(replica)
            replica.close()
            module, replica = make(group)
            with tempfile.TemporaryDirectory() as folder, CheckpointStore(Path(folder)) as store:
                if group.rank == 0:
                    store.save(tensors, document, 4)
                restore(store.find_newest_valid(_fail) if group.rank == 0 else None, replica)
        take_turns(group, replica, range(4, 8))
        link = replica._synchroniser._links[0]
        seen = flatten(module), link.clock, link.version, replica._synchroniser.count_delays()
        group.barrier()
        replica.close()
        return seen

    straight = LocalGroup.run(2, lambda group: work(group, False))
    resumed = LocalGroup.run(2, lambda group: work(group, True))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert straight[0][1] == 8
    assert straight[0][3].counts == {0: 1, 1: 15}


def _fail(path, reason):
    raise AssertionError(f"{path} is damaged: {reason}")


def test_who_hangs_is_accused_and_who_is_lost_is_not():
    hung = PeerTimeoutError("rank 1 hangs")
    hung.hung_ranks = (5,)
    for error, kind, accused in ((CommunicationError("gone"), CommunicationError, ()), (hung, PeerTimeoutError, (6,))):
        farewells = Farewells(3)
        assert read_lost(farewells.tell(), [4, 5, 6]) is None
        assert farewells.lose(2, error)
        lost = read_lost(farewells.tell(), [4, 5, 6])
        assert type(lost) is kind
        assert getattr(lost, "hung_ranks", ()) == accused
        assert str(lost).startswith("rank 6 ")
