"""Settings in which two runs differ."""

from typing import Any

from paceline.training.run import Run


def list_differences(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting in which two runs differ, by dotted path."""
    one, other = (flatten_settings(run.model_dump(mode="json")) for run in (first, second))
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        path = prefix + name
        flat |= flatten_settings(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
