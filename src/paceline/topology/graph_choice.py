"""Choice of a gossip graph's edges where some links are faster than others."""

import numpy as np

from paceline.topology.graphs import Edges, Floats

Pair = tuple[int, int]


def choose_edges(seconds: Floats, candidates: Edges, num_pairs: int) -> Edges:
    """Return undirected edges that connect all ranks over fast links.

    A link's price is its seconds times the number of links that the busier of its ranks then has, since these share its
    network card. The cheapest links that connect all come first, and then, one after another, the link that adds most
    to the second smallest eigenvalue of the graph's Laplacian for its price: the one with the largest (v_i - v_j)^2 /
    price, where v is the eigenvector (Ghosh and Boyd 2006, "Growing well-connected graphs", without prices).

    Args:
        seconds: Time of a message from rank to rank, shape (num_ranks, num_ranks), symmetric.
        candidates: Possible edges, both ways; they connect all ranks.
        num_pairs: Number of pairs of ranks to join, at least the number of ranks less one.
    """
    num_ranks = len(seconds)
    left = sorted((a, b) for a, b in candidates if a < b)
    laplacian = np.zeros((num_ranks, num_ranks))
    part = list(range(num_ranks))

    def price(pair: Pair) -> float:
        return max(float(seconds[pair]), 1e-9) * (1 + max(float(laplacian[rank, rank]) for rank in pair))

    chosen: list[Pair] = []
    while left and len(chosen) < max(num_pairs, num_ranks - 1):
        if len(chosen) < num_ranks - 1:
            best = min((pair for pair in left if part[pair[0]] != part[pair[1]]), key=price)
            part = [part[best[0]] if other == part[best[1]] else other for other in part]
        else:
            vector = np.linalg.eigh(laplacian)[1][:, 1]
            gains = {pair: float(vector[pair[0]] - vector[pair[1]]) ** 2 / price(pair) for pair in left}
            best = max(left, key=gains.__getitem__)
        left.remove(best)
        chosen.append(best)
        for a, b in (best, best[::-1]):
            laplacian[a, a] += 1
            laplacian[a, b] -= 1
    return {edge for a, b in chosen for edge in ((a, b), (b, a))}
