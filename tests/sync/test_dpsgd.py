import threading

import numpy as np
import pytest
import torch
from gossiping import (
    CountingGroup,
    flat,
    loss_of,
    make_module,
    make_replica,
    mix_by,
    take_step,
    train,
    train_plainly,
)

from paceline.cli.prepare import make_run
from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.registry import list_variants
from paceline.sync.dpsgd import DPSGD
from paceline.sync.synchroniser import LocalStep, WorkerContext
from paceline.topology.graphs import EdgeListGraph, Graph, RingGraph

NAMED = sorted(set(list_variants(Graph)) - {"edge_list"})


@pytest.mark.parametrize("name", NAMED)
def test_it_is_the_plain_formula_on_any_graph(name):
    rule = DPSGD(graph=name)
    for num_workers in (1, 2, 5):
        results = LocalGroup.run(num_workers, lambda group: train(group, rule, 7))
        expected = train_plainly(mix_by(rule.graph, num_workers), num_workers, 7)
        for (own, mean), reference in zip(results, expected, strict=True):
            torch.testing.assert_close(own, reference, rtol=0, atol=1e-13)
            torch.testing.assert_close(mean, expected.mean(0), rtol=0, atol=1e-13)


def test_a_complete_graph_is_averaging():
    def run(group):
        replica = make_replica(group, DPSGD(graph="complete"), lr=0.0)
        take_step(replica, 0)
        replica.close()
        return flat(replica.module)

    own = LocalGroup.run(4, run)
    mean = torch.stack([flat(make_module(rank)) for rank in range(4)]).mean(0)
    torch.testing.assert_close(own[0], mean, rtol=0, atol=1e-15)
    assert all(torch.equal(other, own[0]) for other in own), "the same bits everywhere"


@pytest.mark.parametrize("name", NAMED)
def test_the_mean_over_workers_moves_by_the_mean_gradient_alone(name):
    """With the learning rate 0 it stays, to the last bits, while workers approach each other."""

    def run(group):
        replica = make_replica(group, DPSGD(graph=name), lr=0.0)
        for step in range(40):
            take_step(replica, step)
        replica.close()
        return flat(replica.module)

    own = torch.stack(LocalGroup.run(5, run))
    began = torch.stack([flat(make_module(rank)) for rank in range(5)])
    torch.testing.assert_close(own.mean(0), began.mean(0), rtol=0, atol=1e-14)
    assert (own - own.mean(0)).norm() < 0.1 * (began - began.mean(0)).norm()


def rows_only(graph, num_ranks, step=0):
    """Each rank takes half of what the next one has, and the last one nothing."""
    mixing = np.eye(num_ranks)
    for rank in range(num_ranks - 1):
        mixing[rank, [rank, rank + 1]] = 0.5
    return mixing


def columns_only(graph, num_ranks, step=0):
    return rows_only(graph, num_ranks).T


@pytest.mark.parametrize("matrix", [rows_only, columns_only])
def test_a_graph_that_does_not_keep_the_mean_is_refused(matrix, monkeypatch):
    monkeypatch.setattr(RingGraph, "mixing_matrix", matrix)
    with pytest.raises(SettingsError, match=r"must sum to 1 with sync dpsgd, .*; take an undirected graph, or sync"):
        LocalGroup.run(3, lambda group: make_replica(group, DPSGD()))


def test_directed_edges_that_do_not_keep_the_mean_are_refused():
    graph = EdgeListGraph(edges=((0, 1), (1, 2), (2, 0), (0, 2)), is_directed=True)
    with pytest.raises(SettingsError, match=r"those of graph edge_list with 3 workers do not"):
        LocalGroup.run(3, lambda group: make_replica(group, DPSGD(graph=graph)))


def test_graphs_of_other_numbers_of_workers_are_refused():
    with pytest.raises(SettingsError, match=r"edges must join ranks from 0 to 1, but got 2"):
        LocalGroup.run(2, lambda group: make_replica(group, DPSGD(graph=EdgeListGraph(edges=((0, 1), (1, 2))))))


