"""Ways that change what is learnt: factors are those of our benches, and they compete by time to the same loss."""

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
from problems import make_machines, make_problem, posterior
from torch import Size

from paceline.cli.overrides import apply_overrides
from paceline.compression import OneBit
from paceline.planner import inexact
from paceline.planner.candidate import Candidate, Division
from paceline.planner.choice import choose
from paceline.planner.inexact import Inexact, load_ways
from paceline.planner.plan_file import to_text
from paceline.planner.planning import describe_choice, make_plan, to_document, to_plan
from paceline.planner.pool import find_needs, make_pool, price_needs
from paceline.planner.space import Legality, make_space
from paceline.recipes.transformer_lm import run as make_run

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
SHAPES = (Size((32000, 2048)), *[Size((2048, 2048))] * 96, *[Size((2048,))] * 32)


def make_ways(optimizer="adamw", num_steps=1000, steps_refused=""):
    return Inexact(SHAPES, optimizer, num_steps, steps_refused)


def make_slow(bandwidth="200mbit", ways=None, global_batch=64):
    """Return a problem of hosts of one device each, whose links bind."""
    machines = make_machines("switch", 4, device="a100_80gb", bandwidth=bandwidth, devices_per_host=1)
    return replace(make_problem(machines, global_batch=global_batch, num_steps=1000), inexact=ways)


@pytest.mark.parametrize("way", load_ways(), ids=lambda one: f"{one.name}-{one.optimizers[0]}")
def test_factors_are_those_of_the_benches(way):
    for one in way.measured:
        rows = json.loads((BENCHMARKS / one.file).read_text())
        if one.metric == "loss_ratio":
            found = next(row for row in rows if row["codec"] == one.case)
            assert (one.ratio, one.num_seeds) == (found["loss_ratio"], found["num_seeds"])
        else:
            (found,) = (row for row in rows if (row["case"], row["metric"]) == (one.case, one.metric))
            bounds = found["ratio_lower"], found["ratio_upper"]
            assert (one.ratio, one.ratio_lower, one.ratio_upper) == (found["ratio"], *bounds)
    logs = [log(one.ratio) for one in way.measured]
    assert way.steps_factor == pytest.approx(max(1.0, exp(4 * sum(logs) / len(logs))))
    assert 0.15 < way.log_spread < 0.7
    assert way.measured[0].file in way.describe_factor()


def test_a_run_takes_the_settings_of_each_way_and_periods_are_bounded():
    for way in load_ways():
        pairs = [(path, to_text(value)) for path, value in way.settings]
        assert apply_overrides(make_run(), pairs).sync == way.rule
        assert way.period <= 16


def test_a_way_sends_and_computes_what_its_rule_says():
    ways = {way.name: way for way in make_ways().ways}
    exchanges = {name: way.exchange(SHAPES, 4, 1600) for name, way in ways.items()}
    assert exchanges["local_sgd, period 4"].sent == pytest.approx(1 / 4)
    assert exchanges["diloco, period 16"].sent == exchanges["local_sgd, period 16"].sent == pytest.approx(1 / 16)
    assert exchanges["every_step one_bit"].sent == pytest.approx(1 / 32, rel=0.02)
    assert isinstance(ways["every_step one_bit"].codec, OneBit)
    assert exchanges["every_step one_bit"].hidden_steps == 0.0
    assert exchanges["every_step int8"].hidden_steps is None
    assert exchanges["streaming_diloco, period 16"].hidden_steps == pytest.approx(4 / 16)
    coded, plain = exchanges["every_step one_bit"], exchanges["diloco, period 16"]
    assert (coded.coding, plain.coding) == (13.0, 0.0)
    assert (coded.state_bytes, plain.state_bytes) == (4.0, 8.0)


def test_what_was_not_measured_is_not_proposed_and_that_is_said():
    words = "\n".join(make_ways(num_steps=100).describe_left_out())
    assert "no bench measured their loss with adamw: codecs bf16, dgc, fp16; rules ad_psgd" in words
    assert "not proposed in 100 steps, fewer than 25 periods: local_sgd, period 16; diloco, period 16" in words
    assert "local_sgd, period 4" in {way.name for way in make_ways(num_steps=100).ways}
    assert make_ways("lamb").ways == ()
    assert {way.rule.name for way in make_ways("sgd").ways} == {"every_step"}
    uncoded = make_ways(steps_refused="with fp16, which must know")
    assert "every_step one_bit" not in {way.name for way in uncoded.ways}
    assert "steps cannot be coded with fp16" in "\n".join(uncoded.describe_left_out())
    assert {way.name for way in make_ways().list_ways(16)} < {way.name for way in make_ways().ways}
    assert make_ways().list_ways(17) == make_ways().list_ways(1) == []
    (diloco,) = (way for way in make_ways().ways if way.rule.name == "diloco")
    for division, problem in ((Division(data=16), make_slow(ways=make_ways())), (Division(data=4), make_slow())):
        refusal = Legality(problem).find_refusal(Candidate(0, division, 1, "none", "bf16", way=diloco))
        assert "diloco, period 16 is planned for 2 to 8 workers" in refusal


def test_exact_ways_alone_by_default_and_inexact_ones_by_time_to_the_same_loss():
    assert all(one.way is None for one in make_space(make_slow()).candidates)
    problem = make_slow(ways=make_ways())
    candidates = make_space(problem).candidates
    assert {one.way for one in candidates if one.way is not None} == set(problem.inexact.ways)
    assert all(one.division.is_plain for one in candidates if one.way is not None)
    chosen = [one for one in candidates if one.way is not None and one.num_micro_batches == 8]
    pool, _ = make_pool(problem, posterior(), [one for one in chosen if one.recompute == "none"])
    assert len(pool.needs) > 5
    for one, step_s in zip(pool.needs, pool.step_s.tolist(), strict=True):
        alone = price_needs(problem, posterior(), [one])
        bare = alone.posterior.estimate(alone.batch, alone.features).sum()
        assert step_s == pytest.approx(bare * one.candidate.way.steps_factor)
        assert find_needs(problem, replace(one.candidate, way=None)).memory_bytes < one.memory_bytes


def test_a_slow_link_takes_a_codec_with_more_steps_and_a_fast_one_none():
    slow = make_plan(make_slow("2gbit", make_ways(), global_batch=512), posterior())
    way = slow.candidate.way
    assert way is not None
    assert way.describe_factor() in "\n".join(describe_choice(slow))
    plan = to_plan(slow, "mine.py:run", "")
    assert plan.overrides.items() >= dict(way.settings).items()
    document = to_document(slow)["choice"]
    assert document["steps_factor"] == way.steps_factor
    assert document["step_s"] == pytest.approx(plan.predicted.step_s)
    assert slow.num_steps == plan.overrides.get("num_steps", 1000) >= 1000 * way.steps_factor
    fast = make_plan(make_slow("400gbit", make_ways()), posterior())
    assert fast.candidate.way is None
    assert "num_steps" not in to_plan(fast, "mine.py:run", "").overrides


def test_a_way_that_is_faster_by_less_than_is_known_of_its_steps_is_not_taken(monkeypatch):
    problem = make_slow("100mbit", make_ways())
    candidates = [one for one in make_space(problem).candidates if one.division.data == 4]
    pool, least = make_pool(problem, posterior(), candidates)
    assert choose(pool, least).needs.candidate.way is not None
    monkeypatch.setattr(inexact.Way, "log_spread", property(lambda self: 9.0))
    unsure = choose(pool, least)
    assert unsure.needs.candidate.way is None
    assert unsure.best == int(pool.step_s.argmin())
    assert "less than is known" in unsure.describe_better()
