"""Hosts that are bought, beside hosts that are rented: what an hour costs, and from when on buying costs less."""

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.registry import Settings, find_variant, list_variants
from paceline.topology import Cluster
from paceline.topology.tables import find_price, read_prices

_HOURS_PER_YEAR = 8766.0


class Ownership(Settings):
    """A host that is bought, and one like it that is rented for the hours in which it works."""

    capital: float | None = Field(default=None, gt=0)
    """Price of a host that is bought, with its part of the network."""
    lifetime_years: float = Field(default=4.0, gt=0)
    """Years for which it is used."""
    resale_share: float = Field(default=0.1, ge=0, le=1)
    """Price at which it is sold then, as a share of the capital."""
    upkeep_share: float = Field(default=0.08, ge=0)
    """Cost of space, staff and repairs in a year, as a share of the capital."""
    electricity_per_kwh: float = Field(default=0.12, ge=0)
    """Price of electricity."""
    pue: float = Field(default=1.58, ge=1)
    """Overhead of the data centre; by default the mean of a survey of 2023."""
    idle_w: float | None = Field(default=None, ge=0)
    """Power of the host without work; by default that of the instance type's preset."""
    load_w: float | None = Field(default=None, gt=0)
    """Power of the host at work; by default that of the instance type's preset."""
    utilisation: float = Field(default=0.7, gt=0, le=1)
    """Share of all hours in which the host works."""
    instance: str | None = None
    """Instance type that is rented, which has a price in the table."""
    region: str | None = None
    """Region of the price table; by default the first that has the instance type."""
    is_spot: bool = False
    """Whether the spot price is paid."""
    prices: str | None = None
    """CSV file of prices; by default the shipped examples."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Price of a rented host for an hour, in place of the table's."""
    currency: str = "usd"
    """Currency of all amounts."""

    @model_validator(mode="after")
    def _check_power(self) -> Self:
        if self.idle_w is not None and self.load_w is not None and self.load_w < self.idle_w:
            raise SettingsError(f"load_w must be at least idle_w = {self.idle_w:g}, but got {self.load_w:g}; raise it")
        return self

    def compare(self) -> "OwnershipAnswer":
        """Return both costs of a host over the lifetime of the one that is bought.

        Raises:
            SettingsError: The capital, a price or power is not known.
        """
        if self.capital is None:
            raise SettingsError("capital must be given, the price of a host that is bought; give --capital 300000")
        rent, rent_about, warning = self._find_rent()
        idle_w, load_w = self._find_power()
        hours = self.lifetime_years * _HOURS_PER_YEAR
        work_hours = hours * self.utilisation
        idle_kwh = idle_w / 1e3 * self.pue * hours
        kwh_per_hour = (load_w - idle_w) / 1e3 * self.pue
        fixed = self.capital * (1 - self.resale_share + self.upkeep_share * self.lifetime_years)
        fixed += idle_kwh * self.electricity_per_kwh
        saved_per_hour = rent - kwh_per_hour * self.electricity_per_kwh
        owned = fixed + kwh_per_hour * work_hours * self.electricity_per_kwh
        break_even = fixed / saved_per_hour / hours if saved_per_hour > 0 else None
        return OwnershipAnswer(
            settings=self,
            hours=hours,
            work_hours=work_hours,
            idle_w=idle_w,
            load_w=load_w,
            kwh=idle_kwh + kwh_per_hour * work_hours,
            owned=owned,
            rented=rent * work_hours,
            rent_per_hour=rent,
            rent_about=rent_about,
            break_even_utilisation=break_even if break_even is not None and break_even <= 1 else None,
            break_even_months=self._find_months(rent, (owned - self._net_capital()) / hours),
            warning=warning,
        )

    def _net_capital(self) -> float:
        assert self.capital is not None
        return self.capital * (1 - self.resale_share)

    def _find_months(self, rent: float, running_per_hour: float) -> float | None:
        """Return after how many months rent at this utilisation has cost as much; None if not within the lifetime."""
        saved = rent * self.utilisation - running_per_hour
        hours = self._net_capital() / saved if saved > 0 else None
        return None if hours is None or hours > self.lifetime_years * _HOURS_PER_YEAR else hours / _HOURS_PER_YEAR * 12

    def _find_rent(self) -> tuple[float, str, str]:
        if self.price_per_hour is not None:
            return self.price_per_hour, "as given", ""
        if self.instance is None:
            raise SettingsError(
                "a price of rented hosts must be given; give --instance aws_p5_48xlarge, or --price_per_hour 98"
            )
        price = find_price(read_prices(self.prices), self.instance, self.region)
        if price.currency != self.currency:
            raise SettingsError(
                f"currency must be that of the price, {price.currency}, but got {self.currency}; change it"
            )
        about = price.describe_origin(is_spot=self.is_spot)
        return price.per_hour(is_spot=self.is_spot), about, price.warn_of_age()

    def _find_power(self) -> tuple[float, float]:
        idle_w, load_w = self.idle_w, self.load_w
        known = list_variants(Cluster)  # type: ignore[type-abstract]
        if self.instance in known and (idle_w is None or load_w is None):
            preset = find_variant(Cluster, self.instance)()  # type: ignore[type-abstract]
            device, count = preset.device, preset.paths.devices_per_host
            if device is not None:
                idle_w = preset.host.idle_w + count * device.idle_w if idle_w is None else idle_w
                load_w = preset.host.load_w + count * device.working_w if load_w is None else load_w
        if idle_w is None or load_w is None:
            raise SettingsError(
                "the power of a host must be known; give --idle_w and --load_w, or --instance with a known type"
            )
        return idle_w, load_w