@pytest.mark.parametrize("name", ["ring", "torus", "one_peer_exponential", "exponential", "star"])
def test_bytes_sent_are_those_stated_for_any_number_of_workers(name):
    def run(group, num_steps=4):
        counting = CountingGroup(group.rank, group._room)
        counting.sent = {}
        replica = make_replica(counting, DPSGD(graph=name), dtype=torch.float32)
        sent = sum(take_step(replica, step, dtype=torch.float32).wire_bytes for step in range(num_steps))
        replica.close()
        return sent / num_steps, counting.sent[group.rank]

    stated = {}
    shapes = [parameter.shape for parameter in make_module().parameters()]
    for num_workers in (4, 9, 16):
        (traffic,) = DPSGD(graph=name).traffic(shapes, num_workers)
        stated[num_workers] = traffic.wire_bytes
        results = LocalGroup.run(num_workers, run)
        assert sum(sent for sent, _ in results) / num_workers == pytest.approx(traffic.wire_bytes, abs=1)
        # The swap of the step that does not come any more was begun too.
        assert sum(counted for _, counted in results) == pytest.approx(5 * num_workers * traffic.wire_bytes, rel=0.01)
    num_bytes = 4 * flat(make_module()).numel()
    if name == "ring":
        assert set(stated.values()) == {2 * num_bytes}
    if name == "one_peer_exponential":
        assert set(stated.values()) == {num_bytes}
    if name == "torus":
        assert stated[9] == stated[16] == 4 * num_bytes
    if name == "exponential":
        assert stated[16] == 4 * num_bytes


def test_parameters_travel_while_the_next_gradients_are_computed():
    """A worker that stands still after its update has sent already what the others need for theirs."""
    has_mixed = threading.Event()

    def run(group):
        replica = make_replica(group, DPSGD())
        take_step(replica, 0)
        if group.rank == 0:
            assert has_mixed.wait(30), "the other worker waits for this one's next step"
        take_step(replica, 1)
        has_mixed.set()
        replica.close()

    LocalGroup.run(2, run)


def test_who_has_no_samples_mixes_all_the_same():
    def run(group):
        replica = make_replica(group, DPSGD(graph="complete"))
        result = take_step(replica, 0, weight=0.0 if group.rank == 1 else 3.0)
        replica.close()
        return flat(replica.module), result

    results = LocalGroup.run(3, run)
    mean = torch.stack([flat(make_module(rank)) for rank in range(3)]).mean(0)
    torch.testing.assert_close(results[1][0], mean, rtol=0, atol=1e-15)
    assert (results[0][0] - mean).abs().max() > 1e-3
    assert [result.weight for _, result in results] == [3.0, 0.0, 3.0]


def test_each_worker_clips_its_own_gradient():
    def run(group, clip_norm):
        replica = make_replica(group, DPSGD(graph="complete"), clip_norm=clip_norm)
        result = take_step(replica, 0)
        replica.close()
        return flat(replica.module), result.gradient_norm

    mean = torch.stack([flat(make_module(rank)) for rank in range(2)]).mean(0)
    for rank, (own, norm) in enumerate(LocalGroup.run(2, lambda group: run(group, 1e-3))):
        module = make_module(rank)
        loss_of(module, rank, 0).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        assert norm == pytest.approx(float(gradient.norm()))
        expected = mean - 0.1 * (gradient * 1e-3 / gradient.norm() + 1e-3 * mean)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-9)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_half_precision(precision):
    def run(group):
        replica = make_replica(group, DPSGD(), dtype=torch.float32, apart=False, precision=precision)
        losses = [take_step(replica, step, dtype=torch.float32).loss for step in range(20)]
        replica.close()
        return losses

    for losses in LocalGroup.run(3, run):
        assert np.mean(losses[-5:]) < 0.5 * losses[0]


def test_parameters_of_several_dtypes_are_mixed_each_in_its_own():
    def run(group):
        module = torch.nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)})
        synchroniser = DPSGD(graph="complete").start_synchroniser(
            WorkerContext(module, torch.optim.SGD(module.parameters(), lr=0.1), group)
        )
        with torch.no_grad():
            module["a"].fill_(group.rank)
            module["b"].fill_(group.rank + 1e-12)
        with synchroniser.consensus():
            mean = module["b"].tolist()
        synchroniser.before_update(LocalStep(0, 1.0))
        synchroniser.close()
        return module["a"].tolist(), module["a"].dtype, module["b"].tolist(), mean

    for a, dtype, b, mean in LocalGroup.run(3, run):
        assert (a, dtype) == ([1.0] * 3, torch.float32)
        assert b == pytest.approx([1 + 1e-12] * 2, abs=1e-15)
        assert mean == b


@pytest.mark.parametrize(
    ("overrides", "graph"),
    [
        ([("sync.graph", "ring")], RingGraph()),
        (
            [("sync.graph", "edge_list"), ("sync.graph.edges", "[[0, 1], [1, 2]]")],
            EdgeListGraph(edges=((0, 1), (1, 2))),
        ),
    ],
    ids=["name", "edges"],
)
def test_the_graph_is_chosen_on_the_command_line(overrides, graph):
    run = make_run("transformer_lm", [("sync", "dpsgd"), *overrides])
    assert run.sync == DPSGD(graph=graph)
    assert type(run).model_validate_json(run.model_dump_json()) == run
