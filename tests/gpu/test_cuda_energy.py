"""On a CUDA device: NVML's counter of energy beside the integral of its power, and the meter of a worker."""

import time

import pytest
import torch

from paceline.monitor.energy import Nvml, NvmlMeter
from paceline.topology import Site
from paceline.training.usage import find_meters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none"),
]


def multiply_for(seconds, look):
    """Keep the device busy, and call `look` about every 50 ms."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(8):
            a @ a
        torch.cuda.synchronize()
        look()
        time.sleep(0.03)


def test_the_counter_and_sampled_power_agree():
    """Over 8 s; both are averages of a fraction of a second, and the counter is read as rarely as every 100 ms."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    nvml = Nvml()
    handle = nvml.open_device(uuid)
    multiply_for(2.0, lambda: None)  # until power is steady
    meter, samples = NvmlMeter(nvml, uuid), []
    multiply_for(8.0, lambda: samples.append((time.monotonic(), nvml.read_power_mw(handle) / 1e3)))
    counted_j = meter.read_j()
    times, watts = torch.tensor(samples, dtype=torch.float64).T
    sampled_j = float(torch.trapezoid(watts, times))
    assert counted_j == pytest.approx(sampled_j, rel=0.03)


def test_a_worker_measures_its_gpu():
    meters, unknown = find_meters(Site(), torch.device("cuda", 0), 0, 1)
    assert unknown == {}
    gpu = next(meter for meter in meters if meter.part == "gpu")
    assert gpu.source.startswith("measured by NVML")
    multiply_for(1.0, lambda: None)
    assert gpu.read_j() > 0
