import copy
from functools import partial

import pytest
import torch
from gossiping import CountingGroup, flat, loss_of, make_module, make_optimizer, make_replica, take_step, train
from pydantic import ValidationError
from torch import nn

from paceline.comm.local_group import LocalGroup
from paceline.compression import Codec, NoCodec, PowerSGD, RandomK, TopK
from paceline.errors import NonFiniteError, SettingsError
from paceline.registry import list_variants
from paceline.replica import Replica
from paceline.sync.choco_sgd import ChocoSGD
from paceline.sync.dpsgd import DPSGD
from paceline.topology.graphs import EdgeListGraph, RingGraph

TOP_K = TopK(density=0.2, dense_below=0)
CODECS = {
    name: codec.model_validate({"dense_below": 0}) for name, codec in list_variants(Codec).items() if name != "dgc"
} | {"top_k": TOP_K, "random_k": RandomK(density=0.2, dense_below=0)}


def campaign(*values):
    """Return one more kind of what others are an example of."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.campaign])


@pytest.mark.parametrize("graph", ["ring", "exponential", "star", "complete"])
def test_without_a_codec_and_with_step_size_1_it_is_dpsgd(graph):
    ours = LocalGroup.run(
        5, lambda group: train(group, ChocoSGD(graph=graph, codec="none", step_size=1), 8, apart=False)
    )
    theirs = LocalGroup.run(5, lambda group: train(group, DPSGD(graph=graph), 8, apart=False))
    for (own, mean), (other, other_mean) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-7)  # differences travel in fp32
        torch.testing.assert_close(mean, other_mean, rtol=0, atol=1e-7)


def test_it_is_the_plain_formula_with_top_k():
    num_workers, num_steps, step_size = 4, 7, 0.3
    mixing = torch.from_numpy(RingGraph().mixing_matrix(num_workers))
    modules = [make_module() for _ in range(num_workers)]
    optimizers = [make_optimizer(module) for module in modules]
    copies = torch.stack([flat(module) for module in modules])
    for step in range(num_steps):
        for rank, module in enumerate(modules):
            module.zero_grad()
            loss_of(module, rank, step).backward()
        models = torch.stack([flat(module) for module in modules])
        models += step_size * (mixing @ copies - copies)
        for rank, module in enumerate(modules):
            nn.utils.vector_to_parameters(models[rank].clone(), module.parameters())
            optimizers[rank].step()
            start = 0
            for parameter in module.parameters():
                part = slice(start, start + parameter.numel())
                start = part.stop
                difference = (parameter.detach().flatten() - copies[rank, part]).float()
                kept = difference.abs().topk(max(1, round(0.2 * len(difference)))).indices
                copies[rank, part][kept] += difference[kept]
    rule = ChocoSGD(codec=TOP_K, step_size=step_size)
    results = LocalGroup.run(num_workers, lambda group: train(group, rule, num_steps, apart=False))
    for module, (own, _) in zip(modules, results, strict=True):
        torch.testing.assert_close(own, flat(module), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_mean_is_kept_and_workers_approach_each_other_with_any_codec(name):
    rule = ChocoSGD(codec=CODECS[name], step_size=0.2)

    def run(group):
        replica = make_replica(group, rule, lr=0.0)
        for step in range(60):
            take_step(replica, step)
        replica.close()
        return flat(replica.module)

    own = torch.stack(LocalGroup.run(4, run))
    began = torch.stack([flat(make_module(rank)) for rank in range(4)])
    torch.testing.assert_close(own.mean(0), began.mean(0), rtol=0, atol=1e-12)
    assert (own - own.mean(0)).norm() < 0.2 * (began - began.mean(0)).norm()


@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_is_sent_is_what_is_stated(name):
    rule = ChocoSGD(codec=CODECS[name])

    def run(group):
        counting = CountingGroup(group.rank, group._room)
        counting.sent = {}
        replica = make_replica(counting, rule, dtype=torch.float32)
        sent = [take_step(replica, step, dtype=torch.float32).wire_bytes for step in range(3)]
        replica.close()
        return sent, counting.sent[group.rank]

    (traffic,) = rule.traffic([parameter.shape for parameter in make_module().parameters()], 4)
    for sent, counted in LocalGroup.run(4, run):
        assert sent == [traffic.wire_bytes] * 3
        assert counted == 3 * traffic.wire_bytes


def test_workers_do_not_all_draw_the_same():
    """Random k: each sends other elements."""

    def run(group):
        replica = make_replica(group, ChocoSGD(codec=RandomK(density=0.2, dense_below=0)), apart=False)
        began = flat(replica.module)
        take_step(replica, 0)
        copy = replica.state.sync_state()[0]["copy"]
        replica.close()
        return tuple((copy != began).tolist())

    assert len(set(LocalGroup.run(4, run))) == 4


@pytest.mark.parametrize("codec", [TOP_K, PowerSGD(dense_below=0)], ids=["top_k", "power_sgd"])
def test_a_saved_state_is_the_same_on_both_sides_of_an_edge(codec):
    """What is on the wire has arrived, and neighbours' copies come from the neighbours."""
    rule = ChocoSGD(codec=codec, graph="star")

    def begin(group):
        replica = make_replica(group, rule)
        for step in range(4):
            take_step(replica, step)
        saved, own = replica.state.sync_state()[0], flat(replica.module)
        optimizer = copy.deepcopy(replica.optimizer.state_dict())
        take_step(replica, 4)
        replica.close()
        return saved, own, optimizer, flat(replica.module)

    saved = LocalGroup.run(3, begin)

    def resume(group):
        replica = make_replica(group, rule)
        nn.utils.vector_to_parameters(saved[group.rank][1].clone(), replica.module.parameters())
        replica.optimizer.load_state_dict(saved[group.rank][2])
        replica.begin_anew()
        replica.state.num_updates = 4
        replica.state.load_sync_state([state if group.rank == r else {} for r, (state, *_) in enumerate(saved)], {})
        take_step(replica, 4)
        replica.close()
        return flat(replica.module)

    for (*_, expected), own in zip(saved, LocalGroup.run(3, resume), strict=True):
        assert torch.equal(own, expected)


