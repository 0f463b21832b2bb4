"""Layer 5: membership that changes while workers train: what a worker and its supervisor tell each other."""

from paceline.elastic.member import Evicted, Member, View

__all__ = ["Evicted", "Member", "View"]
