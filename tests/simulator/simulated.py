"""Programs and clusters for tests of the simulator."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from paceline.programs import Collective, Program, Round, list_algorithms
from paceline.topology import DGXA100, FatTree, Loopback, Switch, TorusCluster

PAIRS = [
    (name, collective) for name, algorithm in list_algorithms().items() for collective in sorted(algorithm.collectives)
]
"""(algorithm, collective) of all there are."""


def make_program(num_ranks, *rounds, num_chunks=1):
    """Return a program of rounds that are lists of (source, destination, chunks, adds)."""

    def make(index):
        sources, destinations, counts, adds = (np.array(column) for column in zip(*rounds[index], strict=True))
        return Round(sources, destinations, np.zeros_like(sources), counts, adds)

    return Program(Collective.ALL_REDUCE, "by hand", num_ranks, num_chunks, len(rounds), make)


def scale_links(network, factor):
    """Return a network whose links all have `factor` times the capacity."""
    return replace(network, capacities_bytes_per_s=factor * network.capacities_bytes_per_s)


speeds = st.floats(1e8, 1e11)
host_bandwidths = st.dictionaries(st.integers(0, 9), speeds, max_size=6)
delays_s = st.sampled_from([0.0, 1e-6, 3e-5, 1e-3])
clusters = st.one_of(
    st.builds(
        Switch,
        devices_per_host=st.integers(1, 4),
        nics_per_host=st.integers(1, 2),
        host_bandwidths=host_bandwidths,
        latency_s=delays_s,
        message_s=delays_s,
        reduce_speed=speeds,
        local_bandwidth=speeds,
    ),
    st.builds(
        FatTree,
        hosts_per_pod=st.integers(1, 4),
        oversubscription=st.floats(1, 8),
        host_bandwidths=host_bandwidths,
        core_latency_s=delays_s,
        reduce_speed=speeds,
    ),
    st.builds(TorusCluster, bandwidth=speeds, latency_s=delays_s, reduce_speed=speeds),
    st.builds(DGXA100, host_bandwidths=host_bandwidths, latency_s=delays_s),
    st.builds(Loopback, bandwidth=speeds, reduce_speed=speeds),
)
