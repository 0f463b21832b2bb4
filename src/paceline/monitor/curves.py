"""The data of a report's curves: smoothing and thinning of long, noisy, interrupted series."""

import numpy as np

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

LARGEST = 1e30
"""Largest magnitude of a value; beyond it a value counts as not finite, since no axis could show it."""


def as_floats(values: list[float | None]) -> Floats:
    """Return `values` with NaN for missing or non-finite ones."""
    floats = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    floats[~(np.abs(floats) < LARGEST)] = np.nan
    return floats


def smooth(values: Floats, window: int) -> Floats:
    """Return the moving mean over `window` values, without NaN, and without lag.

    At the start the window shrinks on both sides, so that a steep fall is not cut; at the end it shrinks on one side
    only, so that the last value is a mean too.
    """
    num_values = len(values)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(num_values)
    half = np.minimum(window // 2, places)
    first, last = places - half, np.minimum(places + half + 1, num_values)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[last] - sums[first]) / (counts[last] - counts[first]), dtype=np.float64)


def thin(steps: Floats, values: Floats, max_bins: int = 2000) -> tuple[Floats, Floats]:
    """Return the lowest and highest value of each of `max_bins` bins, which preserves the look of a noisy line."""
    if len(values) <= 2 * max_bins:
        return steps, values
    kept = []
    for places in np.array_split(np.arange(len(values)), max_bins):
        part = values[places]
        if np.isfinite(part).any():
            kept.extend(sorted({int(places[np.nanargmin(part)]), int(places[np.nanargmax(part)])}))
        else:
            kept.append(int(places[0]))
    return steps[kept], values[kept]


def ratio_in_bins(steps: Floats, part: Floats, whole: Floats, max_bins: int = 150) -> tuple[Floats, Floats]:
    """Return the first step and sum(part) / sum(whole) of each bin, NaN where that is unknown."""
    starts = np.unique(np.linspace(0, len(steps), min(max_bins, len(steps)), endpoint=False).astype(np.int64))
    known = np.isfinite(part) & np.isfinite(whole)
    parts = np.add.reduceat(np.where(known, part, 0.0), starts)
    wholes = np.add.reduceat(np.where(known, whole, 0.0), starts)
    shares = np.full(len(starts), np.nan)
    np.divide(parts, wholes, out=shares, where=wholes > 0)
    return steps[starts], shares
