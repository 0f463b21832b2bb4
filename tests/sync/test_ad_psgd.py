import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from gossiping import flat, loss_of, make_module, make_replica, take_step

from paceline.comm.local_group import LocalGroup
from paceline.errors import CommunicationError
from paceline.replica.state import capture
from paceline.replica.survivors import stand_alone
from paceline.sync.ad_psgd import ADPSGD, ADPSGDSynchroniser, pair_up
from paceline.topology.graphs import EdgeListGraph, Graph, RingGraph


def dawdle(rank, step):
    """Go at a pace of one's own, now and then much slower."""
    time.sleep(random.Random(f"{rank} {step}").choice([0, 0, 0.001, 0.004]) * (1 + rank % 3))


@pytest.mark.parametrize("graph", ["ring", "complete", "exponential", "star"])
@pytest.mark.parametrize("num_workers", [2, 5, 6])
def test_averages_are_atomic_so_that_the_mean_is_kept(graph, num_workers):
    """In float64, while workers that wait for nobody step and average as it comes."""

    def run(group):
        replica = make_replica(group, ADPSGD(graph=graph), lr=0.0)
        for step in range(40):
            dawdle(group.rank, step)
            take_step(replica, step)
        with replica.consensus():
            mean = flat(replica.module)
        own = flat(replica.module)
        replica.close()
        return own, mean

    results = LocalGroup.run(num_workers, run)
    own = torch.stack([own for own, _ in results])
    began = torch.stack([flat(make_module(rank)) for rank in range(num_workers)])
    torch.testing.assert_close(own.mean(0), began.mean(0), rtol=0, atol=1e-14)
    for _, mean in results:
        torch.testing.assert_close(mean, began.mean(0), rtol=0, atol=1e-14)
    assert (own - own.mean(0)).norm() < 0.2 * (began - began.mean(0)).norm()


def test_no_step_of_an_optimizer_is_lost_among_averages():
    """Each worker's gradient is a number of its own; where all steps were applied, the mean has moved by their sum."""
    num_workers, num_steps, lr = 5, 60, 0.01

    def run(group):
        replica = make_replica(group, ADPSGD(), lr=lr)
        for optimizer_group in replica.optimizer.param_groups:
            optimizer_group.update(momentum=0.0, weight_decay=0.0)
        for step in range(num_steps):
            dawdle(group.rank, step)
            replica.backward(
                sum((group.rank + 1) * parameter.sum() for parameter in replica.module.parameters()), weight=1.0
            )
            replica.update()
        with replica.consensus():
            mean = flat(replica.module)
        replica.close()
        return mean

    began = torch.stack([flat(make_module(rank)) for rank in range(num_workers)]).mean(0)
    for mean in LocalGroup.run(num_workers, run):
        torch.testing.assert_close(mean, began - lr * num_steps * 3.0, rtol=0, atol=1e-12)


def test_nobody_waits_for_a_slow_worker():
    """A passive worker that computes for ever still answers; an active one that does so is not missed."""
    others_are_done = threading.Event()
    num_done = []

    def run(group, slow):
        replica = make_replica(group, ADPSGD(graph="complete"))
        for step in range(12):
            take_step(replica, step)
            if group.rank == slow and step == 3:
                assert others_are_done.wait(30), "the others wait for this one"
        num_done.append(group.rank)
        if len(num_done) == 3:
            others_are_done.set()
        with replica.consensus():
            pass
        replica.close()

    for slow in (1, 2):
        others_are_done.clear()
        num_done.clear()
        LocalGroup.run(4, lambda group, slow=slow: run(group, slow))
        assert num_done[-1] == slow


def test_all_stop_after_the_same_step():
    """Whoever is asked, whoever is ahead."""

    def run(group, asked):
        replica = make_replica(group, ADPSGD())
        for step in range(200):
            dawdle(group.rank, step)
            if group.rank == asked and step == 33:
                replica.membership.request_stop("a test")
            if take_step(replica, step).stop:
                with replica.consensus():
                    pass
                replica.close()
                return step
        return None

    for asked in (0, 3):
        stopped = LocalGroup.run(4, lambda group, asked=asked: run(group, asked))
        assert len(set(stopped)) == 1
        assert stopped[0] is not None


def test_training_learns_at_different_paces():
    def run(group):
        replica = make_replica(group, ADPSGD(), dtype=torch.float32, apart=False)
        for step in range(60):
            dawdle(group.rank, step)
            take_step(replica, step, dtype=torch.float32)
        with replica.consensus(), torch.no_grad():
            loss = float(loss_of(replica.module, 1, 999, torch.float32))
        replica.close()
        return loss

    with torch.no_grad():
        before = float(loss_of(make_module(dtype=torch.float32), 1, 999, torch.float32))
    assert max(LocalGroup.run(3, run)) < 0.5 * before


def test_bytes_sent_are_those_stated():
    def run(group):
        replica = make_replica(group, ADPSGD(), dtype=torch.float32)
        sent = [take_step(replica, step, dtype=torch.float32).wire_bytes for step in range(10)]
        with replica.consensus():
            pass
        sent.append(take_step(replica, 10, dtype=torch.float32).wire_bytes)
        replica.close()
        return sum(sent)

    (traffic,) = ADPSGD().traffic([parameter.shape for parameter in make_module().parameters()], 4)
    assert traffic.wire_bytes == 4 * flat(make_module()).numel(), "half of four workers ask, and each is answered"
    # Of the last step only the questions are certain to be counted.
    total = sum(LocalGroup.run(4, run)) / traffic.wire_bytes / 4
    assert 10.5 <= total <= 11


