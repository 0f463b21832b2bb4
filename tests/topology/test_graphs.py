import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.errors import SettingsError
from paceline.registry import list_variants
from paceline.topology.graphs import (
    EdgeListGraph,
    Graph,
    OnePeerExponentialGraph,
    RandomPairsGraph,
    TorusGraph,
    is_doubly_stochastic,
    mix_over,
)

NAMED = sorted(set(list_variants(Graph)) - {"edge_list"})
SIZES = range(1, 18)


def make(name):
    return Graph.model_validate(name)


def degrees(name, num_ranks):
    """Return the most messages that a rank sends in a step."""
    edges = make(name).find_edges(num_ranks)
    return max((sum(source == rank for source, _ in edges) for rank in range(num_ranks)), default=0)


@pytest.mark.parametrize("name", NAMED)
def test_named_graphs_keep_the_mean_for_any_number_of_ranks(name):
    for num_ranks in SIZES:
        for step in range(6):
            mixing = make(name).mixing_matrix(num_ranks, step)
            assert mixing.shape == (num_ranks, num_ranks)
            assert is_doubly_stochastic(mixing)
            models = np.random.default_rng(step).normal(size=(num_ranks, 3))
            np.testing.assert_allclose((mixing @ models).mean(0), models.mean(0), atol=1e-14)


@pytest.mark.parametrize("name", NAMED)
def test_disagreement_shrinks_as_fast_as_the_gap_says(name):
    for num_ranks in (2, 5, 8, 12):
        graph = make(name)
        gap, num_steps = graph.spectral_gap(num_ranks), 240
        product = np.eye(num_ranks)
        for step in range(num_steps):
            product = graph.mixing_matrix(num_ranks, step) @ product
        left = np.linalg.norm(product - 1 / num_ranks, 2)
        if gap == 1:
            assert left < 1e-12
        elif left > 1e-13:  # less is rounding
            # Powers of a matrix shrink like its eigenvalue only in the long run; random pairs vary beside that.
            assert math.log(left) / num_steps == pytest.approx(math.log(1 - gap), rel=0.25)


