"""Layer 5: who trains together: the membership protocol, its supervisor, and a worker's connection to it."""

from paceline.elastic.facts import View
from paceline.elastic.member import Evicted, Member, StoreMember

__all__ = ["Evicted", "Member", "StoreMember", "View"]
