"""Closed forms of the time between checkpoints."""

import math


def find_young_interval_s(save_s: float, failure_s: float) -> float:
    """Return the time between checkpoints by Young, "A first order approximation ...", 1974.

    Args:
        save_s: Time for which a checkpoint stops training.
        failure_s: Mean time between failures.
    """
    return math.sqrt(2 * save_s * failure_s) if save_s else 0.0


def find_optimal_interval_s(save_s: float, failure_s: float) -> float:
    """Return the time between checkpoints that loses the least time to them and to failures.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006; the first term is
    Young's, "A first order approximation to the optimum checkpoint interval", 1974. Checkpoints that cost nothing are
    made all the time: the interval is 0. Without failures it is infinite.

    Args:
        save_s: Time for which a checkpoint stops training.
        failure_s: Mean time between failures.
    """
    if save_s >= 2 * failure_s or math.isinf(failure_s):
        return failure_s
    ratio = save_s / (2 * failure_s)
    return find_young_interval_s(save_s, failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
