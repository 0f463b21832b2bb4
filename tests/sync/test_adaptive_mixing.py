import pytest
import torch
from gossiping import flat, make_module, make_replica, take_step, train

from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.sync import adaptive_mixing
from paceline.sync.adaptive_mixing import AdaptiveMixing, measure_links, sketch
from paceline.sync.dpsgd import DPSGD
from paceline.topology.graphs import CompleteGraph, EdgeListGraph
from scripted_time import ScriptedTime


class SlowLinkGroup(LocalGroup):
    """The link between ranks 0 and 1 takes 20 ms for a message, others take 1 ms."""

    def send(self, tensor, destination, *, tag, name):
        adaptive_mixing.time.sleep(0.02 if {self.rank, destination} == {0, 1} else 0.001)
        return super().send(tensor, destination, tag=tag, name=name)

    def duplicate(self, name):
        other = super().duplicate(name)
        return SlowLinkGroup(other.rank, other._room)


def edges_of(replica):
    return {tuple(edge) for edge in replica.state.sync_state()[1]["edges"].tolist()}


def run_steps(group, rule, num_steps, lr=0.1):
    """Return the edges chosen last, and the parameters."""
    replica = make_replica(group, rule, lr=lr)
    for step in range(num_steps):
        take_step(replica, step)
    edges = edges_of(replica)
    replica.close()
    return edges, flat(replica.module)


def test_between_two_choices_it_is_dpsgd():
    ours = LocalGroup.run(4, lambda group: train(group, AdaptiveMixing(graph="ring"), 6))
    theirs = LocalGroup.run(4, lambda group: train(group, DPSGD(graph="ring"), 6))
    for (own, mean), (other, other_mean) in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        assert torch.equal(mean, other_mean)


def test_links_are_measured_by_messages_of_the_models_size(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        adaptive_mixing,
        "measure_links",
        lambda group, edges, size: (sizes.append(size), measure_links(group, edges, size))[1],
    )

    def run(group):
        replica = make_replica(group, AdaptiveMixing(interval=2))
        for step in range(3):
            take_step(replica, step)
        replica.close()
        return sum(parameter.nbytes for parameter in replica.module.parameters())

    (num_bytes, *_) = LocalGroup.run(3, run)
    assert set(sizes) == {num_bytes}


def test_the_mean_is_kept_while_graphs_change():
    def run(group):
        replica = make_replica(group, AdaptiveMixing(interval=2, probe_bytes=64), lr=0.0)
        graphs = []
        for step in range(12):
            take_step(replica, step)
            graphs.append(replica.state.sync_state()[1].get("edges"))
        replica.close()
        return graphs, flat(replica.module)

    results = LocalGroup.run(6, run)
    for graphs, _ in results[1:]:
        assert str(graphs) == str(results[0][0]), "all agree"
    own = torch.stack([own for _, own in results])
    began = torch.stack([flat(make_module(rank)) for rank in range(6)]).mean(0)
    torch.testing.assert_close(own.mean(0), began, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("target", "num_pairs"), [(1e-9, 10), (1e9, 4)], ids=["far apart", "near enough"])
def test_the_degree_follows_the_distance(target, num_pairs):
    """All pairs when workers are further apart than they may be; as few as connect them when they are nearer."""
    rule = AdaptiveMixing(interval=2, target=target, probe_bytes=64)
    for edges, _ in LocalGroup.run(5, lambda group: run_steps(group, rule, 10)):
        assert len(edges) == 2 * num_pairs


def test_how_many_pairs():
    rule = AdaptiveMixing(target=4)
    assert [rule.choose_num_pairs(9, distance, 1.0) for distance in (4.1, 4.0, 2.0, 1.9)] == [14, 9, 9, 6]
    assert rule.choose_num_pairs(9, 4.1, 2.0) == 9, "it is counted in lengths of a step"


def test_slow_links_are_left_out(monkeypatch):
    monkeypatch.setattr(adaptive_mixing, "time", ScriptedTime())

    def run(group):
        return run_steps(SlowLinkGroup(group.rank, group._room), AdaptiveMixing(interval=2, target=1e9), 6)[0]

    for edges in LocalGroup.run(4, run):
        assert len(edges) == 6
        assert (0, 1) not in edges


def test_candidates_are_all_there_is_to_choose_from():
    rule = AdaptiveMixing(interval=1, target=1e-9, candidates="star", graph="star", probe_bytes=64)
    for edges, _ in LocalGroup.run(4, lambda group: run_steps(group, rule, 3)):
        assert edges == {(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)}


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 6])
def test_every_link_is_measured_once_from_its_lower_rank(num_ranks):
    candidates = CompleteGraph().find_edges(num_ranks)
    results = LocalGroup.run(num_ranks, lambda group: measure_links(group, candidates, 100))
    for rank, (seconds, sent_bytes) in enumerate(results):
        assert [time_s > 0 for time_s in seconds] == [other > rank for other in range(num_ranks)]
        assert sent_bytes == (num_ranks - 1) * 301


def test_sketches_keep_distances():
    generator = torch.Generator().manual_seed(0)
    models = torch.randn(6, 50_000, generator=generator)
    sketches = torch.stack([sketch(model, seed=3) for model in models])
    exact = (models - models.mean(0)).square().sum(1).mean().sqrt()
    about = (sketches - sketches.mean(0)).square().sum(1).mean().sqrt()
    assert float(about) == pytest.approx(float(exact), rel=0.1)


def test_the_bytes_of_a_choice_are_counted():
    """Three probes and a byte to each of two candidates, and a sketch of 8 KiB to each other worker."""

    def run(group):
        replica = make_replica(group, AdaptiveMixing(interval=2))
        model_bytes = sum(parameter.nbytes for parameter in replica.module.parameters())
        plain, choosing = (take_step(replica, step).wire_bytes for step in range(2))
        return choosing - 2 * (3 * model_bytes + 1) - 2 * 8192, {plain, plain // 2}  # to two neighbours, or to one

    for mixing_bytes, expected in LocalGroup.run(3, run):
        assert mixing_bytes in expected


@pytest.mark.parametrize("num_resumed", [4, 3])
def test_what_was_chosen_is_saved(num_resumed):
    rule = AdaptiveMixing(interval=2, target=1e9, probe_bytes=64)

    def begin(group):
        replica = make_replica(group, rule)
        for step in range(4):
            take_step(replica, step)
        _, shared = replica.state.sync_state()
        replica.close()
        return shared

    shared = LocalGroup.run(4, begin)[0]

    def resume(group):
        replica = make_replica(group, rule)
        replica.state.load_sync_state([{}] * 4, shared)
        _, loaded = replica.state.sync_state()
        take_step(replica, 4)
        replica.close()
        return loaded

    for loaded in LocalGroup.run(num_resumed, resume):
        assert list(loaded) == (["edges"] if num_resumed == 4 else [])
        assert not loaded or torch.equal(loaded["edges"], shared["edges"])


@pytest.mark.parametrize("fields", [{"graph": "random_pairs"}, {"candidates": "one_peer_exponential"}], ids=str)
def test_graphs_that_change_by_themselves_are_refused(fields):
    with pytest.raises(SettingsError, match=r"must stay the same from step to step, but got"):
        LocalGroup.run(3, lambda group: make_replica(group, AdaptiveMixing(**fields)))


def test_candidates_that_do_not_connect_all_are_refused():
    graph = EdgeListGraph(edges=((0, 1),))
    with pytest.raises(SettingsError, match=r"edges must connect all 3 ranks"):
        LocalGroup.run(3, lambda group: make_replica(group, AdaptiveMixing(candidates=graph)))
