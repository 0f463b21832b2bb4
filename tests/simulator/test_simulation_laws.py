"""What must hold on any cluster, whatever its links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PAIRS, clusters, host_bandwidths, scale_links, speeds

from paceline.programs import Collective, find_algorithm
from paceline.simulator import CodecCost, simulate
from paceline.topology import FatTree, Switch, TorusCluster

always = settings(deadline=None, derandomize=True, max_examples=50)
thorough = settings(deadline=None, derandomize=True, max_examples=120)

ALMOST = 1 - 1e-9
"""Room for rounding."""

sizes = st.floats(0, 1e9)
pairs = st.sampled_from(PAIRS)
codecs = st.builds(
    CodecCost,
    compression=st.floats(1, 100),
    encode_bytes_per_s=st.none() | speeds,
    decode_bytes_per_s=st.none() | speeds,
    at_every_hop=st.booleans(),
)


def build(pair, num_ranks):
    algorithm, collective = pair
    return find_algorithm(algorithm)().build(collective, num_ranks)


@thorough
@given(pairs, st.integers(2, 9), sizes, clusters, st.floats(1, 10), codecs)
def test_scaling_up_all_links_never_slows_a_program(pair, num_ranks, num_bytes, cluster, factor, codec):
    network = cluster.network(num_ranks)
    program = build(pair, num_ranks)
    before, after = (
        simulate(program, num_bytes, links, codec=codec) for links in (network, scale_links(network, factor))
    )
    assert after.total_s * ALMOST <= before.total_s
    # Nor does it help beyond its factor.
    assert after.total_s * factor >= before.total_s * ALMOST


@always
@given(pairs, st.integers(2, 9), sizes, clusters, st.floats(0, 1e9))
def test_more_bytes_never_take_less_time(pair, num_ranks, num_bytes, cluster, more):
    program = build(pair, num_ranks)
    few, many = (simulate(program, size, cluster).total_s for size in (num_bytes, num_bytes + more))
    assert few * ALMOST <= many


def crossing_bytes(collective, num_inside, num_ranks, num_bytes, has_root):
    """Return the bytes that must leave a set of ranks, and those that must enter it, whatever the algorithm."""
    inside, outside = num_inside / num_ranks, 1 - num_inside / num_ranks
    return {
        Collective.ALL_REDUCE: (num_bytes, num_bytes),
        Collective.REDUCE_SCATTER: (outside * num_bytes, inside * num_bytes),
        Collective.ALL_GATHER: (inside * num_bytes, outside * num_bytes),
        Collective.BROADCAST: (num_bytes, 0.0) if has_root else (0.0, num_bytes),
        Collective.ALL_TO_ALL: (inside * outside * num_bytes, inside * outside * num_bytes),
    }[collective]


@thorough
@given(pairs, st.integers(2, 4), sizes, host_bandwidths, st.integers(1, 3), st.data())
def test_no_program_beats_the_cards_of_any_set_of_hosts(pair, devices_per_host, num_bytes, slow, num_hosts, data):
    num_hosts += 1
    num_ranks = num_hosts * devices_per_host
    cluster = Switch(devices_per_host=devices_per_host, host_bandwidths=slow, latency_s=0, message_s=0)
    hosts = data.draw(st.sets(st.integers(0, num_hosts - 1), min_size=1, max_size=num_hosts - 1))
    bandwidth = sum(float(slow.get(host, cluster.bandwidth)) for host in hosts)
    program = build(pair, num_ranks)
    crossing = crossing_bytes(program.collective, len(hosts) * devices_per_host, num_ranks, num_bytes, 0 in hosts)
    own_pace = data.draw(st.booleans())
    assert simulate(program, num_bytes, cluster, own_pace=own_pace).total_s >= max(crossing) / bandwidth * ALMOST


@always
@given(pairs, st.integers(1, 3), st.floats(1, 10), sizes, st.booleans())
def test_no_program_beats_the_uplinks_of_pods(pair, hosts_per_pod, oversubscription, num_bytes, own_pace):
    cluster = FatTree(hosts_per_pod=hosts_per_pod, oversubscription=oversubscription)
    num_ranks = 3 * hosts_per_pod
    program = build(pair, num_ranks)
    for pods in ([0], [1], [0, 2]):
        uplinks = len(pods) * hosts_per_pod * cluster.bandwidth / oversubscription
        crossing = crossing_bytes(program.collective, len(pods) * hosts_per_pod, num_ranks, num_bytes, 0 in pods)
        assert simulate(program, num_bytes, cluster, own_pace=own_pace).total_s >= max(crossing) / uplinks * ALMOST


@always
@given(pairs, st.integers(3, 4), st.integers(2, 3), sizes, st.booleans())
def test_no_program_beats_the_cables_between_halves_of_a_torus(pair, num_rows, num_columns, num_bytes, own_pace):
    cluster = TorusCluster(shape=(num_rows, num_columns))
    num_ranks = num_rows * num_columns
    program = build(pair, num_ranks)
    cables = 2 * num_columns * cluster.bandwidth  # from the upper rows: down from the last, and up around the ends
    for upper in range(1, num_rows):
        crossing = crossing_bytes(program.collective, upper * num_columns, num_ranks, num_bytes, True)
        assert simulate(program, num_bytes, cluster, own_pace=own_pace).total_s >= max(crossing) / cables * ALMOST


@always
@given(pairs, st.integers(2, 9), sizes, clusters, st.booleans())
def test_no_link_carries_more_than_its_capacity(pair, num_ranks, num_bytes, cluster, own_pace):
    program, network = build(pair, num_ranks), cluster.network(num_ranks)
    carried = np.zeros(len(network.capacities_bytes_per_s) + 1)
    for round_ in program.rounds():
        routes = network.route(round_.sources, round_.destinations)
        np.add.at(carried, routes, (round_.counts * num_bytes / program.num_chunks)[:, None])
    busiest_s = (carried[:-1] / network.capacities_bytes_per_s).max()
    assert simulate(program, num_bytes, network, own_pace=own_pace).total_s >= busiest_s * ALMOST


def time_s(name, num_bytes, num_ranks, cluster, **settings):
    program = find_algorithm(name)(**settings).build(Collective.ALL_REDUCE, num_ranks)
    return simulate(program, num_bytes, cluster).total_s


def fastest(num_bytes, num_ranks, cluster, **algorithms):
    """Return the fastest of some algorithms, each with its settings."""
    return min(algorithms, key=lambda name: time_s(name, num_bytes, num_ranks, cluster, **algorithms[name]))


FLAT = {"direct": {}, "double_tree": {}, "halving_doubling": {}, "naive": {}, "ring": {}}
"""Algorithms that know nothing of hosts."""


def test_few_rounds_win_for_small_messages_and_near_partners_for_large_ones():
    """The crossing that a model without contention does not have: there halving-doubling never loses to the ring."""
    pods = FatTree(hosts_per_pod=4, oversubscription=8)
    assert fastest(1e3, 64, pods, **FLAT) == "halving_doubling"
    assert fastest(1e9, 64, pods, **FLAT) == "ring"
    assert fastest(1e3, 64, Switch(), **FLAT) == "halving_doubling"
    assert fastest(1e9, 64, Switch(), **FLAT) == "halving_doubling"
    # Nearest first, as many bytes leave a pod as with the ring, after what stays inside.
    assert time_s("halving_doubling", 1e9, 64, pods) < 1.4 * time_s("ring", 1e9, 64, pods)


def test_a_tree_beats_the_ring_for_small_messages_only():
    few_chunks = {"double_tree": {"num_chunks": 2}, "ring": {}}
    assert fastest(1e3, 64, Switch(), **few_chunks) == "double_tree"
    assert fastest(1e9, 64, Switch(), double_tree={"num_chunks": 256}, ring={}) == "ring"


def test_hierarchical_wins_where_links_between_hosts_are_slow():
    hosts = Switch(devices_per_host=6, bandwidth="10gbit", local_bandwidth="300GB/s")
    every = {**FLAT, "hierarchical": {"ranks_per_host": 6}, "torus": {"num_rows": 2}}
    assert fastest(1e9, 48, hosts, **every) == "hierarchical"
    # At powers of two nearest first is as good.
    hosts = Switch(devices_per_host=8, bandwidth="10gbit", local_bandwidth="300GB/s")
    near_first_s = time_s("halving_doubling", 1e9, 64, hosts)
    assert near_first_s <= time_s("hierarchical", 1e9, 64, hosts, ranks_per_host=8) < time_s("ring", 1e9, 64, hosts)
    # Its inner links are worth it: on the cards alone nothing is gained.
    assert time_s("hierarchical", 1e9, 64, Switch(), ranks_per_host=8) >= time_s("halving_doubling", 1e9, 64, Switch())


def test_slow_adding_costs_those_more_who_add_more():
    """The root of a star adds everything, others what they own; inner ranks of a tree are between."""
    slower_s = {
        name: time_s(name, 1e9, 16, Switch(reduce_speed="1GB/s")) - time_s(name, 1e9, 16, Switch(reduce_speed="1TB/s"))
        for name in ("double_tree", "halving_doubling", "naive")
    }
    added_s = 1e9 * (1e-9 - 1e-12)
    assert slower_s["halving_doubling"] == pytest.approx(15 / 16 * added_s)
    assert slower_s["naive"] == pytest.approx(15 * added_s)
    assert 15 / 16 * added_s < slower_s["double_tree"] < 15 * added_s
