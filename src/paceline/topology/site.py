"""The place of a run: prices of its hosts, carbon of its electricity, and power where nothing measures it."""

from typing import Self

from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.registry import Settings, find_variant, list_variants
from paceline.topology.cluster import Cluster, Host
from paceline.topology.devices import Device, DeviceField, find_device
from paceline.topology.tables import (
    Price,
    find_factor,
    find_overhead,
    find_price,
    read_grid,
    read_overheads,
    read_prices,
)

J_PER_KWH = 3.6e6


class Site(Settings):
    """Prices, carbon and declared power of the hosts of a run. Nothing of it changes what is trained."""

    instance: str | None = None
    """Instance type of the hosts, which has a price in the table; none for hosts without a price."""
    region: str | None = None
    """Region of the price table; by default the first that has the instance type."""
    is_spot: bool = False
    """Whether hosts are paid at the spot price."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of a host for an hour, in place of the table's."""
    currency: str = "usd"
    """Currency of `price_per_hour`."""
    prices: str | None = None
    """CSV file of prices; by default the shipped examples, which are old and which `paceline prices` prints."""
    zone: str = "world"
    """Zone of the grid: a country by three letters, such as fra, or world."""
    kg_co2e_per_kwh: float | None = Field(default=None, ge=0)
    """Carbon of the electricity, in place of the table's."""
    grid: str | None = None
    """CSV file of grid zones; by default the shipped one."""
    place: str = "none"
    """Data centre, for its overhead: aws, azure, gcp, average; none for machines without one."""
    pue: float | None = Field(default=None, ge=1)
    """Overhead of the data centre (power usage effectiveness), in place of the table's."""
    overheads: str | None = None
    """CSV file of data centres; by default the shipped one."""
    device: DeviceField | None = None
    """Device whose power counts where no meter can be read: the name of a preset, or a specification; by default that
    of the instance type, or what the device's name tells."""
    host: Host | None = None
    """Host without its devices, whose power counts where no meter can be read; by default a part of a common server."""
    measures_energy: bool = True
    """Whether energy is measured, or estimated where no meter can be read."""

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        self.find_price()
        self.find_carbon()
        self.find_pue()
        return self

    @property
    def preset(self) -> Cluster | None:
        """Cluster of the instance type; None if it is none that is known."""
        if self.instance is None or self.instance not in list_variants(Cluster):  # type: ignore[type-abstract]
            return None
        return find_variant(Cluster, self.instance)()  # type: ignore[type-abstract]

    def find_price(self) -> Price | None:
        """Return the price of the instance type; None if there is none to look up.

        Raises:
            SettingsError: The table lacks it.
        """
        if self.price_per_hour is not None or self.instance is None:
            return None
        price = find_price(read_prices(self.prices), self.instance, self.region)
        price.per_hour(is_spot=self.is_spot)
        return price

    @property
    def host_per_hour(self) -> float | None:
        """Price of a host for an hour; None if it is not known."""
        price = self.find_price()
        return self.price_per_hour if price is None else price.per_hour(is_spot=self.is_spot)

    @property
    def used_currency(self) -> str:
        """Currency of the price."""
        price = self.find_price()
        return self.currency if price is None else price.currency

    def describe_price(self) -> str:
        """Return the price with its unit and origin; empty without one."""
        price = self.find_price()
        if price is not None:
            return price.describe(is_spot=self.is_spot)
        if self.price_per_hour is None:
            return ""
        return f"{self.price_per_hour:.4g} {self.currency} an hour a host (as given)"

    def find_carbon(self) -> tuple[float, str]:
        """Return kg CO2e for a kWh, and where the number comes from.

        Raises:
            SettingsError: The table lacks the zone.
        """
        if self.kg_co2e_per_kwh is not None:
            return self.kg_co2e_per_kwh, "as given"
        factor = find_factor(read_grid(self.grid), self.zone)
        return factor.kg_co2e_per_kwh, f"{factor.zone}, {factor.as_of.year}; {factor.source}"

    def find_pue(self) -> tuple[float, str]:
        """Return the overhead of the data centre, and where the number comes from.

        Raises:
            SettingsError: The table lacks the place.
        """
        if self.pue is not None:
            return self.pue, "as given"
        overhead = find_overhead(read_overheads(self.overheads), self.place)
        return overhead.pue, overhead.source

    def describe_carbon(self) -> str:
        """Return grid and overhead with their origins."""
        (factor, origin), (pue, about) = self.find_carbon(), self.find_pue()
        return f"{factor:.3g} kgCO2e/kWh ({origin}), PUE {pue:.3g} ({about})"

    def carbon_kg(self, energy_j: float) -> float:
        """Return the mass of greenhouse gases for an energy that machines have used."""
        return energy_j / J_PER_KWH * self.find_carbon()[0] * self.find_pue()[0]

    def find_device(self, name: str) -> Device | None:
        """Return the device whose power is declared, for a device that calls itself `name`; None if it is not known."""
        if self.device is not None:
            return self.device
        if self.preset is not None and self.preset.device is not None and not self.preset.device.is_host:
            return self.preset.device
        return guess_device(name)


_BY_NAME = (
    ("b200", "b200"), ("h200", "h200_141gb"), ("h100", "h100_80gb"), ("a100", "a100_80gb"), ("v100", "v100_32gb"),
    ("p100", "p100"),
)  # fmt: skip


def guess_device(name: str) -> Device | None:
    """Return the preset that the name of a GPU means; None if it means none."""
    found = next((preset for word, preset in _BY_NAME if word in name.lower()), None)
    return None if found is None else find_device(found)


def check_priced(site: Site, what: str) -> None:
    """Raise `SettingsError` where `what` needs a price and the site has none."""
    if site.host_per_hour is None:
        raise SettingsError(
            f"{what} must come with a price of hosts, but there is none; give site.price_per_hour "
            "(--site.price_per_hour 2.5), or site.instance for one of the table"
        )