def test_what_is_not_finite_ends_training():
    def run(group):
        replica = make_replica(group, ChocoSGD(codec=TOP_K))
        if group.rank == 1:
            with torch.no_grad():
                next(replica.module.parameters())[0, 0] = float("nan")
        take_step(replica, 0, weight=0.0)

    with pytest.raises(NonFiniteError, match=r"parameters must be finite to be sent, but after step 0 on rank 1"):
        LocalGroup.run(2, run)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"graph": "one_peer_exponential"}, "graph of choco_sgd must stay the same, .* but got one_peer_exponential"),
        ({"graph": "random_pairs"}, "must stay the same"),
        ({"codec": {"name": "dgc"}}, "codec of choco_sgd must bring copies closer .* but got dgc; take another"),
        ({"codec": {"name": "random_k", "scaled": True, "error_feedback": False}}, "but got random_k, scaled"),
        ({"step_size": 0}, "greater than 0"),
        ({"step_size": 1.5}, "less than or equal to 1"),
    ],
    ids=["one peer", "random", "momentum", "expansive", "no step", "too far"],
)
def test_settings_that_cannot_work_are_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        ChocoSGD(**fields)


def test_a_graph_that_does_not_keep_the_mean_is_refused():
    graph = EdgeListGraph(edges=((0, 1), (1, 2), (2, 0), (0, 2)), is_directed=True)
    with pytest.raises(SettingsError, match=r"must sum to 1 with sync choco_sgd"):
        LocalGroup.run(3, lambda group: make_replica(group, ChocoSGD(graph=graph, codec=NoCodec())))


@pytest.mark.parametrize(
    ("codec", "graph"),
    [
        *((codec, "ring") for codec in ("int8", "one_bit", "top_k", "power_sgd")),
        ("int8", "exponential"),
        *(campaign(codec, "exponential") for codec in ("one_bit", "top_k", "power_sgd", "random_k")),
        campaign("random_k", "ring"),
    ],
)
def test_by_default_workers_stay_together_whatever_the_codec_drops(codec, graph):
    """Where a step of 0.5 lets those codecs diverge that drop the most."""
    settings = {"name": codec, "dense_below": 0, **({"density": 0.02} if codec in ("top_k", "random_k") else {})}

    def run(group, step_size):
        module = torch.nn.Linear(48, 48, bias=False)
        torch.nn.init.zeros_(module.weight)
        rule = ChocoSGD(codec=settings, graph=graph, step_size=step_size)
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.01), group=group, sync=rule)
        noise = torch.Generator().manual_seed(group.rank)
        weights = []
        for step in range(301):
            replica.backward((module.weight * torch.randn(48, 48, generator=noise)).sum(), weight=1.0)
            replica.update()
            if step in (150, 300):
                weights.append(module.weight.detach().clone())
        replica.close()
        return torch.stack(weights)

    def measure_growth(step_size):
        weights = torch.stack(LocalGroup.run(4, partial(run, step_size=step_size)))
        early, late = (weights - weights.mean(0)).square().mean((0, 2, 3))
        return float(late / early)

    assert measure_growth(None) < 1.3
    if codec in ("top_k", "power_sgd", "random_k"):
        assert measure_growth(0.5) > 3
