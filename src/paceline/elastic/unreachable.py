"""Which other machines a run goes on without, where workers cannot connect to each other."""

from collections import Counter
from collections.abc import Collection, Sequence

from paceline.elastic.facts import host_of


def find_unreachable(pairs: Sequence[tuple[str, str]], known: Collection[str]) -> list[str]:
    """Return the machines whose workers are dropped so that the others can connect, as far as there are such.

    Who is in most of these connections is dropped first. Of two that have trained together, and reach each other no
    longer, nobody can say which one it is: there the caller tries again, and names none as known the next time.

    Args:
        pairs: Names of the workers of each connection that could not be opened.
        known: Machines that are not dropped, as they have trained with the others; the supervisor's own never is.
    """
    dropped: list[str] = []
    while True:
        left = [{host_of(name) for name in pair} for pair in pairs]
        left = [hosts for hosts in left if len(hosts) == 2 and not hosts & set(dropped)]
        blamed = Counter(sorted(host for hosts in left for host in hosts - {"", *known}))
        if not blamed:
            return dropped
        dropped.append(max(reversed(blamed), key=lambda host: blamed[host]))
