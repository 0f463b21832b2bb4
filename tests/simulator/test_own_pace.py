"""Ranks at their own pace: the same times where all are alike, truer ones where they are not."""

import pytest
from simulated import PAIRS, make_program

from paceline.programs import Collective, find_algorithm
from paceline.simulator import CodecCost, simulate
from paceline.topology import DGXA100, FatTree, Switch

B, L, M, G = 12.5e9, 5e-6, 2e-6, 1 / 50e9
A = L + M
S = 1e8
SWITCH = Switch(bandwidth=B, latency_s=L, message_s=M, reduce_speed=1 / G)
CODEC = CodecCost(compression=4, encode_bytes_per_s=5e9, decode_bytes_per_s=7e9, at_every_hop=True)


def exactly(value):
    return pytest.approx(value, rel=1e-9, abs=0)


def own_s(program, num_bytes=S, cluster=SWITCH, **options):
    return simulate(program, num_bytes, cluster, own_pace=True, **options).total_s


def together_s(program, num_bytes=S, cluster=SWITCH, **options):
    return simulate(program, num_bytes, cluster, **options).total_s


@pytest.mark.parametrize("codec", [None, CODEC], ids=["plain", "codec"])
@pytest.mark.parametrize("name", ["ring", "direct", "halving_doubling", "torus", "hierarchical"])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_ranks_that_are_alike_stay_together(name, n, codec):
    program = find_algorithm(name)().build(Collective.ALL_REDUCE, n)
    own, together = (simulate(program, S, SWITCH, codec=codec, own_pace=pace) for pace in (True, False))
    assert own.total_s == exactly(together.total_s)
    assert own.transfer_s == pytest.approx(together.transfer_s)
    assert own.add_s == pytest.approx(together.add_s)
    assert own.codec_s == pytest.approx(together.codec_s)


def test_pairs_that_never_meet_do_not_wait_for_each_other():
    program = make_program(4, [(0, 1, 9, True), (2, 3, 1, True)], [(0, 1, 1, True), (2, 3, 9, True)], num_chunks=10)
    assert own_s(program) == exactly(2 * A + S / B + S * G)
    assert together_s(program) == exactly(2 * A + 1.8 * (S / B + S * G))


def test_a_send_waits_for_its_receiver():
    busy_then_free = make_program(3, [(0, 1, 1, True)], [(2, 1, 1, True)])
    assert own_s(busy_then_free) == exactly(2 * (A + S / B + S * G))


def test_a_rank_ends_its_round_before_the_next():
    chain = make_program(4, [(0, 1, 1, False)], [(1, 2, 1, False)], [(2, 3, 1, False)])
    assert own_s(chain) == exactly(3 * (A + S / B))


def test_transfers_of_different_rounds_share_links():
    """Rank 2 goes on while 1 -> 3 is under way to the same host, and its second message has half of the card."""
    hosts = Switch(devices_per_host=2, bandwidth=B, latency_s=0, message_s=0)
    program = make_program(
        6, [(0, 2, 1, False), (1, 3, 3, False)], [(4, 2, 1, False)], [(2, 4, 4, False)], num_chunks=4
    )
    # In quarters of S / B: 0 -> 2 until 2, 4 -> 2 until 4 (alone it would be 3), 2 -> 4 until 8.
    assert own_s(program, cluster=hosts) == exactly(8 / 4 * S / B)
    # Together: 0 -> 2 until 2 and 1 -> 3 until 4, then 1, then 4.
    assert together_s(program, cluster=hosts) == exactly(9 / 4 * S / B)


def test_a_pipelined_tree_profits_where_links_differ():
    """Fast links inside hosts do not wait for slow ones: what makes trees good on hosts of many devices."""
    program = find_algorithm("double_tree")().build(Collective.BROADCAST, 16)
    assert own_s(program, cluster=DGXA100()) < 0.7 * together_s(program, cluster=DGXA100())


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
@pytest.mark.parametrize("n", [3, 8])
def test_one_slow_host_costs_no_more_than_if_all_waited(algorithm, collective, n):
    """True of these programs on a switch; on shared uplinks a rank that runs ahead can be in the way of others."""
    program = find_algorithm(algorithm)().build(collective, n)
    slow = SWITCH.model_copy(update={"host_bandwidths": {1: B / 7}})
    assert own_s(program, cluster=slow) <= together_s(program, cluster=slow) * (1 + 1e-9)


def test_times_are_made_of_what_was_waited_for():
    program = make_program(3, [(0, 1, 1, True)], [(1, 2, 1, True)])
    cost = simulate(program, S, SWITCH, own_pace=True, codec=CODEC)
    assert cost.add_s == exactly(2 * S * G)
    assert cost.codec_s == exactly(2 * (S / 5e9 + S / 7e9))
    assert cost.transfer_s == exactly(2 * (A + S / (4 * B)))


def test_no_transfers_take_no_time():
    assert own_s(find_algorithm("ring")().build(Collective.ALL_REDUCE, 1)) == 0


def test_uneven_pods_end():
    """Hundreds of events that nearly coincide."""
    pods = FatTree(hosts_per_pod=3, oversubscription=3, host_bandwidths={host: B / (1 + host) for host in range(17)})
    for name in ("ring", "double_tree", "direct"):
        program = find_algorithm(name)().build(Collective.ALL_REDUCE, 17)
        assert (
            together_s(program, cluster=pods) / 3 < own_s(program, cluster=pods) < 2 * together_s(program, cluster=pods)
        )
