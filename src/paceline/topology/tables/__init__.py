"""Layer 1: prices of hosts, carbon of grids and overhead of data centres: shipped ones, or CSV files of one's own."""

from paceline.topology.tables.grid import GridFactor, Overhead, find_factor, find_overhead, read_grid, read_overheads
from paceline.topology.tables.prices import Price, find_price, read_prices
from paceline.topology.tables.table import TABLES, read_shipped

__all__ = [
    "TABLES",
    "GridFactor",
    "Overhead",
    "Price",
    "find_factor",
    "find_overhead",
    "find_price",
    "read_grid",
    "read_overheads",
    "read_prices",
    "read_shipped",
]
