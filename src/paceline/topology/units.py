"""Numbers with units, as people write them: ``100gbit``, ``12.5GB/s``, ``64MiB``."""

import re
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from paceline.errors import SettingsError

_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z]*)(/s)?\s*")
_UNIT = re.compile(r"([kKmMgGtT]?)(i?)(bit|b|B)")
_ENERGY = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([kKMGT]?)(Wh|J)\s*")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class BytesPerSecond(float):
    """A speed in bytes/s; as a field it also takes text with a unit, ``100gbit``, ``12.5GB/s``.

    Text without a unit is refused: who writes 50 may mean any.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, which parses a value."""
        return core_schema.no_info_plain_validator_function(cls.parse)

    @classmethod
    def parse(cls, value: float | str) -> Self:
        """Return `value` in bytes/s; a number that is no text is bytes/s already.

        Raises:
            SettingsError: `value` is not a positive speed, or text without a unit.
        """
        speed = _parse(value, "a speed", "50mbit, 100gbit or 12.5GB/s, with its unit", has_time=True)
        return cls(speed)


class Joules(float):
    """An energy in joules; as a field it also takes text with a unit, ``5kWh``, ``20MJ``.

    Text without a unit is refused: who writes 50 may mean any.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, which parses a value."""
        return core_schema.no_info_plain_validator_function(cls.parse)

    @classmethod
    def parse(cls, value: float | str) -> Self:
        """Return `value` in joules; a number that is no text is joules already.

        Raises:
            SettingsError: `value` is not a positive energy, or text without a unit.
        """
        refusal = SettingsError(
            f"an energy must be like 5kWh, 300Wh or 20MJ, with its unit, and positive, but got {value!r}; write it so"
        )
        if isinstance(value, str):
            found = _ENERGY.fullmatch(value)
            if found is None:
                raise refusal
            value = float(found[1]) * 1000.0 ** _POWERS[found[2].lower()] * (3600.0 if found[3] == "Wh" else 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise refusal
        return cls(value)


def parse_size(value: float | str) -> float:
    """Return a size as bytes: ``100MB`` (powers of 1,000), ``64MiB`` (of 1,024), or a plain number of bytes.

    Raises:
        SettingsError: `value` is not a positive size.
    """
    return _parse(value, "a size", "100MB, 64MiB or a number of bytes", has_time=False)


def _parse(value: Any, what: str, examples: str, *, has_time: bool) -> float:
    refusal = SettingsError(f"{what} must be like {examples}, and positive, but got {value!r}; write it so")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refusal
    found = _NUMBER.fullmatch(str(value))
    if found is None or (found[3] and not (has_time and found[2])):
        raise refusal
    if has_time and isinstance(value, str) and not found[2]:
        raise refusal
    factor = 1.0
    if found[2]:
        unit = _UNIT.fullmatch(found[2])
        if unit is None or bool(unit[2]) > bool(unit[1]):
            raise refusal
        factor = (1024.0 if unit[2] else 1000.0) ** _POWERS[unit[1].lower()] / (1 if unit[3] == "B" else 8)
    try:
        number = float(found[1]) * factor
    except ValueError:
        raise refusal from None
    if not 0 < number < float("inf"):
        raise refusal
    return number
