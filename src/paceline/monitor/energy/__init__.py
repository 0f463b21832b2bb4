"""Layer 2: meters of a worker's energy: counters of processors and GPUs, or declared power where none can be read."""

from paceline.monitor.energy.declared import DeclaredPower, DeclaredProcessor
from paceline.monitor.energy.meter import Meter, MeterThread
from paceline.monitor.energy.nvml import Nvml, NvmlMeter
from paceline.monitor.energy.rapl import RaplMeter, find_rapl

__all__ = ["DeclaredPower", "DeclaredProcessor", "Meter", "MeterThread", "Nvml", "NvmlMeter", "RaplMeter", "find_rapl"]
