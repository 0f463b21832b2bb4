import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.errors import SettingsError
from paceline.registry import list_variants
from paceline.topology import DGXA100, DGXH100, Cluster, FatTree, Loopback, Switch, TorusCluster, squarest

always = settings(deadline=None, derandomize=True)
CLUSTERS = list_variants(Cluster)


def route(network, source, destination):
    """Return the links of one route."""
    (links,) = network.route(np.array([source]), np.array([destination]))
    return [int(link) for link in links if link >= 0]


def capacities(network, source, destination):
    return network.capacities_bytes_per_s[route(network, source, destination)].tolist()


def latency_s(network, source, destination):
    routes = network.route(np.array([source]), np.array([destination]))
    return network.route_latencies_s(routes)[0]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_joins_all_ranks_by_links_that_exist(name):
    network = CLUSTERS[name]().network(24)
    sources, destinations = (grid.ravel() for grid in np.meshgrid(np.arange(24), np.arange(24)))
    apart = sources != destinations
    routes = network.route(sources[apart], destinations[apart])
    assert routes.shape[0] == 24 * 23
    assert (routes < len(network.capacities_bytes_per_s)).all()
    assert (routes >= 0).any(axis=1).all()
    assert len(network.latencies_s) == len(network.capacities_bytes_per_s)
    assert (network.capacities_bytes_per_s > 0).all()
    used = [links[links >= 0] for links in routes]
    assert all(len(set(links.tolist())) == len(links) for links in used), "no route takes a link twice"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_survives_json(name):
    cluster = CLUSTERS[name](bandwidth="3gbit", latency_s=1e-3)
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize("name", CLUSTERS)
def test_bandwidth_is_that_of_the_network(name):
    slow, fast = (CLUSTERS[name]().with_bandwidth(text).network(24) for text in ("1gbit", "2gbit"))
    assert capacities(fast, 0, 23) == pytest.approx([2 * capacity for capacity in capacities(slow, 0, 23)])
    assert CLUSTERS[name]().with_bandwidth("1gbit").bandwidth == 1.25e8
    # Scaling.predict_each routes once for all bandwidths.
    sources, destinations = (ranks.ravel() for ranks in np.indices((24, 24)))
    assert np.array_equal(slow.route(sources, destinations), fast.route(sources, destinations))
    assert np.array_equal(slow.latencies_s, fast.latencies_s)
    assert (slow.message_s, slow.reduce_bytes_per_s) == (fast.message_s, fast.reduce_bytes_per_s)


def test_routes_of_4096_ranks_are_made_on_demand():
    network = Switch().network(4096)
    assert len(network.capacities_bytes_per_s) < 5 * 4096
    ranks = np.arange(4096)
    assert network.route(ranks, np.roll(ranks, -1)).shape == (4096, 2)


def test_a_switch_has_a_cable_up_and_one_down_for_each_host():
    network = Switch(bandwidth="10gbit", latency_s=7e-6).network(3)
    assert capacities(network, 0, 1) == [1.25e9, 1.25e9]
    assert latency_s(network, 0, 1) == pytest.approx(7e-6)
    assert not set(route(network, 0, 1)) & set(route(network, 1, 0)), "both ways at once"
    assert route(network, 0, 1)[0] == route(network, 0, 2)[0], "one card sends it all"
    assert route(network, 0, 2)[1] == route(network, 1, 2)[1], "and one receives it"


def test_devices_of_a_host_talk_inside_it():
    cluster = Switch(devices_per_host=4, local_bandwidth="40GB/s", local_latency_s=1e-6, bandwidth="10gbit")
    network = cluster.network(8)
    assert capacities(network, 0, 3) == [40e9, 40e9]
    assert latency_s(network, 0, 3) == pytest.approx(1e-6)
    assert capacities(network, 0, 4) == [1.25e9, 1.25e9]
    assert route(network, 0, 4) == route(network, 3, 7), "a host's devices share its card"


def test_devices_spread_over_the_cards_of_their_host():
    network = Switch(devices_per_host=4, nics_per_host=2).network(8)
    assert route(network, 0, 4) == route(network, 2, 6)
    assert not set(route(network, 0, 4)) & set(route(network, 1, 5))


