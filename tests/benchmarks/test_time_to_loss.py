import json

import pytest
from pydantic import ValidationError

from paceline.benchmarks import TimeToLossBenchmark, Workers
from paceline.benchmarks.language import LanguageTask, make_rule_side
from paceline.benchmarks.time_to_loss import train_sides, train_start
from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from paceline.sync import EveryStep, LocalSGD, StreamingDiLoCo
from paceline.testing import check_exits, run_processes

TINY = LanguageTask(
    width=16, num_layers=1, num_heads=2, sequence_length=8, max_bytes=300_000, held_out_samples=4, schedule="constant"
)

CURVES = {
    "ddp": [[5, 3.0], [10, 2.5], [15, 2.3], [20, 2.2]],
    "post_local_sgd": [[10, 2.8], [20, 2.4]],
    "diloco int8": [[10, 2.6], [20, 2.3]],
    "streaming_diloco int8": [[5, 3.0], [10, 2.9], [15, 2.39], [20, 2.3]],
    "local_sgd": [[10, 2.9], [20, 2.5]],
}
STEP_S = {"ddp": 5.0, "post_local_sgd": 0.625, "diloco int8": 0.25, "streaming_diloco int8": 0.2, "local_sgd": 0.5}
SIDES = tuple(name for name in STEP_S if name != "ddp")
SLOWER = (1.0, 4.0, 0.5)
"""Load of the machine by others, by round."""


