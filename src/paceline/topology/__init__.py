"""Layer 1: connections between ranks, and how fast they are."""

from paceline.topology.cluster import Cluster, Network
from paceline.topology.graphs import Graph
from paceline.topology.hosts import Hosts
from paceline.topology.layout import AXES, Axes, Axis, Layout
from paceline.topology.presets import DGXA100, DGXH100, FatTree, Loopback, Switch
from paceline.topology.torus import TorusCluster, squarest
from paceline.topology.units import BytesPerSecond, parse_size

__all__ = [
    "AXES",
    "DGXA100",
    "DGXH100",
    "Axes",
    "Axis",
    "BytesPerSecond",
    "Cluster",
    "FatTree",
    "Graph",
    "Hosts",
    "Layout",
    "Loopback",
    "Network",
    "Switch",
    "TorusCluster",
    "parse_size",
    "squarest",
]
