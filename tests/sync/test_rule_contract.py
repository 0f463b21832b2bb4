"""Every registered rule keeps the contract of rules."""

import pytest

from paceline.testing.rule_contract import RULE_CHECKS, every_rule

RULES = every_rule()


@pytest.mark.parametrize("check", RULE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_keeps_the_contract(name, check):
    check(RULES[name])
