"""Layer 1: devices, hosts, the connections between ranks, and how fast they are."""

from paceline.topology import instances as instances
from paceline.topology.cluster import Cluster, Host, Network, Paths
from paceline.topology.devices import DEVICES, PRECISIONS, Device, Precision, find_device
from paceline.topology.graphs import Graph
from paceline.topology.hosts import Hosts
from paceline.topology.layout import AXES, Axes, Axis, Layout
from paceline.topology.presets import DGX1, DGX2, DGXA100, DGXB200, DGXH100, FatTree, Loopback, Switch, TPUv3Pod
from paceline.topology.site import Site
from paceline.topology.torus import TorusCluster, squarest
from paceline.topology.units import BytesPerSecond, Joules, parse_size

__all__ = [
    "AXES",
    "DEVICES",
    "DGX1",
    "DGX2",
    "DGXA100",
    "DGXB200",
    "DGXH100",
    "PRECISIONS",
    "Axes",
    "Axis",
    "BytesPerSecond",
    "Cluster",
    "Device",
    "FatTree",
    "Graph",
    "Host",
    "Hosts",
    "Joules",
    "Layout",
    "Loopback",
    "Network",
    "Paths",
    "Precision",
    "Site",
    "Switch",
    "TPUv3Pod",
    "TorusCluster",
    "find_device",
    "parse_size",
    "squarest",
]
