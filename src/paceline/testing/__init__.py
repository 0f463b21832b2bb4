"""Layer 10: contract tests, scripted faults and process spawners, shipped with the package."""

from paceline.testing import faults
from paceline.testing.codec_contract import CODEC_CHECKS, check_codec
from paceline.testing.faults import Fault
from paceline.testing.group_contract import GROUP_CHECKS, check_group, check_words_of_failure
from paceline.testing.netlab import LinkCounters, Netlab, netlab_missing
from paceline.testing.processes import RankResult, check_exits, open_store, run_processes

__all__ = [
    "CODEC_CHECKS",
    "GROUP_CHECKS",
    "Fault",
    "LinkCounters",
    "Netlab",
    "RankResult",
    "check_codec",
    "check_exits",
    "check_group",
    "check_words_of_failure",
    "faults",
    "netlab_missing",
    "open_store",
    "run_processes",
]
