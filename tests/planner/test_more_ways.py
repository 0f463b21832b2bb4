"""Offloading, buckets and power caps as ways of a plan: what each costs, saves, and where it is proposed."""

from dataclasses import replace

import pytest
from problems import make_machines, make_problem, posterior

from paceline.errors import SettingsError
from paceline.planner.candidate import Candidate, Division
from paceline.planner.limits import list_machines
from paceline.planner.planning import describe_choice, make_plan, to_plan
from paceline.planner.pool import find_needs, price_needs
from paceline.planner.problem import DEFAULT_BUCKET_BYTES
from paceline.planner.space import BUCKETS, Legality, make_space
from paceline.simulator.training.answers import answer_described
from paceline.topology import Cluster

PLAIN = Candidate(0, Division(data=2), 2, "none", "bf16")


def ways_of(problem, *candidates):
    """Return the pool of some candidates."""
    return price_needs(problem, posterior(), [find_needs(problem, one) for one in candidates])


def test_what_is_offloaded_frees_the_device_takes_the_host_and_time():
    problem = make_problem(make_machines(num_ranks=2))
    offloads = ("none", "activations", "optimizer", "both")
    pool = ways_of(problem, *(replace(PLAIN, offload=one) for one in offloads))
    none, activations, optimizer, both = pool.needs
    times = pool.step_s.tolist()
    parameters = problem.num_parameters
    assert none.memory_bytes - optimizer.memory_bytes == pytest.approx(1.06 * 8 * parameters)
    assert none.memory_bytes - both.memory_bytes == pytest.approx(
        (none.memory_bytes - optimizer.memory_bytes) + (none.memory_bytes - activations.memory_bytes)
    )
    assert optimizer.host_bytes == pytest.approx(2 * 16 * parameters)
    assert activations.host_bytes == pytest.approx(2 * (none.memory_bytes - activations.memory_bytes) / 1.06)
    assert none.host_bytes == 0
    assert times[0] < min(times[1:])
    assert times[3] > max(times[1:3])
    link_s, host_s = 12 * parameters / 25e9, 30 * parameters / (200e9 / 2)
    assert times[2] - times[0] > 0.9 * (link_s + host_s) - pool.terms[0].max()
    spreads = pool.spreads(range(4))
    assert spreads[2] > spreads[0]
    assert answer_described([optimizer.description], posterior())[0]["terms"]["offload"] == pytest.approx(
        link_s + host_s, rel=0.2
    )


def test_a_host_that_is_too_small_is_why_offloading_does_not_fit():
    small = make_machines("switch", 2, device="a100_40gb", host={"memory_bytes": 1e9}, devices_per_host=1)
    problem = make_problem(small)
    needs = find_needs(problem, replace(PLAIN, offload="optimizer"))
    assert needs.memory_bytes < 40e9
    assert not needs.fits


def test_smaller_buckets_hide_more_and_cost_more_messages_and_the_default_is_what_the_contract_prices():
    problem = make_problem(make_machines("switch", 2, bandwidth="1gbit", device="a100_40gb"))
    sizes = (None, DEFAULT_BUCKET_BYTES, *BUCKETS)
    pool = ways_of(problem, *(replace(PLAIN, bucket_bytes=one) for one in sizes))
    usual, same, small, large = pool.needs
    assert same.description.exchanges == usual.description.exchanges
    assert pool.step_s[0] == pool.step_s[1]
    messages = [one.description.exchanges[0].num_messages for one in (usual, small, large)]
    assert messages[1] > messages[0] > messages[2]
    parts = [one.description.case.exchange.parts for one in (small, usual, large)]
    assert parts == pytest.approx([25 / 8, 1.0, 25 / 64], rel=0.05)
    assert problem.has_row(PLAIN)
    assert not problem.has_row(small.candidate)


def test_offloading_and_buckets_are_of_whole_models_on_gpus_alone():
    found = make_space(make_problem(make_machines(num_ranks=4))).candidates
    special = [one for one in found if one.offload != "none" or one.bucket_bytes is not None]
    assert {one.offload for one in special} == {"none", "activations", "optimizer", "both"}
    assert {one.bucket_bytes for one in special} == {None, *BUCKETS}
    assert all(one.division.is_plain for one in special)
    on_cpus = make_problem(make_machines("switch", 4, device="cpu", devices_per_host=1))
    assert all(one.offload == "none" and one.bucket_bytes is None for one in make_space(on_cpus).candidates)
    refusal = Legality(on_cpus).find_refusal(replace(PLAIN, offload="both"))
    assert "memory.offload must be none on CPUs" in refusal


def test_a_model_too_large_for_its_devices_is_offloaded_and_the_plan_has_the_settings():
    large = {"name": "decoder", "num_layers": 24, "width": 4096, "num_heads": 32}
    alone = make_problem(make_machines("dgx_a100", 1), model=large, global_batch=4)
    plan = make_plan(alone, posterior())
    assert plan.candidate.offload in ("optimizer", "both")
    assert to_plan(plan, None, "").overrides["memory.offload"] == plan.candidate.offload
    assert "optimizer offloaded" in describe_choice(plan)[0]


def test_a_power_cap_saves_energy_takes_time_and_is_said_to_be_set_by_hand():
    cluster = Cluster.model_validate("dgx_h100")
    free, capped = list_machines([("dgx_h100", cluster)], 8, None, ["dgx_h100=98"], caps=["500W"])
    assert (free.cap_w, capped.cap_w, capped.name, capped.price_per_hour) == (None, 500, "dgx_h100 at 500 W", 98)
    problem = make_problem(free, capped)
    pool = ways_of(problem, *(Candidate(one, Division(data=8), 1, "none", "bf16") for one in (0, 1)))
    (fast_s, _, much_j, _), (slow_s, _, little_j, _) = pool.objectives().tolist()
    assert fast_s < slow_s < fast_s / capped.cluster.device.clock_share
    assert little_j < much_j
    words = describe_choice(make_plan(make_problem(capped), posterior()))
    assert any("nvidia-smi --power-limit=500" in line for line in words)
    for cap in ("700W", "75W", "no"):
        with pytest.raises(SettingsError, match="--cap must be"):
            list_machines([("dgx_h100", cluster)], 8, None, [], caps=[cap])
