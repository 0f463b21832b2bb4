"""How transfers share links: max-min fair rates of a fluid, recomputed whenever a transfer ends.

TCP with equal round trips and InfiniBand's credits come close to max-min fairness (Bertsekas and Gallager, Data
Networks, 1992, section 6.5): no transfer can have more unless one that has no more gets less.
"""

import numpy as np
from numpy.typing import NDArray

from paceline.topology.cluster import Floats, Integers

_SAME = 1 + 1e-12
"""Largest ratio of rates and times that count as equal: rounding must not split one event into two."""


def fair_rates(routes: Integers, capacities_bytes_per_s: Floats) -> Floats:
    """Return the max-min fair rate of each transfer in bytes/s, by progressive filling.

    All rates rise together until a link is full; the transfers on it keep their rate, and the others rise on. Links
    that fill up whatever happens elsewhere are handled at once: those that are the tightest of all their transfers.

    Args:
        routes: Links of each transfer, shape ``(num_transfers, most links of one)``; -1 pads shorter routes.
        capacities_bytes_per_s: Capacity of each link.
    """
    num_links = len(capacities_bytes_per_s)
    rates = np.full(len(routes), np.inf)
    left = capacities_bytes_per_s.astype(np.float64)
    rising = np.flatnonzero((routes >= 0).any(axis=1))
    while len(rising):
        load = _load(routes[rising], num_links)
        shares = np.full(num_links + 1, np.inf)  # the last is the link -1, which pads shorter routes
        np.divide(left, load, out=shares[:-1], where=load > 0)
        tightest = shares[routes[rising]].min(axis=1)
        fills = tightest[:, None] * _SAME >= shares[routes[rising]]
        is_full = np.append(_load(np.where(fills, routes[rising], -1), num_links) == load, False)
        stops = is_full[routes[rising]].any(axis=1)
        stopped = rising[stops]
        rates[stopped] = tightest[stops]
        left -= _load(routes[stopped], num_links, tightest[stops])
        np.maximum(left, 0.0, out=left)
        rising = rising[~stops]
    return rates


def transfer_times_s(routes: Integers, num_bytes: Floats, capacities_bytes_per_s: Floats) -> Floats:
    """Return when each transfer's last byte has left, if all begin at 0, without latency."""
    times_s = np.zeros(len(routes))
    left_bytes = num_bytes.astype(np.float64)
    active = np.flatnonzero(left_bytes > 0)
    now_s = 0.0
    while len(active):
        shares = _shares_links(routes[active], len(capacities_bytes_per_s))
        # A transfer that is alone on all its links frees nothing that others wait for: its end needs no event.
        alone, active = active[~shares], active[shares]
        times_s[alone] = now_s + left_bytes[alone] / _narrowest(routes[alone], capacities_bytes_per_s)
        if len(active):
            rates = fair_rates(routes[active], capacities_bytes_per_s)
            needed_s = left_bytes[active] / rates
            step_s = needed_s.min()
            now_s += step_s
            ends = needed_s <= step_s * _SAME
            times_s[active[ends]] = now_s
            active, rates = active[~ends], rates[~ends]
            left_bytes[active] -= rates * step_s
    return times_s


def _narrowest(routes: Integers, capacities_bytes_per_s: Floats) -> Floats:
    """Return the least capacity on each route, infinite for a route without links."""
    return np.append(capacities_bytes_per_s, np.inf)[routes].min(axis=1)  # type: ignore[no-any-return]


def _load(routes: Integers, num_links: int, weights: Floats | None = None) -> Floats:
    """Return the sum of the weights of each link's transfers; their number without weights."""
    if weights is not None:
        weights = np.repeat(weights, routes.shape[1])
    return np.bincount(routes.ravel() + 1, weights, minlength=num_links + 1)[1:].astype(np.float64)


def _shares_links(routes: Integers, num_links: int) -> NDArray[np.bool_]:
    load = np.append(_load(routes, num_links), 0)
    return np.asarray((load[routes] > 1).any(axis=1))
