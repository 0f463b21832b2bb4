"""Meters of energy: exact integrals over stand-ins for the kernel's files and for NVML."""

import ctypes
import os
import threading
from types import SimpleNamespace

import pytest

from paceline.monitor.energy import (
    DeclaredPower,
    DeclaredProcessor,
    MeterThread,
    Nvml,
    NvmlMeter,
    find_rapl,
)
from paceline.monitor.energy.nvml import NvmlError

RANGE_UJ = 262_143_328_850


class Powercap:
    """A tree as the kernel's: two sockets with cores and memory, and the whole platform beside."""

    def __init__(self, root):
        self.root = root
        self.add("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
        self.add("intel-rapl:0:0", "core", 5)
        self.add("intel-rapl:0:1", "dram", 7_000_000, range_uj=65_712_999_613)
        self.add("intel-rapl:1", "package-1", 400)
        self.add("intel-rapl:1:0", "dram", 0, range_uj=65_712_999_613)
        self.add("intel-rapl:2", "psys", 10**9)
        self.add("intel-rapl-mmio:0", "package-0", 3)

    def add(self, folder, name, energy_uj, range_uj=RANGE_UJ):
        path = self.root / folder
        path.mkdir()
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(folder, energy_uj)

    def set(self, folder, energy_uj):
        (self.root / folder / "energy_uj").write_text(f"{energy_uj}\n")

    def deny(self, folder):
        """Let a counter raise when it is read; permissions would not stop root."""
        file = self.root / folder / "energy_uj"
        file.unlink()
        file.mkdir()


@pytest.fixture
def powercap(tmp_path):
    return Powercap(tmp_path)


def test_sockets_and_memory_are_summed_and_what_they_contain_is_not(powercap):
    processors, memory = find_rapl(powercap.root)
    assert (processors.part, memory.part) == ("cpu", "memory")
    powercap.set("intel-rapl:0", RANGE_UJ)
    powercap.set("intel-rapl:1", 3_000_400)
    powercap.set("intel-rapl:0:0", 10**9)
    powercap.set("intel-rapl:0:1", 9_500_000)
    powercap.set("intel-rapl:2", 10**10)
    assert processors.read_j() == 4.0
    assert memory.read_j() == 2.5
    assert processors.source == "measured by 2 RAPL counters of the whole host"


def test_a_counter_that_wraps_around_goes_on(powercap):
    processors, _ = find_rapl(powercap.root)
    powercap.set("intel-rapl:0", 2_000_000)
    assert processors.read_j() == 3.0
    powercap.set("intel-rapl:0", 500_000)
    assert processors.read_j() == 3.0 + (RANGE_UJ - 1_500_000) / 1e6, "it has gone round a second time"
    interval_s = processors.interval_s
    assert interval_s is not None
    assert 10 < interval_s < RANGE_UJ / 1e6 / 1000, "even at 1 kW it is read before it wraps"


def test_what_cannot_be_read_has_no_meter(powercap, tmp_path):
    powercap.deny("intel-rapl:1")
    (memory,) = find_rapl(powercap.root)
    assert memory.part == "memory", "half of the sockets is not the host"
    (powercap.root / "intel-rapl:0:1" / "max_energy_range_uj").unlink()
    assert find_rapl(powercap.root) == []
    assert find_rapl(tmp_path / "nowhere") == []


def test_a_counter_that_is_lost_later_is_told(powercap):
    processors, _ = find_rapl(powercap.root)
    powercap.set("intel-rapl:0", RANGE_UJ - 500_000)
    assert processors.read_j() == 0.5
    powercap.deny("intel-rapl:1")
    powercap.set("intel-rapl:0", RANGE_UJ)
    assert processors.read_j() == 1.0
    assert processors.source.endswith("of which 1 could be read no longer")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_has_no_meter(powercap):
    (powercap.root / "intel-rapl:0" / "energy_uj").chmod(0)
    assert [meter.part for meter in find_rapl(powercap.root)] == ["memory"]


class Library:
    """A stand-in for NVML as ctypes sees it: one GPU, with or without a counter."""

    def __init__(self, *, counts=True):
        self.counts, self.energy_mj, self.power_mw, self.is_lost = counts, 5_000, 100_000, False

    def nvmlInit_v2(self):  # noqa: N802  # NVML's own name
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        if uuid != b"GPU-1234":
            return 6
        handle._obj.value = 77
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):  # noqa: N802
        assert isinstance(value._obj, ctypes.c_ulonglong)
        if self.is_lost:
            return 15
        value._obj.value = self.energy_mj
        return 0 if self.counts and handle.value == 77 else 3

    def nvmlDeviceGetPowerUsage(self, handle, value):  # noqa: N802
        assert isinstance(value._obj, ctypes.c_uint)
        value._obj.value = self.power_mw
        return 15 if self.is_lost else 0