def test_a_lost_worker_is_named():
    def run(group):
        replica = make_replica(group, ADPSGD(graph="complete"))
        for step in range(2000):
            if group.rank == 2 and step == 3:
                raise RuntimeError("gone")
            take_step(replica, step)

    with pytest.raises(RuntimeError, match=r"gone"):
        LocalGroup.run(3, run)


def test_the_living_hand_their_parameters_and_steps_over_to_the_first():
    """One is lost in its third step; the others stop, and the first stands for the mean of those that live."""

    def run(group):
        replica = make_replica(group, ADPSGD(graph="complete"))
        model = replica._synchroniser._model
        read = model.read

        def read_and_note():
            own[group.rank] = read()
            return own[group.rank]

        try:
            for step in range(100_000):
                if group.rank == 3 and step == 3:
                    raise RuntimeError("gone")
                take_step(replica, step)
                steps[group.rank] = step + 1
        except CommunicationError:
            model.read = read_and_note
            handed_over = stand_alone(replica)
            model.read = read
            if handed_over is not None:
                replica._synchroniser._service.drop_caller(1, CommunicationError("it has left, and its process ended"))
                tensors, document = capture(replica)
                saved.append((handed_over, tensors, document))
                return
            raise

    own, steps, saved = {}, {}, []
    with pytest.raises(RuntimeError, match="gone"):
        LocalGroup.run(4, run)
    [(handed_over, tensors, document)] = saved
    assert handed_over.lost_ranks == [3]
    assert sorted(handed_over.num_steps) == [0, 1, 2, 3]
    assert handed_over.num_steps.pop(3) <= 3
    for rank, count in handed_over.num_steps.items():
        assert count - steps.get(rank, 0) in (0, 1), "the last may have heard of the loss at its end"
    assert len(document["replica"]["states"]) == 1
    mean = torch.cat([tensors[f"model/{name}"].flatten() for name, _ in make_module().named_parameters()])
    assert sorted(own) == [0, 1, 2]
    torch.testing.assert_close(mean, sum(own.values()) / 3)
    assert not torch.allclose(mean, own[0]), "they were apart"


@pytest.mark.parametrize("size", [2, 3], ids=["passive", "active"])
def test_the_steps_of_the_lost_are_those_that_the_living_have_of_it(size):
    """The last rank is lost after three steps, when the others have done many more and have averaged with it."""

    def run(group):
        replica = make_replica(group, ADPSGD(graph="complete"))
        try:
            for step in range(100_000):
                if group.rank == size - 1 and step == 3:
                    replica._synchroniser._finish()
                    others_are_ahead.wait(30)
                    raise RuntimeError("gone")
                take_step(replica, step)
                if group.rank == 0 and step == 8:
                    others_are_ahead.set()
        except CommunicationError:
            if (handed_over := stand_alone(replica)) is not None:
                found.append(handed_over)
                return
            raise

    others_are_ahead, found = threading.Event(), []
    with pytest.raises(RuntimeError, match="gone"):
        LocalGroup.run(size, run)
    [handed_over] = found
    assert handed_over.num_steps[size - 1] == 3
    assert handed_over.num_steps[0] >= 9


def test_delays_are_of_averages_that_came_between_gradients_and_their_use():
    def run(group):
        replica = make_replica(group, ADPSGD())
        for step in range(20):
            take_step(replica, step)
        group.barrier()
        delays = replica.state.count_delays()
        with replica.consensus():
            pass
        replica.close()
        return delays

    first, _ = LocalGroup.run(2, run)
    # Rank 0 asks for an average after each step, whose answer comes before the next update: each gradient but the
    # first is one average old. Rank 1 answers whenever it is asked.
    assert first.counts[1] >= 9
    assert sum(first.counts.values()) == 40


@pytest.mark.parametrize(
    "name", ["ring", "torus", "complete", "star", "exponential", "one_peer_exponential", "random_pairs"]
)
def test_pairs_connect_all_workers_and_are_of_an_active_and_a_passive(name):
    for num_workers in range(1, 14):
        pairs = pair_up(Graph.model_validate(name), num_workers)
        active, passive = {a for a, _ in pairs}, {b for _, b in pairs}
        assert not active & passive
        assert active | passive == (set(range(num_workers)) if num_workers > 1 else set())
        EdgeListGraph(edges=tuple(pairs)).find_edges(num_workers)  # it refuses what is not connected


def test_no_edge_of_a_graph_of_two_kinds_is_left_out():
    assert len(pair_up(RingGraph(), 8)) == 8
    assert len(pair_up(Graph.model_validate("complete"), 8)) == 16
    assert len(pair_up(Graph.model_validate("star"), 8)) == 7


def test_an_average_that_a_lost_neighbour_was_asked_for_is_not_awaited():
    def begin(header, body):
        raise CommunicationError("the server on rank 1 is lost")

    client = SimpleNamespace(begin=begin)
    asking = SimpleNamespace(
        _context=SimpleNamespace(seed=0, group=SimpleNamespace(rank=0)),
        _neighbours=[1],
        _endpoint=SimpleNamespace(clients={1: client}),
        _model=SimpleNamespace(values=torch.zeros(2), num_steps=3),
        _wire_bytes=0,
        _client=None,
        _num_requests=0,
    )
    with pytest.raises(CommunicationError, match="rank 1 is lost"):
        ADPSGDSynchroniser._request(asking, 0)
    ADPSGDSynchroniser._finish(asking)
