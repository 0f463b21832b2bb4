import pytest
from pydantic import ValidationError

from paceline.errors import SettingsError, UnknownNameError
from paceline.programs import Collective, Hierarchical, Ring, Torus, find_algorithm
from paceline.simulator import Scaling, fit_algorithm, simulate, simulate_collective
from paceline.simulator.transfers import price_round
from paceline.topology import DGXA100, FatTree, Switch, TorusCluster


def test_efficiency_is_computing_over_computing_and_what_it_cannot_hide():
    for overlap in (0.0, 0.1, 1.0):
        point = Scaling(compute_s=0.02, overlap=overlap).predict("ring", 16)
        assert point.exposed_s == pytest.approx(max(0.0, point.total_s - overlap * 0.02))
        assert point.efficiency == pytest.approx(0.02 / (0.02 + point.exposed_s))
    assert Scaling(overlap=1.0).predict("ring", 16).efficiency == 1.0
    assert Scaling().predict("ring", 1).efficiency == 1.0


def test_a_point_is_what_simulate_says():
    scaling = Scaling(num_bytes=5e6, cluster=FatTree(), collective="reduce_scatter")
    point = scaling.predict("direct", 40, 1e9)
    program = find_algorithm("direct")().build(Collective.REDUCE_SCATTER, 40)
    cost = simulate(program, 5e6, FatTree(bandwidth=1e9))
    assert (point.total_s, point.add_s) == (cost.total_s, cost.add_s)
    assert (point.algorithm, point.num_ranks, point.bandwidth_bytes_per_s) == ("direct", 40, 1e9)
    own = scaling.model_copy(update={"own_pace": True, "cluster": Switch(host_bandwidths={0: "1gbit"})})
    assert (
        own.predict("direct", 5).total_s
        == simulate_collective("reduce_scatter", 5e6, 5, own.cluster, algorithm="direct", own_pace=True).total_s
    )


def test_faster_networks_scale_better_and_more_ranks_worse():
    scaling = Scaling()
    by_bandwidth = [scaling.predict("ring", 64, gbits * 1e9 / 8).efficiency for gbits in (25, 100, 200)]
    assert by_bandwidth == sorted(by_bandwidth)
    by_ranks = [scaling.predict("ring", num_ranks).efficiency for num_ranks in (2, 16, 128, 1024)]
    assert by_ranks == sorted(by_ranks, reverse=True)
    assert len({*by_bandwidth, *by_ranks}) == 7


def test_all_points_come_with_reasons_for_those_that_cannot_be():
    scaling = Scaling(num_ranks=(4, 12), cluster=DGXA100())
    points, refusals = scaling.predict_all(["ring", "hierarchical"], [1e9, 2e9])
    assert [(p.algorithm, p.num_ranks, p.bandwidth_bytes_per_s) for p in points] == [
        ("ring", 4, 1e9), ("ring", 4, 2e9), ("ring", 12, 1e9), ("ring", 12, 2e9),
        ("hierarchical", 4, 1e9), ("hierarchical", 4, 2e9),
    ]  # fmt: skip
    assert list(refusals) == ["hierarchical"]
    assert "num_ranks must be a multiple of ranks_per_host" in refusals["hierarchical"]
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        scaling.predict_all(["rings"], [1e9])


@pytest.mark.parametrize("own_pace", [False, True])
@pytest.mark.parametrize("cluster", [Switch(host_bandwidths={0: "50gbit"}), DGXA100(), FatTree(hosts_per_pod=5)])
def test_points_together_are_those_alone_but_route_each_round_once(cluster, own_pace, monkeypatch):
    scaling = Scaling(cluster=cluster, own_pace=own_pace, num_ranks=(16,), collective="all_to_all")
    bandwidths = [1e9, 3e9, 2e10]
    calls = []
    monkeypatch.setattr(
        "paceline.simulator.program.price_round", lambda *arguments: calls.append(1) or price_round(*arguments)
    )
    alone = [scaling.predict("ring", 16, bandwidth) for bandwidth in bandwidths]
    num_alone = len(calls)
    together, _ = scaling.predict_all(["ring"], bandwidths)
    assert together == alone
    assert len({point.total_s for point in alone}) == 3
    assert num_alone == 3 * (len(calls) - num_alone) > 0


def test_algorithms_are_fitted_to_the_cluster():
    assert fit_algorithm("hierarchical", DGXA100(), 64) == Hierarchical(ranks_per_host=8)
    assert fit_algorithm("hierarchical", DGXA100(), 4) == Hierarchical(ranks_per_host=4)
    assert fit_algorithm("hierarchical", FatTree(hosts_per_pod=5), 20) == Hierarchical(ranks_per_host=5)
    assert fit_algorithm("hierarchical", Switch(), 20) == Hierarchical()
    assert fit_algorithm("torus", TorusCluster(shape=(2, 8)), 16) == Torus(num_rows=2)
    assert fit_algorithm("torus", TorusCluster(), 16) == Torus()
    assert fit_algorithm("ring", DGXA100(), 16) == Ring()


def test_an_all_to_all_is_told_by_what_one_rank_has():
    cluster = Switch(latency_s=0, message_s=0)
    cost = simulate_collective("all_to_all", 8e6, 8, cluster, algorithm="direct")
    assert cost.total_s == pytest.approx(7 / 8 * 8e6 / cluster.bandwidth)
    with pytest.raises(ValueError, match="'all_to_one' is not a valid Collective"):
        simulate_collective("all_to_one", 8e6, 8, cluster)
    with pytest.raises(SettingsError, match="must be one of"):
        simulate_collective("all_to_all", 8e6, 8, cluster, algorithm="naive")


@pytest.mark.parametrize("wrong", [{"overlap": 1.5}, {"compute_s": 0}, {"num_ranks": (0,)}, {"collective": "gossip"}])
def test_settings_must_make_sense(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Scaling(**wrong)