@dataclass(frozen=True)
class OwnershipAnswer:
    """Costs of one host over the lifetime of the one that is bought."""

    settings: Ownership
    hours: float
    """Hours of the lifetime."""
    work_hours: float
    """Hours in which the host works."""
    idle_w: float
    load_w: float
    kwh: float
    """Energy over the lifetime, with the overhead of the data centre."""
    owned: float
    """Cost of owning."""
    rented: float
    """Cost of renting for the hours of work."""
    rent_per_hour: float
    rent_about: str
    break_even_utilisation: float | None
    """Share of hours at which both cost the same; None if owning costs more even where the host never idles."""
    break_even_months: float | None
    """Months after which rent at the given utilisation has cost as much; None if not within the lifetime."""
    warning: str
    """Sentence on a price that is old; empty for others."""

    def describe(self) -> list[str]:
        """Return a line each on owning, renting and when they cost the same, with units and assumptions."""
        given, unit = self.settings, self.settings.currency
        power = f"{self.load_w:,.0f} W for {given.utilisation:.0%} of hours, else {self.idle_w:,.0f} W"
        capital = (
            f"{given.capital:,.0f} {unit} of capital over {given.lifetime_years:g} years, sold for "
            f"{given.resale_share:.0%} of it, upkeep {given.upkeep_share:.0%} of it a year"
        )
        energy = f"{self.kwh:,.0f} kWh at {given.electricity_per_kwh:g} {unit} ({power}, PUE {given.pue:g})"
        work = f"{self.work_hours:,.0f} hours of work"
        lines = [
            f"owned: {self.owned:,.0f} {unit} a host, {self.owned / self.work_hours:,.4g} {unit} an hour of work "
            f"({capital}; {energy}; {work})",
            f"rented: {self.rented:,.0f} {unit} a host, {self.rent_per_hour:,.4g} {unit} an hour of work "
            f"({self.rent_about}; returned while there is no work; {work})",
            f"break-even: {self._describe_utilisation()}; {self._describe_months()}",
        ]
        return [*lines, f"warning: {self.warning}"] if self.warning else lines

    def _describe_utilisation(self) -> str:
        if self.break_even_utilisation is None:
            return "renting costs less at any utilisation"
        return f"owning costs less above a utilisation of {self.break_even_utilisation:.1%} of all hours"

    def _describe_months(self) -> str:
        given = self.settings.utilisation
        if self.break_even_months is None:
            return f"at {given:.0%} it has not paid for itself in {self.settings.lifetime_years:g} years"
        return f"at {given:.0%} it has paid for itself after {self.break_even_months:.1f} months"
