"""Prices of hosts by the hour."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.errors import SettingsError, unknown_name
from paceline.topology.tables.table import OLD_DAYS, DatedRow, read_rows

Money = Annotated[float, Field(ge=0)]


class Price(DatedRow):
    """Price of one host of an instance type in a region."""

    type: str
    """Instance type: the name of a cluster preset, or a name of one's own."""
    region: str
    """Region of the provider."""
    on_demand_per_hour: Money
    """Price of an hour, for as long as one likes."""
    spot_per_hour: Money | None = None
    """Price of an hour of a host that may be taken away; None: not offered."""
    egress_per_gb: Money | None = None
    """Price of 1e9 bytes that leave the region; None: not known."""
    currency: str = "usd"
    """Currency of the prices."""

    def per_hour(self, *, is_spot: bool) -> float:
        """Return the price of an hour.

        Raises:
            SettingsError: There is no spot price.
        """
        if not is_spot:
            return self.on_demand_per_hour
        if self.spot_per_hour is None:
            raise SettingsError(
                f"{self.type} in {self.region} must have a spot price, but has none; add spot_per_hour to the table"
            )
        return self.spot_per_hour

    def describe_origin(self, *, is_spot: bool) -> str:
        """Return the kind, place and age of the price: ``aws_p5_48xlarge in us-east-1, spot, as of 2024-06-01``."""
        return f"{self.type} in {self.region}, {'spot' if is_spot else 'on demand'}, as of {self.as_of}"

    def describe(self, *, is_spot: bool) -> str:
        """Return the price with its unit and origin: ``32.77 usd an hour a host (...)``."""
        amount = f"{self.per_hour(is_spot=is_spot):.4g} {self.currency} an hour a host"
        return f"{amount} ({self.describe_origin(is_spot=is_spot)})"

    def warn_of_age(self, today: date | None = None) -> str:
        """Return a sentence on a price that is old; empty for a recent one."""
        days = self.count_days(today)
        if days <= OLD_DAYS:
            return ""
        return (
            f"the price of {self.type} in {self.region} is {days:,} days old (as of {self.as_of}): prices change, and "
            "shipped ones are examples; give a table of your own"
        )


def read_prices(path: str | Path | None = None) -> list[Price]:
    """Return the prices of a CSV file, or the shipped examples.

    Raises:
        SettingsError: The file cannot be read, or a row is wrong.
    """
    return read_rows(Price, "prices", path)


def find_price(prices: Sequence[Price], instance: str, region: str | None = None) -> Price:
    """Return the price of an instance type, in a region or where the table has it first.

    Raises:
        SettingsError: The table has no such type, or not in that region.
    """
    of_type = [price for price in prices if price.type == instance]
    if not of_type:
        raise unknown_name("an instance type with a price", instance, {price.type for price in prices})
    found = [price for price in of_type if region in (None, price.region)]
    if not found:
        raise unknown_name(f"a region of {instance}", str(region), {price.region for price in of_type})
    return found[0]
