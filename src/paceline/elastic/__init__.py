"""Layer 5: who trains together: the membership protocol, a worker's connection to it, and its journal."""

from paceline.elastic.facts import View
from paceline.elastic.member import Evicted, Member, StoreMember

__all__ = ["Evicted", "Member", "StoreMember", "View"]
