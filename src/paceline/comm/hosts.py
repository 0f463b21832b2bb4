"""Ranks of a group by host."""

from weakref import WeakKeyDictionary

from paceline.comm.group import Group
from paceline.comm.shared_memory import host_key

_known: WeakKeyDictionary[Group, list[list[int]]] = WeakKeyDictionary()


def find_hosts(group: Group) -> list[list[int]]:
    """Return the ranks of each host, hosts by their first rank. The first call is collective; the result is kept."""
    if group not in _known:
        keys = group.gather_documents(host_key(), name="hosts")
        _known[group] = [[rank for rank, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]
    return _known[group]
