"""Steps that follow from a profile."""

import pytest
from steps import read

from paceline.errors import SettingsError
from paceline.planner.candidate import Machines
from paceline.planner.planning import describe_choice, make_plan
from paceline.planner.problem import PlanProblem
from paceline.planner.profiled_steps import list_profiled
from paceline.simulator.training.answers import find_posterior
from paceline.simulator.training.contract import read_row
from paceline.simulator.training.profile import (
    Profile,
    ProfiledBlock,
    ProfiledExchange,
    ProfiledMachine,
    ProfiledModel,
    ProfiledProduct,
    spread_of,
)
from paceline.simulator.training.profiled import answer_profiled
from paceline.simulator.training.traced_shape import TracedBlock, TracedEnds, TracedPass, TracedShape
from paceline.topology import Loopback

MIB = 2.0**20
NOTHING = (0.0, 0.0, 0.0, 0.0)


def make(*, wall_s=0.0, cpu_s=0.0, num_workers=2, num_cores=2, num_bytes=8 * MIB, digest="d"):
    """Return the profile of a model of two alike blocks, and exchanges whose times are in proportion to their bytes."""
    sizes = [2**power for power in range(10, 25, 2)]
    exchanges = [ProfiledExchange(num_bytes=n, wall_s=wall_s * n / MIB, cpu_s=cpu_s * n / MIB) for n in sizes]
    blocks = [ProfiledBlock(name=str(i), num_bytes=num_bytes / 2, forward_s=0.1, backward_s=0.2) for i in range(2)]
    model = ProfiledModel(
        digest=digest, title="model", samples=(4, 8), forward_s=(0.1, 0.2), backward_s=(0.2, 0.4), optimizer_s=0.03,
        step_s=0.33, num_bytes=num_bytes, blocks=tuple(blocks),
    )  # fmt: skip
    return Profile(
        machine=ProfiledMachine(host="h", processor="p", num_cores=num_cores, torch="t"),
        num_workers=num_workers,
        num_threads=1,
        cluster=Loopback(),
        products=(ProfiledProduct(rows=1, columns=1, depth=1, num_threads=1, flops_per_s=1e9),),
        memory_bytes_per_s=1e9,
        launch_s=1e-6,
        exchanges=tuple(exchanges) if num_workers > 1 else (),
        model=model,
    )


def test_without_exchanges_a_step_is_computing_and_update():
    terms = make().predict(4, 2)
    assert terms == pytest.approx({"forward": 0.1, "backward": 0.2, "optimizer": 0.03, "data": 0.0})
    assert make().predict(16, 2)["backward"] == pytest.approx(0.8)  # as two samples of each more
    assert make().predict(16, 2, 4)["forward"] == pytest.approx(4 * 0.1)


def test_exchanges_that_take_no_processor_hide_behind_backward_but_for_the_last_bucket():
    bucket_bytes = 4 * MIB
    terms = make(wall_s=0.01).predict(8, 2, bucket_bytes=bucket_bytes)
    assert terms["data"] == pytest.approx(3 * 0.01)  # 8 MiB: buckets of 1, 4 and 3
    slow = make(wall_s=1.0).predict(8, 2, bucket_bytes=bucket_bytes)
    first_ready = 0.4 * 1 / 8
    assert slow["data"] == pytest.approx(first_ready + 8 * 1.0 - 0.4)


def test_what_exchanges_take_of_the_processor_is_not_hidden():
    terms = make(wall_s=0.01, cpu_s=0.01).predict(8, 2, bucket_bytes=MIB)
    assert terms["data"] == pytest.approx(8 * 0.01)


def test_more_workers_share_the_cores_and_one_waits_for_nobody():
    profile = make(wall_s=0.01)
    two, four, one = (profile.predict(8, number) for number in (2, 4, 1))
    assert four["forward"] == pytest.approx(2 * two["forward"])
    assert one["forward"] == pytest.approx(two["forward"] / 2)  # with the other's core
    assert "data" not in one
    many = make(wall_s=0.01, num_cores=8)
    assert many.predict(8, 4)["forward"] == pytest.approx(many.predict(8, 8)["forward"] / 2)
    assert spread_of(profile, 4) > spread_of(profile, 2)
    with pytest.raises(SettingsError, match="several workers"):
        make(num_workers=1).predict(8, 2)


