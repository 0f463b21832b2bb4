"""Where nobody shares a link, times are the formulas of the textbooks, to rounding."""

import math

import numpy as np
import pytest
from simulated import PAIRS, make_program

from paceline.errors import SettingsError
from paceline.programs import Collective, Program, find_algorithm
from paceline.simulator import simulate, simulate_collective
from paceline.topology import FatTree, Loopback, Switch, TorusCluster

B = 12.5e9
"""Bandwidth."""
L = 5e-6
"""Latency."""
M = 2e-6
"""Time of a message."""
A = L + M
"""Cost of a round with one message, beside its bytes."""
G = 1 / 50e9
"""Time of adding a byte."""
S = 123_456_789.0
"""Bytes of the buffer."""

SWITCH = Switch(bandwidth=B, latency_s=L, message_s=M, reduce_speed=1 / G)


def time_s(algorithm, collective, num_ranks, cluster=SWITCH, num_bytes=S, **settings):
    program = find_algorithm(algorithm)(**settings).build(Collective(collective), num_ranks)
    return simulate(program, num_bytes, cluster).total_s


def exactly(value):
    return pytest.approx(value, rel=1e-9, abs=0)


sizes = pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 17, 100])


@sizes
def test_ring(n):
    assert time_s("ring", "all_reduce", n) == exactly(2 * (n - 1) * (A + S / (n * B)) + (n - 1) / n * S * G)
    assert time_s("ring", "reduce_scatter", n) == exactly((n - 1) * (A + S / (n * B) + S / n * G))
    assert time_s("ring", "all_gather", n) == exactly((n - 1) * (A + S / (n * B)))
    chunks = 10
    assert time_s("ring", "broadcast", n, num_chunks=chunks) == exactly((n - 2 + chunks) * (A + S / (chunks * B)))


@sizes
def test_direct_exchange(n):
    assert time_s("direct", "all_reduce", n) == exactly(2 * (n - 1) * (A + S / (n * B)) + (n - 1) / n * S * G)
    assert time_s("direct", "all_to_all", n) == exactly((n - 1) * (A + S / (n * n * B)))


@sizes
def test_halving_doubling(n):
    rounds = math.ceil(math.log2(n))
    moved = (n - 1) / n * S
    # Beside powers of two, blocks that wrap around go as two messages: here they cost nothing.
    free = SWITCH.model_copy(update={"message_s": 0.0})
    assert time_s("halving_doubling", "all_gather", n, free) == exactly(rounds * L + moved / B)
    if n == 2**rounds:
        assert time_s("halving_doubling", "all_reduce", n) == exactly(2 * rounds * A + 2 * moved / B + moved * G)
        assert time_s("halving_doubling", "broadcast", n) == exactly(rounds * (A + S / B))


@sizes
def test_everything_through_one_rank(n):
    collecting = (n - 1) * (A + S / B + S * G)
    sending = L + (n - 1) * (M + S / B)
    assert time_s("naive", "all_reduce", n) == exactly(collecting + sending)
    assert time_s("naive", "broadcast", n) == exactly(sending)


@pytest.mark.parametrize("n", [4, 8, 17, 64])
@pytest.mark.parametrize("num_chunks", [2, 32])
def test_double_tree(n, num_chunks):
    """A rank sends at most one chunk up and one down in a round, so the pipeline's rounds bound its time."""
    program = find_algorithm("double_tree")(num_chunks=num_chunks).build(Collective.ALL_REDUCE, n)
    chunk = S / num_chunks
    longest = program.num_rounds * (L + 2 * M + 2 * chunk / B + 2 * chunk * G)
    assert (num_chunks - 1) * (A + chunk / B) < simulate(program, S, SWITCH).total_s <= longest


@pytest.mark.parametrize(("hosts", "m"), [(2, 4), (3, 2), (4, 8)])
def test_hierarchical(hosts, m):
    local_bandwidth, local_latency_s = 300e9, 1e-6
    cluster = Switch(
        devices_per_host=m,
        bandwidth=B,
        latency_s=L,
        message_s=M,
        reduce_speed=1 / G,
        local_bandwidth=local_bandwidth,
        local_latency_s=local_latency_s,
    )
    inside = 2 * (m - 1) * (local_latency_s + M + S / (m * local_bandwidth)) + (m - 1) / m * S * G
    # The m ranks of a host share its card, each with its m-th of the buffer: together as much as one rank with all.
    between = 2 * (hosts - 1) * (A + S / (hosts * B)) + (hosts - 1) / hosts * S / m * G
    measured = time_s("hierarchical", "all_reduce", hosts * m, cluster, ranks_per_host=m)
    assert measured == exactly(inside + between)
    assert simulate_collective("all_reduce", S, hosts * m, cluster, algorithm="hierarchical").total_s == measured


@pytest.mark.parametrize("k", [2, 3, 4])
def test_torus_on_a_torus(k):
    """Half of the buffer along rows while the other half goes along columns: no cable is shared."""
    cluster = TorusCluster(bandwidth=B, latency_s=L, message_s=M, reduce_speed=1 / G)
    block = S / (2 * k) + S / (2 * k * k)
    rounds = 4 * (k - 1) * (L + 2 * M)
    assert time_s("torus", "all_reduce", k * k, cluster) == exactly(
        rounds + 2 * (k - 1) * block / B + 2 * (k - 1) * block * G
    )