@pytest.mark.parametrize(("cluster", "card"), [(DGXA100(), 25e9), (DGXH100(), 50e9)])
def test_each_device_of_a_dgx_has_a_card(cluster, card):
    network = cluster.network(16)
    links = [tuple(route(network, device, device + 8)) for device in range(8)]
    assert len(set(links)) == 8
    assert capacities(network, 3, 11) == [card, card]
    assert min(capacities(network, 0, 1)) > 5 * card
    assert cluster.devices_per_island == 8


def test_single_hosts_can_be_slower():
    network = Switch(bandwidth="10gbit", host_bandwidths={1: "1gbit", 90: "1gbit"}).network(3)
    assert capacities(network, 0, 1) == [1.25e9, 1.25e8]
    assert capacities(network, 1, 2) == [1.25e8, 1.25e9]
    assert capacities(network, 0, 2) == [1.25e9, 1.25e9]


def test_a_hosts_bandwidth_must_be_of_a_host_there_is():
    with pytest.raises(ValidationError, match=r"must be of hosts from 0 to num_hosts - 1, but got 4"):
        Switch(num_hosts=4, host_bandwidths={4: "1gbit"})
    with pytest.raises(ValidationError, match=r"but got -1"):
        Switch(host_bandwidths={-1: "1gbit"})


def test_pods_share_their_uplink():
    cluster = FatTree(bandwidth="10gbit", hosts_per_pod=4, oversubscription=2, latency_s=5e-6, core_latency_s=3e-6)
    network = cluster.network(12)
    assert capacities(network, 0, 3) == [1.25e9] * 2
    assert capacities(network, 0, 4) == [1.25e9, 1.25e9, 2.5e9, 2.5e9], "4 hosts x 10 Gb/s / 2"
    assert latency_s(network, 0, 3) == pytest.approx(5e-6)
    assert latency_s(network, 0, 4) == pytest.approx(8e-6)
    assert route(network, 0, 4)[2] == route(network, 1, 9)[2], "pod 0 goes up by one cable"
    assert route(network, 0, 9)[3] == route(network, 5, 8)[3], "pod 2 comes down by one"
    assert not set(route(network, 0, 4)[2:]) & set(route(network, 4, 0)[2:])
    assert cluster.devices_per_island == 4


def test_ranks_must_fit():
    with pytest.raises(SettingsError, match=r"num_hosts x devices_per_host = 2 x 4 = 8, but got 9; raise num_hosts"):
        Switch(num_hosts=2, devices_per_host=4).network(9)
    with pytest.raises(SettingsError, match=r"the torus, 2 x 3 = 6, but got 7; enlarge shape"):
        TorusCluster(shape=(2, 3)).network(7)


@pytest.mark.parametrize("shape", [(), (0, 2), (2, 2, 2, 2)])
def test_a_torus_has_one_to_three_dims(shape):
    with pytest.raises(ValidationError, match="shape"):
        TorusCluster(shape=shape)


@pytest.mark.parametrize(("num_ranks", "rows"), [(1, 1), (7, 1), (12, 3), (16, 4), (4096, 64)])
def test_a_torus_is_as_square_as_can_be(num_ranks, rows):
    assert squarest(num_ranks) == (rows, num_ranks // rows)
    assert len(TorusCluster().network(num_ranks).capacities_bytes_per_s) == 4 * num_ranks


@always
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), data=st.data())
def test_torus_routes_are_shortest_walks_to_the_goal(shape, data):
    num_devices = math.prod(shape)
    source, destination = (data.draw(st.integers(0, num_devices - 1)) for _ in range(2))
    here, goal = (np.array(np.unravel_index(rank, shape)) for rank in (source, destination))
    hops = np.abs(here - goal)
    shortest = int(np.minimum(hops, np.array(shape) - hops).sum())
    links = route(TorusCluster(shape=shape).network(num_devices), source, destination)
    assert len(links) == shortest
    for link in links:
        device, (dim, goes_down) = link // (2 * len(shape)), divmod(link % (2 * len(shape)), 2)
        assert tuple(here) == np.unravel_index(device, shape), "each cable begins where the one before ended"
        here[dim] = (here[dim] + (-1 if goes_down else 1)) % shape[dim]
    assert here.tolist() == goal.tolist()


def test_all_of_one_host_share_its_memory():
    network = Loopback(bandwidth="4GB/s").network(4)
    assert route(network, 0, 1) == route(network, 3, 2) == [0]
    assert network.capacities_bytes_per_s.tolist() == [4e9]
