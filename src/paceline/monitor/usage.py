"""What a run has used: energy, carbon and money, summed over its workers and attempts, with units and origins."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from paceline.monitor.events import Record, ResourcesUsed
from paceline.monitor.formatting import duration, number
from paceline.monitor.html_elements import section, table
from paceline.monitor.reader import RunSummary

# As in topology.site: logs are shown without importing devices and clusters.
J_PER_KWH = 3.6e6


@dataclass
class Usage:
    """Sums of `ResourcesUsed`."""

    duration_s: float = 0.0
    """Time that rank 0 trained, over all attempts."""
    worker_s: float = 0.0
    """Time that all workers trained, summed over them."""
    energy_j: float = 0.0
    energy_of: dict[str, float] = field(default_factory=dict)
    """Energy by part."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Origins of the energy by part, each once."""
    carbon_kg: float = 0.0
    carbon_by: list[str] = field(default_factory=list)
    money: float | None = None
    currency: str = ""
    prices: list[str] = field(default_factory=list)

    def add(self, event: ResourcesUsed, rank: int) -> None:
        """Add what one worker has used."""
        self.duration_s += event.duration_s if rank == 0 else 0.0
        self.worker_s += event.duration_s
        self.energy_j += event.energy_j
        self.carbon_kg += event.carbon_kg
        for part, energy_j in event.energy_of.items():
            self.energy_of[part] = self.energy_of.get(part, 0.0) + energy_j
        for part, source in event.sources.items():
            _add_once(self.sources.setdefault(part, []), source)
        _add_once(self.carbon_by, event.carbon_by)
        _add_once(self.prices, event.price)
        if event.money is not None:
            self.money, self.currency = (self.money or 0.0) + event.money, event.currency


def _add_once(texts: list[str], text: str) -> None:
    if text and text not in texts:
        texts.append(text)


def sum_usage(records: Iterable[Record]) -> Usage:
    """Return what a run has used, from the records of its log."""
    usage = Usage()
    for record in records:
        if isinstance(record.event, ResourcesUsed):
            usage.add(record.event, record.rank)
    return usage


def energy(value_j: float) -> str:
    """Return an energy as ``4.5 J`` or ``1.2 kJ``, and from there on in kWh too: ``3.6 MJ = 1 kWh``."""
    for unit, size in (("J", 1.0), ("kJ", 1e3), ("MJ", 1e6), ("GJ", 1e9)):
        if value_j < 1000 * size or unit == "GJ":
            return f"{number(value_j / size)} {unit} = {number(value_j / J_PER_KWH)} kWh"
    raise AssertionError


def carbon(value_kg: float) -> str:
    """Return a mass of greenhouse gases in kgCO2e."""
    return f"{number(value_kg)} kgCO2e"


def describe_usage(summary: RunSummary) -> Iterator[str]:
    """Yield a sentence each on the energy, carbon and cost of a run, with units and assumptions."""
    usage = sum_usage(summary.usage)
    num_samples = sum(step.event.num_samples for step in summary.steps)
    if not usage.worker_s:
        return
    if usage.sources:
        yield f"energy: {_describe_energy(usage, num_samples)}"
        yield f"carbon: {_describe_carbon(usage, num_samples)}"
    if usage.money is not None:
        samples_per_epoch = summary.starts[-1].event.samples_per_epoch if summary.starts else 0
        yield f"cost: {_describe_money(usage, num_samples, samples_per_epoch)}"


def _describe_energy(usage: Usage, num_samples: int) -> str:
    per_sample = f", {number(usage.energy_j / num_samples)} J a sample" if num_samples else ""
    watts = usage.energy_j / usage.duration_s if usage.duration_s else 0.0
    least = "at least " if any(part not in usage.energy_of for part in usage.sources) else ""
    origins = "; ".join(f"{part} {' and '.join(texts)}" for part, texts in usage.sources.items())
    spent = f"{number(watts)} W on average over {duration(usage.duration_s)}"
    return f"{least}{energy(usage.energy_j)}, {spent}{per_sample}; {origins}"


def _describe_carbon(usage: Usage, num_samples: int) -> str:
    per_sample = f", {number(1e6 * usage.carbon_kg / num_samples)} mg a sample" if num_samples else ""
    return f"{carbon(usage.carbon_kg)}{per_sample}; {' and '.join(usage.carbon_by)}"


def _describe_money(usage: Usage, num_samples: int, samples_per_epoch: int) -> str:
    assert usage.money is not None
    parts = [f"{number(usage.money)} {usage.currency}"]
    for size, what in ((1_000_000, "for 1,000,000 samples"), (samples_per_epoch, f"an epoch of {samples_per_epoch:,}")):
        if num_samples and size:
            parts.append(f"{number(size * usage.money / num_samples)} {usage.currency} {what}")
    return f"{', '.join(parts)}; {' and '.join(usage.prices)}, while workers train"


def render_usage(summary: RunSummary) -> str:
    """Return the section on energy and cost; empty if nothing is known of either."""
    rows = [sentence.partition(": ")[::2] for sentence in describe_usage(summary)]
    return section("Energy and cost", table(["what", "how much, and how it is known"], rows)) if rows else ""


def list_usage_tiles(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return the tiles of a report on energy and cost: name, value, remark."""
    usage = sum_usage(summary.usage)
    found = []
    if usage.sources:
        is_declared = any("declared" in text for texts in usage.sources.values() for text in texts)
        how = "declared in part, not measured" if is_declared else "measured"
        found.append(("energy", f"{number(usage.energy_j / J_PER_KWH)} kWh", how))
        found.append(("carbon", carbon(usage.carbon_kg), usage.carbon_by[0].partition(" (")[0]))
    if usage.money is not None:
        found.append(("cost", f"{number(usage.money)} {usage.currency}", usage.prices[0].partition(" (")[0]))
    return found