def test_exchanges_between_measured_sizes_are_between_their_times():
    profile = make(wall_s=1.0)
    for size in (2000, 5e5, 3e6):
        assert profile.exchange_s(size, 2)[0] == pytest.approx(size / MIB, rel=1e-6)
    assert profile.exchange_s(2**26, 2)[0] == pytest.approx(64.0)
    assert profile.exchange_s(MIB, 4)[0] == pytest.approx(1.5 * 2)  # more bytes a rank, and half a core each


def shape(digest="d"):
    block = TracedBlock(
        name="0", count=2, forward=TracedPass(), backward=TracedPass(), parameters=(1e6, 0, 0, 0),
        kept_elements=NOTHING, input_elements=(0, 10), output_elements=(0, 10),
    )  # fmt: skip
    ends = TracedEnds(forward=TracedPass(), backward=TracedPass(), working_elements=NOTHING)
    return TracedShape(title="model", digest=digest, tokens=16, blocks=(block,), ends=ends).model_dump(mode="json")


def test_rows_of_the_profiled_model_have_its_times_and_others_have_not():
    plain = {"num_ranks": 2, "micro_batch": 8, "global_batch": 16, "precision": "fp32"}
    rows = read(
        {"id": "own", "model": shape(), **plain},
        {"id": "other", "model": shape("e"), **plain},
        {"id": "shared", "model": shape(), **plain, "layout": {"sharded": 2}},
        {"id": "elsewhere", "model": shape(), **plain, "cluster": {"name": "dgx_a100"}},
        {"id": "bf16", "model": shape(), **plain, "precision": "bf16", "device": None},
    )
    profile = make(wall_s=0.01)
    answers = answer_profiled(rows, [], profile)["rows"]
    own = answers[0]
    assert own["step_s"] == pytest.approx(sum(profile.predict(8, 2).values()))
    assert sum(own["terms"].values()) == pytest.approx(own["step_s"])
    assert own["step_s_low"] < own["step_s"] < own["step_s_high"]
    assert own["energy_j_high"] / own["energy_j"] > own["step_s_high"] / own["step_s"] > 1
    assert (own["basis"], own["bound"]) == ("profile", "backward")
    assert all(answer["basis"] != "profile" for answer in answers[1:])


def plan_with(profile, posterior_of, **shapes):
    """Return the plan of the profiled model on the profiled machine, and the rows that correct its prices."""
    fields = {"id": "plan", "num_ranks": 1, "model": shape(**shapes), "optimizer": "adamw", "is_compiled": False}
    machines = (Machines("here", profile.cluster, 2),)
    problem = PlanProblem(read_row(fields, "row"), 16, machines, ("fp32",), num_steps=10)
    rows = list_profiled(problem, profile)
    return make_plan(problem, posterior_of(rows), profile=profile), rows


def test_a_plan_on_the_profiled_machine_has_its_times():
    profile = make(wall_s=0.01)
    planned, rows = plan_with(profile, find_posterior)
    assert {(row.num_ranks, row.micro_batch) for row in rows} == {(1, 16), (1, 8), (1, 4), (2, 8), (2, 4), (2, 2)}
    for row in rows:
        samples, number = row.global_batch / row.num_ranks, row.global_batch / row.num_ranks / row.micro_batch
        assert row.measured.step_s == pytest.approx(sum(profile.predict(samples, row.num_ranks, number).values()))
    division, answer = planned.candidate.division, planned.answer
    assert set(division.axes) <= {"data"}
    assert answer["basis"] == "profile"
    samples = 16 / division.num_workers
    wanted = profile.predict(samples, division.num_workers, planned.candidate.num_micro_batches)
    assert answer["step_s"] == pytest.approx(sum(wanted.values()))
    # Prices of all candidates follow: without the profile, these steps without operators take no time to speak of.
    cold, _ = plan_with(profile, lambda _: find_posterior(()))
    assert cold.choice.objectives[cold.choice.index, 0] < answer["step_s"] / 50
    assert planned.choice.objectives[planned.choice.index, 0] > answer["step_s"] / 3
    assert any("bound by backward" in line for line in describe_choice(planned))


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(SettingsError, match="--profile must be of the recipe that is planned, but it is of model"):
        plan_with(make(), find_posterior, digest="e")
