"""Layer 8: contract tests, scripted faults and process spawners, shipped with the package."""

from paceline.testing import faults
from paceline.testing.faults import Fault
from paceline.testing.group_contract import GROUP_CHECKS, check_group, check_words_of_failure
from paceline.testing.processes import RankResult, open_store, run_processes

__all__ = [
    "GROUP_CHECKS",
    "Fault",
    "RankResult",
    "check_group",
    "check_words_of_failure",
    "faults",
    "open_store",
    "run_processes",
]
