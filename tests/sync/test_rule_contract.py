"""Every registered rule keeps the contract of rules."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from paceline.sync import EASGD, LocalSGD
from paceline.sync.periodic import PeriodicSynchroniser, SyncSchedule
from paceline.testing import rule_contract
from paceline.testing.rule_contract import RULE_CHECKS, every_rule

RULES = every_rule()


def mark(name):
    """Return a rule, of a campaign if it differs from another in its first, synchronous steps alone."""
    is_more = name.endswith("after synchronous steps") and not name.startswith("local_sgd")
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.campaign] if is_more else [])


@pytest.mark.parametrize("check", RULE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [mark(name) for name in sorted(RULES)])
def test_every_rule_keeps_the_contract(name, check):
    check(RULES[name])


class PlainMean(PeriodicSynchroniser):
    """Counts all workers equally, whatever their samples."""

    def after_update(self, step):
        size = self._context.group.size
        return super().after_update(replace(step, weight=step.total_weight / size))


class NoConsensus(PeriodicSynchroniser):
    """Leaves each worker its own parameters to evaluate."""

    @contextmanager
    def consensus(self):
        yield


@pytest.mark.parametrize(
    ("synchroniser", "check", "words"),
    [
        (PlainMean, "workers_count_by_their_samples", "must count by `step.weight`"),
        (NoConsensus, "any_number_of_workers_learns", "evaluate the consensus differently"),
    ],
)
def test_a_rule_that_breaks_the_contract_is_caught(synchroniser, check, words):
    class Broken(LocalSGD):
        name = "broken"

        def start_synchroniser(self, context):
            return synchroniser(context, self, SyncSchedule(self.period))

    with pytest.raises(AssertionError, match=words):
        getattr(rule_contract, check)(Broken(period=4))


def test_a_rule_that_counts_workers_equally_says_so():
    assert "weighs_samples" in rule_contract.workers_count_by_their_samples(EASGD())