@sizes
def test_a_bus_carries_one_after_another(n):
    cluster = Loopback(bandwidth=B, latency_s=L, message_s=M, reduce_speed=1 / G)
    assert time_s("ring", "all_reduce", n, cluster) == exactly(2 * (n - 1) * (A + S / B) + (n - 1) / n * S * G)


def test_a_round_lasts_as_long_as_its_thinnest_link():
    slow = SWITCH.model_copy(update={"host_bandwidths": {3: B / 10}})
    n = 8
    assert time_s("ring", "all_gather", n, slow) == exactly((n - 1) * (A + S / (n * B / 10)))


def test_an_oversubscribed_uplink_is_shared_by_its_pod():
    cluster = FatTree(bandwidth=B, latency_s=L, core_latency_s=L, message_s=M, hosts_per_pod=4, oversubscription=8)
    crossing = [(rank, (rank + 4) % 8, 1, False) for rank in range(8)]
    # Four hosts with 4 B / 8 of uplink: an eighth of a card for each.
    assert simulate(make_program(8, crossing), S, cluster).total_s == exactly(2 * L + M + 8 * S / B)
    inside = [(rank, rank ^ 1, 1, False) for rank in range(8)]
    assert simulate(make_program(8, inside), S, cluster).total_s == exactly(A + S / B)
    # The one transfer inside shares its card with one that crosses, and so has all of it but an eighth.
    both = [*crossing[:3], (0, 1, 1, False)]
    assert simulate(make_program(8, both), S, cluster).total_s == exactly(2 * L + 2 * M + 6 * S / B)


def test_messages_of_one_round_follow_each_other_at_their_rank():
    fan_in = make_program(5, [(rank, 0, 1, True) for rank in range(1, 5)])
    assert simulate(fan_in, S, SWITCH).total_s == exactly(L + 4 * M + 4 * S / B + 4 * S * G)


def test_a_round_ends_with_whoever_adds_longest():
    """Rank 3 has its copy last, but rank 0 is still adding then."""
    slow_adding = SWITCH.model_copy(update={"reduce_speed": B / 2})
    program = make_program(4, [(1, 0, 3, True), (2, 3, 4, False)], num_chunks=4)
    cost = simulate(program, S, slow_adding)
    assert cost.add_s == exactly(3 / 4 * S / (B / 2))
    assert cost.total_s == exactly(A + 3 / 4 * S / B + 3 / 4 * S / (B / 2))


def test_what_a_time_is_made_of():
    cost = simulate(find_algorithm("ring")().build(Collective.ALL_REDUCE, 8), S, SWITCH)
    assert cost.add_s == exactly(7 / 8 * S * G)
    assert cost.transfer_s == exactly(14 * (A + S / (8 * B)))
    assert cost.codec_s == 0
    assert cost.total_s == cost.transfer_s + cost.add_s


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_one_rank_pays_nothing_and_no_bytes_pay_latency(algorithm, collective):
    program = find_algorithm(algorithm)().build(collective, 1)
    assert simulate(program, S, SWITCH).total_s == 0
    assert time_s(algorithm, collective, 4, num_bytes=0) >= A


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
@pytest.mark.parametrize("n", [2, 6, 8, 17])
def test_like_rounds_are_priced_once_and_cost_what_they_would_one_by_one(algorithm, collective, n):
    program = find_algorithm(algorithm)().build(collective, n)
    expanded = Program(collective, algorithm, n, program.num_chunks, program.num_rounds, program.round)
    assert len(expanded.round_classes()) == program.num_rounds
    cluster = FatTree(hosts_per_pod=3, host_bandwidths={1: "7gbit"})
    one_by_one, by_class = (simulate(which, S, cluster) for which in (expanded, program))
    assert by_class.total_s == exactly(one_by_one.total_s)
    assert by_class.add_s == pytest.approx(one_by_one.add_s)


def test_4096_ranks():
    n = 4096
    program = find_algorithm("ring")().build(Collective.ALL_REDUCE, n)
    assert program.num_rounds == 8190
    assert len(program.round_classes()) == 2
    assert simulate(program, S, SWITCH).total_s == exactly(2 * (n - 1) * (A + S / (n * B)) + (n - 1) / n * S * G)
    pods = FatTree(host_bandwidths=dict.fromkeys(range(0, n, 7), "10gbit"))
    slowest = time_s("ring", "all_gather", n, Switch(bandwidth="10gbit", latency_s=1e-5))
    assert time_s("ring", "all_gather", n, pods) == pytest.approx(slowest, rel=1e-2)
    assert time_s("halving_doubling", "all_reduce", n, pods) > time_s("halving_doubling", "all_reduce", n)


def test_sizes_must_be_numbers_of_bytes():
    program = find_algorithm("ring")().build(Collective.ALL_REDUCE, 2)
    for wrong in (-1, np.inf, np.nan):
        with pytest.raises(SettingsError, match=r"^num_bytes must be at least 0 and finite, but got"):
            simulate(program, wrong, SWITCH)
