import numpy as np
import pytest
import torch
from gossiping import flat, loss_of, make_module, make_optimizer, make_replica, mix_by, take_step, train, train_plainly
from torch import nn

from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.sync.dpsgd import DPSGD
from paceline.sync.push_sum import PushSum
from paceline.topology.graphs import EdgeListGraph

UNEVEN = EdgeListGraph(edges=((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (0, 3), (2, 1)), is_directed=True)
"""Ranks of it hear from one to two others, and send to one to three."""


@pytest.mark.parametrize("graph", ["ring", "exponential", "one_peer_exponential", "complete"])
def test_with_a_doubly_stochastic_matrix_it_is_dpsgd(graph):
    ours = LocalGroup.run(5, lambda group: train(group, PushSum(graph=graph), 8))
    theirs = LocalGroup.run(5, lambda group: train(group, DPSGD(graph=graph), 8))
    for (own, mean), (other, other_mean) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-13)
        torch.testing.assert_close(mean, other_mean, rtol=0, atol=1e-13)


def test_directed_edges_lead_to_the_mean_and_weights_add_up():
    """Without weights the same mixing goes wrong: that is what push-sum is for."""

    def run(group):
        replica = make_replica(group, PushSum(graph=UNEVEN), lr=0.0)
        for step in range(80):
            take_step(replica, step)
        state, _ = replica.state.sync_state()
        replica.close()
        return flat(replica.module), state

    results = LocalGroup.run(4, run)
    began = torch.stack([flat(make_module(rank)) for rank in range(4)])
    for own, _ in results:
        torch.testing.assert_close(own, began.mean(0), rtol=0, atol=1e-12)
    weights = torch.cat([state["weight"] for _, state in results])
    numerators = torch.stack([state["numerator"] for _, state in results])
    assert float(weights.sum()) == pytest.approx(4, abs=1e-13)
    torch.testing.assert_close(numerators.sum(0), began.sum(0), rtol=0, atol=1e-12)
    assert weights.std() > 0.1
    naive = train_plainly(mix_by(UNEVEN, 4), 4, 80, lr=0.0)
    assert (naive - began.mean(0)).abs().max() > 0.1


def test_it_is_the_plain_formula_on_uneven_edges():
    num_workers, num_steps = 4, 6
    mixing = torch.from_numpy(UNEVEN.mixing_matrix(num_workers))
    modules = [make_module(rank) for rank in range(num_workers)]
    optimizers = [make_optimizer(module) for module in modules]
    numerators = torch.stack([flat(module) for module in modules])
    weights = torch.ones(num_workers, dtype=torch.float64)
    for step in range(num_steps):
        for rank, module in enumerate(modules):
            module.zero_grad()
            loss_of(module, rank, step).backward()
        numerators, weights = mixing @ numerators, mixing @ weights
        for rank, module in enumerate(modules):
            nn.utils.vector_to_parameters(numerators[rank].clone(), module.parameters())
            optimizers[rank].step()
            numerators[rank] = flat(module)
            nn.utils.vector_to_parameters(numerators[rank] / weights[rank], module.parameters())
    results = LocalGroup.run(num_workers, lambda group: train(group, PushSum(graph=UNEVEN), num_steps))
    for rank, (own, mean) in enumerate(results):
        torch.testing.assert_close(own, numerators[rank] / weights[rank], rtol=0, atol=1e-13)
        torch.testing.assert_close(mean, numerators.mean(0), rtol=0, atol=1e-13)


def test_training_over_directed_edges_learns():
    def run(group):
        replica = make_replica(group, PushSum(graph=UNEVEN), dtype=torch.float32, apart=False)
        losses = [take_step(replica, step, dtype=torch.float32).loss for step in range(60)]
        replica.close()
        return losses

    for losses in LocalGroup.run(4, run):
        assert np.mean(losses[-10:]) < 0.5 * losses[0]


def test_messages_are_the_parameters_and_a_weight():
    def run(group):
        replica = make_replica(group, PushSum(graph=UNEVEN), dtype=torch.float32)
        sent = [take_step(replica, step, dtype=torch.float32).wire_bytes for step in range(2)]
        replica.close()
        return sent

    num_bytes = 4 * flat(make_module()).numel() + 8
    assert LocalGroup.run(4, run) == [[count * num_bytes] * 2 for count in (3, 1, 2, 1)]
    shapes = [parameter.shape for parameter in make_module().parameters()]
    (traffic,) = PushSum(graph=UNEVEN).traffic(shapes, 4)
    assert traffic.wire_bytes == pytest.approx(7 / 4 * num_bytes, abs=1)


def test_edges_that_do_not_lead_everywhere_are_refused():
    graph = EdgeListGraph(edges=((0, 1), (1, 2)), is_directed=True)
    with pytest.raises(SettingsError, match=r"rank 0 has no path from rank 1; add an edge to rank 1"):
        LocalGroup.run(3, lambda group: make_replica(group, PushSum(graph=graph)))


@pytest.mark.parametrize("num_resumed", [4, 3])
def test_numerators_and_weights_are_saved(num_resumed):
    """Among as many workers they go on as they were; else from the consensus, all alike."""

    def begin(group):
        replica = make_replica(group, PushSum(graph=UNEVEN))
        for step in range(3):
            take_step(replica, step)
        states, own = replica.state.sync_state()[0], flat(replica.module)
        with replica.consensus():
            mean = flat(replica.module)
        replica.close()
        return states, own, mean

    saved = LocalGroup.run(4, begin)
    graph = UNEVEN if num_resumed == 4 else EdgeListGraph(edges=((0, 1), (1, 2)))

    def resume(group):
        replica = make_replica(group, PushSum(graph=graph))
        same = num_resumed == 4
        nn.utils.vector_to_parameters(saved[group.rank][1 if same else 2].clone(), replica.module.parameters())
        replica.state.load_sync_state([state for state, _, _ in saved], {})
        state = replica.state.sync_state()[0]
        with replica.consensus():
            mean = flat(replica.module)
        replica.close()
        return float(state["weight"]), mean

    for rank, (weight, mean) in enumerate(LocalGroup.run(num_resumed, resume)):
        assert weight == (float(saved[rank][0]["weight"]) if num_resumed == 4 else 1.0)
        torch.testing.assert_close(mean, saved[0][2], rtol=0, atol=1e-14)
