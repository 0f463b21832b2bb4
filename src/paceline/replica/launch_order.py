"""The order in which buckets leave, computed from measured times so that the next forward waits least.

ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019) send first what the next forward needs
first. They decide as gradients become ready, each worker alone or by a central scheduler; here the order is worked out
once from one worker's measurements and agreed on, since workers that launched in orders of their own would
sum different buckets.
"""

from collections.abc import Sequence


def plan_launch_order(ready_s: Sequence[float], duration_s: Sequence[float], needed: Sequence[int]) -> list[int]:
    """Return the buckets in the order in which they are best exchanged, one at a time.

    Whenever the wire is free, it takes of those that are ready the one that forward needs first: waiting for
    one that is more urgent and not ready yet would leave the wire idle.

    Args:
        ready_s: When each bucket's gradients are complete, from the beginning of backward.
        duration_s: How long its exchange takes.
        needed: Place of each bucket in the order in which forward needs them.
    """
    waiting = set(range(len(ready_s)))
    order: list[int] = []
    now_s = 0.0
    while waiting:
        now_s = max(now_s, min(ready_s[bucket] for bucket in waiting))
        chosen = min((b for b in waiting if ready_s[b] <= now_s), key=lambda bucket: (needed[bucket], bucket))
        waiting.remove(chosen)
        order.append(chosen)
        now_s += duration_s[chosen]
    return order
