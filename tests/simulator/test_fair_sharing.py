import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.simulator.network import fair_rates, transfer_times_s

always = settings(deadline=None, derandomize=True)


def pad(routes):
    width = max(1, *(len(links) for links in routes))
    return np.array([[*links, *[-1] * (width - len(links))] for links in routes], dtype=np.int64)


def rates_of(routes, capacities):
    return fair_rates(pad(routes), np.array(capacities, dtype=np.float64)).tolist()


def times_of(routes, sizes, capacities):
    times_s = transfer_times_s(pad(routes), np.array(sizes, dtype=np.float64), np.array(capacities, dtype=np.float64))
    return times_s.tolist()


@pytest.mark.parametrize(
    ("routes", "capacities", "rates"),
    [
        ([[0]], [6], [6]),
        ([[0], [0], [0]], [6], [2, 2, 2]),
        ([[0, 1]], [6, 4], [4]),
        # The linear network of Bertsekas and Gallager: one long session against three short ones.
        ([[0, 1, 2], [0], [1], [2]], [1, 1, 1], [0.5, 0.5, 0.5, 0.5]),
        # Three sessions meet in the middle link; the outer two get what these leave them.
        ([[0], [0, 1], [1], [1, 2], [2]], [1, 1, 1], [2 / 3, 1 / 3, 1 / 3, 1 / 3, 2 / 3]),
        ([[0, 1], [0], [1]], [3, 10], [1.5, 1.5, 8.5]),
        ([[], [0]], [5], [np.inf, 5]),
    ],
)
def test_rates_are_those_of_textbook_examples(routes, capacities, rates):
    assert rates_of(routes, capacities) == pytest.approx(rates)


num_links = 5
networks = st.tuples(
    st.lists(st.sets(st.integers(0, num_links - 1), min_size=1, max_size=4).map(sorted), min_size=1, max_size=12),
    st.lists(st.floats(0.1, 100), min_size=num_links, max_size=num_links),
)


@always
@given(networks)
@example(([[0], [0, 1]], [1.0] * num_links))
def test_rates_are_max_min_fair_by_definition(network):
    """No link is over its capacity, and each transfer has a full link on which nobody is faster than it."""
    routes, capacities = network
    rates = rates_of(routes, capacities)
    loads = [sum(rate for links, rate in zip(routes, rates, strict=True) if link in links) for link in range(num_links)]
    assert all(load <= capacity * (1 + 1e-9) for load, capacity in zip(loads, capacities, strict=True))
    for links, rate in zip(routes, rates, strict=True):
        full = [link for link in links if loads[link] >= capacities[link] * (1 - 1e-9)]
        fastest = [max(r for other, r in zip(routes, rates, strict=True) if link in other) for link in full]
        assert any(rate >= best * (1 - 1e-9) for best in fastest)


@always
@given(sizes=st.lists(st.floats(0, 1e6), min_size=1, max_size=10), capacity=st.floats(0.1, 1e3))
def test_one_link_serves_the_small_first_in_equal_shares(sizes, capacity):
    times_s = times_of([[0]] * len(sizes), sizes, [capacity])
    order = np.argsort(sizes, kind="stable")
    now_s, before = 0.0, 0.0
    for number, which in enumerate(order):
        now_s += (sizes[which] - before) * (len(sizes) - number) / capacity
        before = sizes[which]
        assert times_s[which] == pytest.approx(now_s, rel=1e-9)


@always
@given(networks, st.data())
def test_links_twice_as_fast_take_half_the_time_and_no_link_beats_its_capacity(network, data):
    routes, capacities = network
    sizes = data.draw(st.lists(st.floats(1, 1e4), min_size=len(routes), max_size=len(routes)))
    times_s = times_of(routes, sizes, capacities)
    assert times_of(routes, sizes, [2 * capacity for capacity in capacities]) == pytest.approx([t / 2 for t in times_s])
    for link, capacity in enumerate(capacities):
        users = [number for number, links in enumerate(routes) if link in links]
        for end_s in [times_s[user] for user in users]:
            done = sum(sizes[user] for user in users if times_s[user] <= end_s)
            assert done <= capacity * end_s * (1 + 1e-9)


def test_who_ends_leaves_its_share_to_the_others():
    # Both have half until 2 s; then the other 6 bytes have all of link 0.
    assert times_of([[0], [0]], [2, 8], [2]) == pytest.approx([2, 5])
    # Transfer 1 is held back by link 1 until transfer 2 ends; transfer 0 has what is left of link 0.
    assert times_of([[0], [0, 1], [1]], [20, 4, 2], [5, 2]) == pytest.approx([24 / 5, 3, 2])


def test_nothing_takes_no_time_and_no_link_is_no_limit():
    assert times_of([[0], [0], []], [0, 4, 9], [2]) == [0, 2, 0]
