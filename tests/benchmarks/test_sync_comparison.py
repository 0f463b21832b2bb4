import statistics

import pytest

from paceline.benchmarks import COMPARISONS
from paceline.benchmarks.comparison import RunOutcome
from paceline.cli.prepare import make_run
from paceline.sync import EveryStep

SYNC = COMPARISONS["sync"]
NUM_STEPS = 200


def compare(outcomes):
    return SYNC.compare(SYNC.choose([*outcomes], NUM_STEPS), outcomes)


def test_rules_are_compared_with_every_step():
    reference = [RunOutcome(loss, None, 1000, 4.0) for loss in (2.0, 4.0, 6.0)]
    ours = [RunOutcome(loss, None, 50, 3.0) for loss in (2.2, 4.0, 6.4)]
    every_step, row = compare({"every_step": reference, "diloco": ours})
    assert every_step.cells() == ("every_step", "", "3", "4.0000", "1.0000", "1.0000", "1.0000", "1.0000", "1.00")
    # 12.6 to 12. Each of three seeds is drawn thrice in 1 of 27 draws: these, at 1 and 1.1, are beyond the bounds; next
    # come the second seed twice with the first, 10.2 to 10, and the first twice with the last, 10.8 to 10.
    assert row.cells() == (
        "diloco", "period 10, synchronous_steps 50", "3", "4.2000", "1.0500", "1.0200", "1.0800", "0.0500", "0.75",
    )  # fmt: skip
    assert len(row.cells()) == len(row.headings)
    assert row.losses == (2.2, 4.0, 6.4)


def test_the_interval_takes_seeds_in_pairs_and_narrows_with_them():
    """Losses that differ from seed to seed, but as much for both, leave no doubt; noise of one of them does."""
    reference = [RunOutcome(2.0 + seed, None, 1, 1.0) for seed in range(20)]
    scaled = [RunOutcome(1.1 * (2.0 + seed), None, 1, 1.0) for seed in range(20)]
    _, row = compare({"every_step": reference, "easgd": scaled})
    assert (row.loss_ratio_lower, row.loss_ratio_upper) == pytest.approx((1.1, 1.1))
    errors = [0.5 * (-1) ** seed for seed in range(20)]
    noisy = [RunOutcome(outcome.loss + error, None, 1, 1.0) for outcome, error in zip(reference, errors, strict=True)]
    _, row = compare({"every_step": reference, "easgd": noisy})
    # The mean of 20 such errors spreads by 0.5 / sqrt(20), and 1.645 of it is each side, within a tenth of that.
    mean = statistics.mean(outcome.loss for outcome in reference)
    assert row.loss_ratio_upper - row.loss_ratio_lower == pytest.approx(2 * 1.645 * 0.5 / 20**0.5 / mean, rel=0.1)


def test_one_seed_has_no_interval():
    (row,) = compare({"every_step": [RunOutcome(2.0, None, 1000, 4.0)]})
    assert (row.loss_ratio_lower, row.loss_ratio_upper) == (None, None)
    assert row.cells()[4:6] == ("1.0000", "")


def test_the_reference_is_synchronous_without_a_codec():
    assert make_run("transformer_lm", SYNC.choose([], NUM_STEPS)["every_step"]).sync == EveryStep()


@pytest.mark.parametrize("way", SYNC.choose(None, NUM_STEPS))
def test_each_way_has_its_rule_by_name(way):
    run = make_run("transformer_lm", SYNC.choose([way], NUM_STEPS)[way])
    assert run.sync.name == way.partition(" ")[0]


@pytest.mark.parametrize("num_steps", [1, 200, 1200])
def test_rules_that_begin_synchronously_do_so_for_a_part_of_the_training(num_steps):
    for name, part in {"post_local_sgd": 2, "diloco": 4, "streaming_diloco int8": 4}.items():
        run = make_run("transformer_lm", SYNC.choose([name], num_steps)[name])
        assert run.sync.synchronous_steps == num_steps // part
