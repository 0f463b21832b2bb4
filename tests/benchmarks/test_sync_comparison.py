import pytest

from paceline.benchmarks import COMPARISONS
from paceline.benchmarks.comparison import Outcome
from paceline.cli.prepare import make_run
from paceline.sync import EveryStep

SYNC = COMPARISONS["sync"]


def test_rules_are_compared_with_every_step_seed_by_seed():
    reference = [Outcome(loss, None, 1000, 4.0) for loss in (2.0, 4.0, 8.0)]
    ours = [Outcome(loss, None, 50, 3.0) for loss in (2.2, 4.0, 8.0)]
    every_step, row = SYNC.compare({"every_step": reference, "diloco": ours})
    assert every_step.cells() == ("every_step", "3", "4.0000", "1.0000 ± 0.0000", "1.0000", "1.00")
    # Ratios 1.1, 1 and 1.
    assert row.cells() == ("diloco", "3", "4.0000", "1.0333 ± 0.0577", "0.0500", "0.75")
    assert len(row.cells()) == len(row.headings)


def test_one_seed_has_no_spread():
    (row,) = SYNC.compare({"every_step": [Outcome(2.0, None, 1000, 4.0)]})
    assert row.loss_ratio_spread is None
    assert row.cells()[3] == "1.0000"


def test_the_reference_is_synchronous_without_a_codec():
    assert make_run("transformer_lm", SYNC.ways["every_step"]).sync == EveryStep()


@pytest.mark.parametrize("way", SYNC.ways)
def test_each_way_has_its_rule_by_name(way):
    run = make_run("transformer_lm", SYNC.ways[way])
    assert run.sync.name == way.partition(" ")[0]
