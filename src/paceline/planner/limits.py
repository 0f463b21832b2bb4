"""Limits, prices and machines of a plan, read from text."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import SettingsError
from paceline.planner.candidate import Machines
from paceline.topology import BytesPerSecond, Cluster, Device, Hosts, Joules, Loopback, Site, parse_size
from paceline.topology.devices import power_of_cores
from paceline.topology.tables import read_prices

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WATTS = {"w": 1.0, "kw": 1e3}
_KILOGRAMS = {"g": 1e-3, "kg": 1.0, "t": 1e3}
_FLOPS_OF_CORE = 4e10
"""Peak of one core in fp32: 16 multiplications and additions at 2.5 GHz halved, since cores share units."""
_BYTES_OF_CORE = 5e9
"""Bytes that one core moves per second."""


def parse_time(text: str) -> float:
    """Return the seconds of a time such as 8h, 30min or 90s.

    Raises:
        SettingsError: The text is no time, or not more than 0.
    """
    return _parse(text, "--within", _SECONDS, "8h, 30min or 2d")


def parse_energy(energy: str | None, carbon: str | None, site: Site) -> float | None:
    """Return the joules of a limit of energy such as 20kWh, or of carbon such as 2kg, whichever is less.

    Raises:
        SettingsError: One is no such amount, or not more than 0.
    """
    limits = [] if energy is None else [float(Joules.parse(energy))]
    if carbon is not None:
        kilograms = _parse(carbon, "--carbon", _KILOGRAMS, "2kg or 1.5t")
        limits.append(kilograms / max(site.carbon_kg(1.0), 1e-300))
    return min(limits, default=None)


def parse_budget(text: str) -> tuple[float, str]:
    """Return the number of a budget such as 50usd, and its currency; empty: the price's.

    Raises:
        SettingsError: The text is no number, or not more than 0.
    """
    found = re.fullmatch(r"(-?\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]{3})?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]) > 0:
        raise SettingsError(f"--budget must be a positive amount such as 50usd, but got {text!r}; write it so")
    return float(found[1]), (found[2] or "").lower()


def _parse(text: str, what: str, units: dict[str, float], examples: str) -> float:
    found = re.fullmatch(r"(-?\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]+)", text.strip(), re.IGNORECASE)
    if found is None or found[2].lower() not in units or not float(found[1]) > 0:
        raise SettingsError(f"{what} must be a positive amount such as {examples}, but got {text!r}; write it so")
    return float(found[1]) * units[found[2].lower()]


def list_machines(
    clusters: Sequence[tuple[str, Cluster]],
    num_ranks: int | None,
    memory: str | None,
    prices: Sequence[str],
    table: str | None = None,
    caps: Sequence[str] = (),
) -> tuple[Machines, ...]:
    """Return the machines on offer.

    Args:
        clusters: Name and settings of each cluster.
        num_ranks: Most ranks; None: all of a cluster with a number of hosts, or one host.
        memory: Memory of a rank, with a unit; None: its device's.
        prices: Price of a host and hour of all clusters, or of each by name.
        table: CSV file of prices of instance types; None: the shipped examples.
        caps: Limits of a device's power to consider beside none, with a unit.

    Raises:
        SettingsError: A number is wrong, or a price is of no cluster.
    """
    memory_bytes = None if memory is None else parse_size(memory)
    if memory_bytes is not None and not memory_bytes > 0:
        raise SettingsError(f"--memory must be more than 0, but got {memory}; leave it out for the device's")
    given = _parse_prices(prices, [name for name, _ in clusters])
    listed = {price.type: price for price in reversed(read_prices(table))}  # the first region of each type counts
    found = []
    for name, cluster in clusters:
        currency = ""
        ranks = num_ranks or _count_ranks(cluster)
        cluster.check_size(ranks)
        price, words = given.get(name), f"{given[name]:.4g} an hour a host, as given" if name in given else ""
        if price is None and name in listed:
            price, words = listed[name].on_demand_per_hour, listed[name].describe(is_spot=False)
            currency = listed[name].currency
            words = "; ".join(filter(None, (words, listed[name].warn_of_age())))
        machines = Machines(name, cluster, ranks, memory_bytes, price, words, currency)
        found += [machines, *(_cap(machines, _parse(text, "--cap", _WATTS, "500W")) for text in caps)]
    return tuple(found)


def _cap(machines: Machines, cap_w: float) -> Machines:
    """Return machines whose devices are limited to a power.

    Raises:
        SettingsError: The devices are not known, or the limit is none of theirs.
    """
    device = machines.cluster.device
    if device is None or not device.idle_w < cap_w < device.working_w:
        rule = "a device whose power is known" if device is None else f"{device.idle_w:g} and {device.working_w:g} W"
        raise SettingsError(
            f"--cap must be between the idle and the full power of {machines.name}, {rule}, but got {cap_w:g} W; "
            "take another, or leave it out"
        )
    capped = machines.cluster.model_copy(update={"device": device.model_copy(update={"cap_w": cap_w})})
    return replace(machines, name=f"{machines.name} at {cap_w:g} W", cluster=capped, cap_w=cap_w)


def _count_ranks(cluster: Cluster) -> int:
    if isinstance(cluster, Loopback) and cluster.device is not None:
        return cluster.device.num_cores
    num_hosts = cluster.num_hosts if isinstance(cluster, Hosts) else None
    return (num_hosts or 1) * cluster.paths.devices_per_host


def _parse_prices(prices: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in prices:
        name, separator, amount = text.rpartition("=")
        if separator and name not in names:
            raise SettingsError(f"--price must be of a cluster on offer, but got {name}; they are: {', '.join(names)}")
        try:
            value = float(amount)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise SettingsError(
                f"--price must be a number of at least 0, but got {amount!r}; write 98.32 or NAME=98.32"
            )
        found |= dict.fromkeys([name] if separator else names, value)
    return found


def describe_this_machine() -> Cluster:
    """Return this machine as a cluster: its processor, whose cores and memory all ranks share.

    Raises:
        SettingsError: The machine has a GPU, whose specification is to be named.
    """
    import torch

    if torch.cuda.is_available():
        raise SettingsError(
            f"--cluster must name the machines where there are GPUs, but is not given and this one has "
            f"{torch.cuda.get_device_name()}; name a preset of `paceline clusters`, or describe it in a JSON file"
        )
    num_cores = len(os.sched_getaffinity(0))
    idle_w, load_w = power_of_cores(num_cores)  # that a run's meter declares too
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = Device(
        peak_flops={"fp32": num_cores * _FLOPS_OF_CORE},
        memory_bytes=memory_bytes,
        memory_speed=BytesPerSecond(num_cores * _BYTES_OF_CORE),
        idle_w=idle_w,
        load_w=load_w,
        num_cores=num_cores,
        generation="cpu",
        is_host=True,
    )
    return Loopback(device=device)