def test_gaps_have_their_closed_forms():
    for n in (3, 4, 7, 16):
        # A ring's eigenvalues are (1 + 2 cos(2 pi k / n)) / 3.
        moduli = sorted(abs(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(n))
        assert make("ring").spectral_gap(n) == pytest.approx(1 - moduli[-2])
        assert make("complete").spectral_gap(n) == pytest.approx(1)
        # A star's leaves keep 1 - 1/n of their own.
        assert make("star").spectral_gap(n) == pytest.approx(1 / n)
    for k in (1, 2, 3, 4):
        # Ying et al. 2021, theorem 1, for static exponential graphs of an even number of ranks.
        assert make("exponential").spectral_gap(2**k) == pytest.approx(2 / (1 + k))


@settings(deadline=None, derandomize=True, max_examples=20)
@given(num_ranks=st.integers(2, 9))
def test_random_pairs_shrink_the_squared_disagreement_as_expected(num_ranks):
    graph = RandomPairsGraph(seed=1)
    mean = np.mean([graph.mixing_matrix(num_ranks, step) for step in range(4000)], axis=0)
    second = np.sort(np.linalg.eigvalsh(mean))[-2]
    # 4,000 draws of a fair coin are within 1/40 of a half.
    assert math.sqrt(max(0, second)) == pytest.approx(1 - graph.spectral_gap(num_ranks), abs=0.05)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_one_peer_exponential_is_exact_for_powers_of_two_only(num_ranks):
    graph = OnePeerExponentialGraph()
    num_phases = graph.num_phases(num_ranks)
    assert num_phases == max(1, math.ceil(math.log2(num_ranks)))
    product = np.eye(num_ranks)
    for step in range(5, 5 + num_phases):  # from wherever it begins
        product = graph.mixing_matrix(num_ranks, step) @ product
    is_exact = np.allclose(product, 1 / num_ranks, rtol=0, atol=1e-14)
    assert is_exact == (num_ranks & (num_ranks - 1) == 0)
    assert (graph.spectral_gap(num_ranks) == 1) == is_exact


def test_messages_of_a_rank():
    for n in (8, 16, 64):
        assert [degrees(name, n) for name in ("ring", "one_peer_exponential", "random_pairs")] == [2, 1, 1]
        assert [degrees(name, n) for name in ("exponential", "complete", "star")] == [math.log2(n), n - 1, n - 1]
    # With two rows, whom one has above is whom it has below; a prime number of ranks is one row, a ring.
    assert [degrees("torus", n) for n in (16, 64, 8, 7)] == [4, 4, 3, 2]
    assert make("torus").find_edges(6) == TorusGraph(shape=(2, 3)).find_edges(6)
    assert len(TorusGraph(shape=(2, 3)).find_edges(6)) == 6 * 3, "two rows are joined once, not twice"


def test_metropolis_weights_of_a_path():
    mixing = EdgeListGraph(edges=((0, 1), (1, 2))).mixing_matrix(3)
    np.testing.assert_allclose(mixing, np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3, atol=1e-15)


def test_directed_edges_give_columns_that_sum_to_one():
    mixing = EdgeListGraph(edges=((0, 1), (1, 2), (2, 0), (0, 2)), is_directed=True).mixing_matrix(3)
    np.testing.assert_allclose(mixing[:, 0], 1 / 3, atol=1e-15)
    np.testing.assert_allclose(mixing.sum(0), 1, atol=1e-15)
    assert not is_doubly_stochastic(mixing)
    assert not is_doubly_stochastic(mixing.T), "rows alone are not enough"


def test_what_is_not_doubly_stochastic():
    assert is_doubly_stochastic(np.eye(3))
    assert not is_doubly_stochastic(np.array([[2.0, -1.0], [-1.0, 2.0]]))


@settings(deadline=None, derandomize=True)
@given(num_ranks=st.integers(1, 9), data=st.data())
def test_any_undirected_edges_keep_the_mean(num_ranks, data):
    rank = st.integers(0, num_ranks - 1)
    pairs = data.draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])))
    assert is_doubly_stochastic(mix_over(pairs | {(b, a) for a, b in pairs}, num_ranks))


@pytest.mark.parametrize(
    ("fields", "num_ranks", "words"),
    [
        ({"edges": [[0, 1], [1, 4]]}, 4, "edges must join ranks from 0 to 3, but got 4; remove it"),
        ({"edges": [[0, 1], [2, 3]]}, 4, "rank 0 has no path to rank 2; add an edge to rank 2"),
        ({"edges": [[0, 1], [1, 2]], "is_directed": True}, 3, "rank 0 has no path from rank 1"),
        ({"edges": []}, 2, "edges must connect all 2 ranks"),
    ],
    ids=["unknown", "apart", "one way", "none"],
)
def test_edges_that_cannot_be_are_refused(fields, num_ranks, words):
    with pytest.raises(SettingsError, match=words):
        EdgeListGraph(**fields).mixing_matrix(num_ranks)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValidationError, match=r"must join two ranks, but got 1 with itself"):
        EdgeListGraph(edges=((0, 1), (1, 1)))
    with pytest.raises(ValidationError, match=r"greater than or equal to 0"):
        EdgeListGraph(edges=((0, -1),))
    with pytest.raises(SettingsError, match=r"2 x 3 = 6; leave it out"):
        TorusGraph(shape=(2, 3)).find_edges(8)
    with pytest.raises(ValidationError, match=r"graph must be a known name, but got 'rnig'; did you mean 'ring'\?"):
        Graph.model_validate("rnig")


def test_edges_survive_json():
    graph = EdgeListGraph(edges=((0, 1), (1, 2)))
    assert Graph.model_validate_json(graph.model_dump_json()) == graph
    assert EdgeListGraph(edges=()).mixing_matrix(1).tolist() == [[1.0]], "one worker has nobody to be joined with"