def test_a_gpu_with_a_counter_needs_no_samples():
    library = Library()
    meter = NvmlMeter(Nvml(library), "GPU-1234")
    assert (meter.part, meter.interval_s, meter.read_j()) == ("gpu", None, 0.0)
    library.energy_mj = 12_345_678
    assert meter.read_j() == 12_340.678
    assert meter.source == "measured by NVML (counter)"
    library.energy_mj = 1_000  # the driver was loaded again
    assert meter.read_j() == 12_341.678
    library.is_lost = True
    assert meter.read_j() == 12_341.678
    assert "can be read no longer" in meter.source


def test_a_gpu_without_a_counter_is_integrated_over_samples_of_its_power():
    library, clock = Library(counts=False), SimpleNamespace(now_s=0.0)
    meter = NvmlMeter(Nvml(library), "GPU-1234", lambda: clock.now_s)
    for seconds, power_w in ((1.0, 300), (3.0, 300), (4.0, 50)):
        clock.now_s, library.power_mw = seconds, 1000 * power_w
        total_j = meter.read_j()
    assert total_j == (100 + 300) / 2 + 2 * 300 + (300 + 50) / 2
    assert meter.interval_s == 0.1
    assert meter.source == "measured by NVML (power, sampled)"


def test_a_gpu_that_nvml_does_not_know_or_no_nvml_is_an_error():
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID must return 0, but got 6"):
        NvmlMeter(Nvml(Library()), "GPU-0")
    broken = SimpleNamespace(nvmlInit_v2=lambda: 9)
    with pytest.raises(NvmlError, match="nvmlInit_v2 must return 0, but got 9"):
        Nvml(broken)


def test_declared_power_says_so_and_is_exact():
    clock, processor = SimpleNamespace(now_s=100.0), SimpleNamespace(now_s=40.0)
    declared = DeclaredProcessor(10.0, 5.0, "mine", lambda: clock.now_s, lambda: processor.now_s)
    device = DeclaredPower("gpu", 300.0, "of X", lambda: clock.now_s)
    clock.now_s, processor.now_s = 104.0, 46.0
    assert declared.read_j() == 4 * 10 + 6 * 5
    assert device.read_j() == 1200
    assert declared.source == "declared, not measured: 10 W idle and 5 W for a core at work (mine)"
    assert device.source == "declared, not measured: 300 W all the time (of X)"
    assert (declared.part, device.part) == ("cpu", "gpu")
    assert declared.interval_s is device.interval_s is None


class Counting:
    part, source = "cpu", "counted"

    def __init__(self, interval_s):
        self.interval_s, self.read = interval_s, threading.Event()
        self.num_reads = 0

    def read_j(self):
        self.num_reads += 1
        if self.num_reads >= 3:
            self.read.set()
        return 0.0


def test_a_thread_reads_meters_that_need_it_and_no_others():
    often, never = Counting(0.001), Counting(None)
    thread = MeterThread([often, never])
    assert often.read.wait(30)
    thread.close()
    num_reads = often.num_reads
    assert never.num_reads == 0
    assert often.num_reads == num_reads, "it has ended"
    before = threading.active_count()
    MeterThread([never]).close()
    assert threading.active_count() == before