@pytest.fixture
def starts(monkeypatch):
    """Workers answer at once, as if a step of DDP took 5 s, and one without an exchange 0.2 s; what they are asked."""
    asked = []

    def start(workers, function, task, plans, num_compute_steps):
        if function is train_start:
            asked.append((workers, {"start_steps": plans, "start": num_compute_steps}))
            return {}
        assert function is train_sides
        json.dumps([task, plans])  # it goes to hosts so
        asked.append((workers, {plan["name"]: plan for plan in plans}))
        judged = plans[0]["judge_interval"] > 0

        def answer(rank, place, plan):
            name = plan["name"]
            slower = SLOWER[place // len({plan["name"] for plan in plans})]
            if judged:
                return {"ended_s": [], "compute_s": 9.0, "curve": CURVES[name]}
            ended_s = [slower * (number + 1) * STEP_S[name] - 0.1 * rank for number in range(plan["num_steps"])]
            seconds = {"ended_s": ended_s, "compute_s": slower * 0.2 - 0.1 * rank}
            return {**seconds, "curve": [[plan["num_steps"], 2.0]]}

        return {
            rank: [answer(rank, place, plan) for place, plan in enumerate(plans)] for rank in range(workers.num_workers)
        }

    monkeypatch.setattr(Workers, "start", start)
    return asked


def measure(**changes):
    rules = {side: {"name": side.split()[0], "period": 10} for side in SIDES if side != "post_local_sgd"}
    settings = {"period": 10, "rules": rules, "sides": SIDES, "task": {"num_steps": 20}} | changes
    settings = {"target_losses": (2.4, 2.6), "judge_interval": 5} | settings
    return TimeToLossBenchmark(workers={"num_workers": 2, "num_hosts": 2, "bandwidth": "10mbit"}, **settings).measure()


def test_each_side_is_timed_to_the_step_at_which_it_reached_the_loss(starts):
    measure()
    (local, judged), (hosts, timed) = starts
    assert (local.num_hosts, hosts.num_hosts) == (1, 2), "the curve does not depend on the network"
    assert {name: plan["judge_interval"] for name, plan in judged.items()} == {
        "ddp": 5,
        "post_local_sgd": 10,
        "local_sgd": 10,
        "diloco int8": 10,
        "streaming_diloco int8": 5,
    }
    assert {name: (plan["num_steps"], plan["judge_interval"]) for name, plan in timed.items()} == {
        "ddp": (15, 0),
        "post_local_sgd": (20, 0),
        "local_sgd": (20, 0),
        "diloco int8": (20, 0),
        "streaming_diloco int8": (15, 0),
    }
    assert timed["diloco int8"]["rule"]["period"] == 10
    assert timed["ddp"]["rule"] is None


def test_speed_ups_stand_beside_the_ceiling(starts):
    rows = {(row.case, row.metric, row.reference_name): row for row in measure()}
    place = "period 10, 2 hosts at 10 Mbit/s"
    step = rows["ddp, 2 hosts at 10 Mbit/s", "step", "no exchange"]
    assert (step.ours, step.reference, step.ratio) == (5.0, 0.2, 25.0)
    speed_up = rows[f"diloco int8, {place}", "speed-up over DDP to loss 2.4", "ceiling T_ddp / T_compute"]
    assert (speed_up.ours, speed_up.reference, speed_up.ratio) == (15.0, 25.0, 0.6)
    streaming = rows[f"streaming_diloco int8, {place}", "time to loss 2.4, 15 steps", "DDP, 15 steps"]
    assert (streaming.ours, streaming.reference) == (pytest.approx(3.0), 75.0)
    other = rows[f"streaming_diloco int8, {place}", "time to loss 2.4", "PostLocalSGD, 20 steps"]
    assert other.ratio == pytest.approx(3.0 / 12.5)
    earlier = rows[f"diloco int8, {place}", "time to loss 2.6, 10 steps", "DDP, 10 steps"]
    assert (earlier.ours, earlier.reference) == (2.5, 50.0)
    a_step = rows[f"diloco int8, {place}", "speed-up of a step", "ceiling T_ddp / T_compute"]
    assert (a_step.ours, a_step.reference, a_step.ratio) == (20.0, 25.0, 0.8)
    losses = {row.case: row.ours for row in rows.values() if row.metric == "held-out loss after 20 steps"}
    assert losses == {
        f"post_local_sgd, {place}": 2.4,
        f"local_sgd, {place}": 2.5,
        f"diloco int8, {place}": 2.3,
        f"streaming_diloco int8, {place}": 2.3,
    }
    reached = {row.case.partition(" ")[0] for row in rows.values() if row.metric.startswith("time to loss 2.4")}
    assert "local_sgd," in {row.case.partition(" ")[0] for row in rows.values() if "2.6" in row.metric}
    assert "local_sgd," not in reached, "it came to 2.5 only"
    again = rows["ddp, 2 hosts at 10 Mbit/s", "held-out loss of the timed training, 15 steps", "the judged one"]
    assert (again.ours, again.reference) == (2.0, 2.3)


def test_of_several_rounds_medians_are_told(starts):
    assert measure(num_rounds=3) == measure()


def test_steps_that_are_not_judged_are_still_those_of_the_schedule(starts):
    measure(num_judged_steps=15, target_losses=(2.4,))
    assert {plan["num_steps"] for plan in starts[0][1].values()} == {15}
    with pytest.raises(ValidationError, match=r"num_judged_steps must be at most task\.num_steps=20, but got 30"):
        measure(num_judged_steps=30)


def test_all_sides_go_on_from_what_ddp_makes_of_the_start(starts):
    measure(task={"num_steps": 25}, start_steps=5)
    (workers, began), (_, judged), (_, timed) = starts
    assert workers.bandwidth is None
    assert began["start_steps"] == 5
    for plan in [*judged.values(), *timed.values()]:
        assert (plan["start"], plan["start_steps"]) == (began["start"], 5)
    assert {plan["num_steps"] for plan in judged.values()} == {20}


def test_to_go_on_from_a_start_is_to_have_done_its_steps(tmp_path):
    path = str(tmp_path / "start.pt")
    task = TINY.model_dump(mode="json")
    plan = {"name": "ddp", "rule": None, "period": 3, "judge_interval": 0}
    plans = [{**plan, "num_steps": 6}, {**plan, "num_steps": 4, "start": path, "start_steps": 2}]
    for function, arguments in [
        ("train_start", {"task": task, "num_steps": 2, "path": path}),
        ("train_sides", {"task": task, "plans": plans, "num_compute_steps": 2}),
    ]:
        results = run_processes(2, f"paceline.benchmarks.time_to_loss:{function}", arguments, timeout_s=55)
        check_exits(results)
    straight, gone_on = results[0].value
    assert gone_on["curve"][0][1] == straight["curve"][0][1]


def test_a_loss_that_ddp_does_not_reach_is_refused(starts):
    with pytest.raises(
        SettingsError,
        match=r"target_losses must be some that DDP reaches in 20 steps, .* \[1\.5\], and came to 2\.2",
    ):
        measure(target_losses=(2.5, 1.5))
    assert len(starts) == 1


def test_fewer_steps_than_a_period_are_refused():
    with pytest.raises(ValidationError, match="at least the longest period, without start_steps, but got 5, 16 and 0"):
        TimeToLossBenchmark(sides=["every_step one_bit", "diloco"], task={"num_steps": 5})


def test_a_side_is_a_rule_and_its_codec_by_name():
    with pytest.raises(ValidationError, match="no_codec"):
        TimeToLossBenchmark(sides=["every_step no_codec"])
    benchmark = TimeToLossBenchmark(sides=["streaming_diloco int8", "every_step"])
    assert [benchmark._rule(side) for side in benchmark.sides] == [StreamingDiLoCo(codec="int8"), EveryStep()]


@pytest.mark.parametrize("name", ["diloco", "ddp"], ids=["of no side", "of torch's"])
def test_a_rule_that_no_side_uses_is_refused(name):
    with pytest.raises(ValidationError, match=f"rules must be of sides, and not of torch's, but got {name} beside"):
        TimeToLossBenchmark(sides=["diloco int8", "ddp"], rules={name: "local_sgd"})


def test_sides_begin_alike_and_see_the_same_data():
    def run(group, rule):
        splits = TINY.open()
        side = make_rule_side(TINY, splits, group, rule)
        losses = [TINY.judge(side.module, splits, group)]
        batches = iter(TINY.load(splits, group))
        for number in range(4):
            side.step(number, next(batches))
        with side.consensus():
            losses.append(TINY.judge(side.module, splits, group))
        side.close()
        return losses

    every = LocalGroup.run(2, lambda group: run(group, EveryStep()))
    local = LocalGroup.run(2, lambda group: run(group, LocalSGD(period=4)))
    assert every[0] == every[1], "both judge all samples"
    assert local[0][0] == every[0][0]
    assert local[0][1] != every[0][1]
    assert max(local[0][1], every[0][1]) < every[0][0]


def test_torchs_post_local_sgd_averages_as_local_sgd_does():
    plan = {"period": 3, "num_steps": 6, "judge_interval": 3}
    plans = [
        {"name": "post_local_sgd", "rule": None, **plan},
        {
            "name": "local_sgd",
            "rule": {"name": "local_sgd", "period": 3, "local_beta1": None, "scale_rate": False},
            **plan,
        },
        {"name": "ddp", "rule": None, **plan},
        {"name": "ddp", "rule": None, **plan, "judge_interval": 0},
        {"name": "ddp power_sgd", "rule": None, **plan},
    ]
    # As hosts start it: one import for all workers.
    arguments = {"task": TINY.model_dump(mode="json"), "plans": plans, "num_compute_steps": 2}
    results = run_processes(2, "paceline.benchmarks.time_to_loss:train_sides", arguments, timeout_s=55)
    check_exits(results)
    torchs, ours, ddp, unjudged, coded = results[0].value
    assert [step for step, _ in ours["curve"]] == [3, 6]
    assert ours["curve"][1][1] == pytest.approx(torchs["curve"][1][1], rel=1e-5)
    assert ddp["curve"][1][1] != pytest.approx(ours["curve"][1][1], rel=1e-5)
    assert unjudged["curve"] == [ddp["curve"][1]], "judging changes nothing"
    assert coded["curve"][1][1] != ddp["curve"][1][1]
    assert coded["curve"][1][1] == pytest.approx(ddp["curve"][1][1], rel=0.05)
    assert all(0 < side["ended_s"][0] < side["ended_s"][-1] for side in results[1].value)
    assert [len(side["ended_s"]) for side in results[1].value] == [6, 6, 6, 6, 6]
    assert min(side["compute_s"] for side in results[1].value) > 0
