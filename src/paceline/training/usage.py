"""Metering of what this worker uses: its device, its share of the host, and the price of that."""

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from paceline.comm.group import Group
from paceline.comm.shared_memory.rendezvous import host_key
from paceline.monitor.energy import DeclaredPower, DeclaredProcessor, Meter, MeterThread, Nvml, NvmlMeter, find_rapl
from paceline.monitor.energy.nvml import NvmlError
from paceline.monitor.events import ResourcesUsed
from paceline.monitor.log import EventLog
from paceline.topology import Site, find_device
from paceline.topology.devices import power_of_cores

LOG_INTERVAL_S = 5.0
"""Time from one event to the next."""


def find_meters(site: Site, device: torch.device, place_here: int, num_here: int) -> tuple[list[Meter], dict[str, str]]:
    """Return the meters of a worker, and by part why nothing is known of it.

    Counters of processors and memory are those of a whole host, so that its first worker alone reads them.

    Args:
        site: Place of the run, which declares power where nothing can be measured.
        device: Device of the worker.
        place_here: Number of workers before it on its host.
        num_here: Number of workers on its host.
    """
    if not site.measures_energy:
        return [], {}
    meters: list[Meter] = []
    unknown: dict[str, str] = {}
    if device.type == "cuda":
        meter = _find_gpu_meter(site, device)
        if meter is None:
            name = torch.cuda.get_device_name(device)
            unknown["gpu"] = f"unknown: nothing measures it, and no power is declared for {name}; give site.device"
        else:
            meters.append(meter)
    of_host = find_rapl()
    if any(meter.part == "cpu" for meter in of_host):
        meters += of_host if place_here == 0 else []
    else:
        meters.append(_declare_processor(site, num_here, is_device=device.type == "cpu"))
    return meters, unknown


def _find_gpu_meter(site: Site, device: torch.device) -> Meter | None:
    """Return a meter of a GPU: NVML's, or else one of declared power; None where that is not known either."""
    try:
        return NvmlMeter(Nvml(), f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except (NvmlError, AttributeError):  # a build for other GPUs than NVIDIA's lacks the function, or the UUID
        name = torch.cuda.get_device_name(device)
        declared = site.find_device(name)
        return None if declared is None else DeclaredPower("gpu", declared.working_w, f"of {name}")


def _declare_processor(site: Site, num_here: int, *, is_device: bool) -> DeclaredProcessor:
    """Return the meter of a worker's share of a host by declared power.

    Args:
        site: Place of the run.
        num_here: Number of workers on the host.
        is_device: Whether workers compute on the processor.
    """
    host = site.host or (site.preset.host if site.preset is not None else None)
    if is_device and site.device is not None:
        idle_w, load_w, num_cores, about = site.device.idle_w, site.device.load_w, site.device.num_cores, "site.device"
    elif host is not None:
        about = "site.host" if site.host is not None else f"hosts of {site.instance}"
        idle_w, load_w, num_cores = host.idle_w, host.load_w, host.num_cores
    else:
        server, num_cores = find_device("cpu"), len(os.sched_getaffinity(0))
        idle_w, load_w = power_of_cores(num_cores)
        about = f"{num_cores} cores' part of a server of {server.num_cores} with {server.idle_w:g} to {server.load_w:g}"
        about += " W; site.device or site.host declares another"
    return DeclaredProcessor(idle_w / num_here, (load_w - idle_w) / num_cores, about)


class UsageMeter:
    """Use of energy and money by this worker, written to the log every few seconds and at the end of the `with`.

    Args:
        site: Place of the run.
        meters: Meters of this worker.
        host_share: Share of a host's price that is this worker's.
        unknown: Reason by part for which nothing is known of it.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        site: Site,
        meters: Sequence[Meter],
        host_share: float,
        unknown: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meters, self._unknown, self._clock = meters, unknown or {}, clock
        per_hour = site.host_per_hour
        self._money_per_s = None if per_hour is None else per_hour / 3600 * host_share
        # A run reads its tables when it starts: what happens to these files later must not end it.
        self._currency, self._price = "" if per_hour is None else site.used_currency, site.describe_price()
        self._carbon_kg_per_j, self._carbon_by = site.carbon_kg(1.0), site.describe_carbon()
        self._began_s = self._logged_s = clock()
        self._logged_j = [0.0] * len(meters)
        self._log: tuple[EventLog, Callable[[], int]] | None = None
        self._thread = MeterThread(meters)

    @classmethod
    def open(cls, site: Site, world: Group) -> Self:
        """Return the meter of this worker among those of `world`; every worker calls it."""
        keys = world.gather_documents(host_key(), name="hosts")
        place_here, num_here = keys[: world.rank].count(keys[world.rank]), keys.count(keys[world.rank])
        meters, unknown = find_meters(site, world.device, place_here, num_here)
        return cls(site, meters, 1 / num_here, unknown)

    def logging_to(self, log: EventLog, find_step: Callable[[], int]) -> Self:
        """Return the meter, which from now on writes to `log`, with the step that `find_step` returns."""
        self._log = log, find_step
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        self.write()

    def close(self) -> None:
        """End the reading of meters."""
        self._thread.close()

    def write_if_due(self) -> None:
        """Write an event, if the last one is a few seconds old."""
        if self._clock() - self._logged_s >= LOG_INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Write what was used since the last event."""
        assert self._log is not None, "there must be a log"
        log, find_step = self._log
        log.write(self.take(), step=find_step())

    def take(self) -> ResourcesUsed:
        """Return what was used since this was called last."""
        now_s, readings = self._clock(), [meter.read_j() for meter in self._meters]
        elapsed_s, self._logged_s = now_s - self._logged_s, now_s
        energy_of: dict[str, float] = {}
        for meter, now_j, before_j in zip(self._meters, readings, self._logged_j, strict=True):
            energy_of[meter.part] = energy_of.get(meter.part, 0.0) + now_j - before_j
        self._logged_j = readings
        energy_j = sum(energy_of.values())
        sources = {meter.part: meter.source for meter in self._meters} | self._unknown
        return ResourcesUsed(
            duration_s=elapsed_s,
            energy_j=energy_j,
            energy_of=energy_of,
            sources=sources,
            carbon_kg=self._carbon_kg_per_j * energy_j,
            carbon_by=self._carbon_by if sources else "",
            money=None if self._money_per_s is None else self._money_per_s * elapsed_s,
            currency=self._currency,
            price=self._price,
        )

    def read_total(self) -> tuple[float, float, float]:
        """Return seconds, joules and money since the meter was made."""
        elapsed_s = self._clock() - self._began_s
        return elapsed_s, sum(meter.read_j() for meter in self._meters), (self._money_per_s or 0.0) * elapsed_s
