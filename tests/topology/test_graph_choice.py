import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.topology.graph_choice import choose_edges
from paceline.topology.graphs import EdgeListGraph, Graph, mix_over

COMPLETE = Graph.model_validate("complete")


def two_hosts(num_ranks=8, slow_s=1.0):
    """Return times of links: fast inside each half of the ranks, slow between them."""
    host = np.arange(num_ranks) * 2 // num_ranks
    return np.where(host[:, None] == host[None, :], 1e-3, slow_s)


def crossing(edges, num_ranks=8):
    return sum(a < num_ranks // 2 <= b for a, b in edges)


@settings(deadline=None, derandomize=True)
@given(num_ranks=st.integers(2, 9), extra=st.integers(0, 40), seed=st.integers(0, 1000))
def test_any_choice_connects_all_and_is_as_large_as_asked(num_ranks, extra, seed):
    times = np.random.default_rng(seed).random((num_ranks, num_ranks))
    candidates = COMPLETE.find_edges(num_ranks)
    num_pairs = num_ranks - 1 + extra
    edges = choose_edges(times + times.T, candidates, num_pairs)
    assert len(edges) == min(2 * num_pairs, len(candidates))
    assert edges <= candidates
    EdgeListGraph(edges=tuple(edges)).find_edges(num_ranks)  # it refuses what is not connected


def test_the_least_that_connects_is_the_fastest():
    edges = choose_edges(two_hosts(), COMPLETE.find_edges(8), 0)
    assert len(edges) == 2 * 7
    assert crossing(edges) == 1


def test_more_edges_go_where_they_help_most_for_their_time():
    """Where links are alike they are as good as a graph by design; those that are much slower are not worth it."""
    even = choose_edges(np.ones((8, 8)), COMPLETE.find_edges(8), 12)
    gap = 1 - np.sort(np.abs(np.linalg.eigvals(mix_over(even, 8))))[-2]
    assert gap > Graph.model_validate("ring").spectral_gap(8)
    slow, alike = (
        crossing(choose_edges(two_hosts(slow_s=time_s), COMPLETE.find_edges(8), 12)) for time_s in (1.0, 1e-3)
    )
    assert slow < alike


def test_no_rank_gets_all_the_links_where_they_are_alike():
    for num_pairs in (15, 24):
        edges = choose_edges(np.ones((16, 16)), COMPLETE.find_edges(16), num_pairs)
        degrees = [sum(a == rank for a, _ in edges) for rank in range(16)]
        assert max(degrees) <= num_pairs / 8 + 1
