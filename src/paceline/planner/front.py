"""Pareto front: the candidates that no other beats in everything."""

import numpy as np

from paceline.topology.cluster import Floats, Integers


def find_front(objectives: Floats) -> Integers:
    """Return the indices of rows that no other row is as good as in every column and better in one, ascending.

    Args:
        objectives: One row for each candidate; less is better in every column.
    """
    order = np.lexsort(objectives.T[::-1])  # what beats a row comes before it
    kept = np.empty_like(objectives)
    found: list[int] = []
    for index in order:
        row, before = objectives[index], kept[: len(found)]
        if not np.any(np.all(before <= row, axis=1) & np.any(before < row, axis=1)):
            kept[len(found)] = row
            found.append(int(index))
    return np.array(sorted(found), dtype=np.int64)
