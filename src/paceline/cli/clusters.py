"""`paceline clusters`: known clusters and devices, or one cluster's settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import SettingsError

if TYPE_CHECKING:
    from paceline.topology import Cluster


def clusters(
    cluster: Annotated[str | None, typer.Argument(help="Name of one, or a JSON file: its settings.")] = None,
) -> None:
    """List clusters and devices by name; or print one cluster's settings, to begin a JSON file of your own from."""
    if cluster is not None:
        typer.echo(read_cluster(cluster).model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(_tabulate_clusters(), markup=False)
    console.print(_tabulate_devices(), markup=False)


def read_cluster(text: str) -> "Cluster":
    """Return the cluster that a name or a JSON file describes.

    Raises:
        SettingsError: There is no such file, it is no JSON, or a setting is wrong.
    """
    from paceline.registry import validate
    from paceline.topology import Cluster

    if not text.endswith(".json"):
        return validate(Cluster.model_validate, text, "cluster")
    return validate(Cluster.model_validate, read_json(Path(text), "cluster"), text)


def read_json(path: Path, what: str) -> Any:
    """Return a JSON file's content.

    Raises:
        SettingsError: The file is missing, or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{what} must be a file that can be read, but got {path}; check the path") from error
    except ValueError as error:
        raise SettingsError(f"{what} must be JSON, but {path} is not: {error}; correct it") from error


def _tabulate_clusters() -> Any:
    from rich.table import Table

    from paceline.registry import list_variants
    from paceline.topology import DEVICES, Cluster

    table = Table("cluster", "device", "a host", "inside, GB/s", "network of a device, Gb/s", "what it is", box=None)
    for name, variant in list_variants(Cluster).items():  # type: ignore[type-abstract]
        settings = variant()
        paths = settings.paths
        known = [name for name, device in DEVICES.items() if device == settings.device]
        has_hosts = 1 < paths.devices_per_host < 2**31
        table.add_row(
            name,
            known[0] if known else "-",
            str(paths.devices_per_host) if has_hosts else "-",
            f"{paths.local_bytes_per_s / 1e9:.4g}",
            f"{8e-9 * paths.network_bytes_per_s:.4g}",
            (variant.__doc__ or "").splitlines()[0],
        )
    return table


def _tabulate_devices() -> Any:
    from rich.table import Table

    from paceline.topology import DEVICES, PRECISIONS

    table = Table("device", *(f"{name}, Tflop/s" for name in PRECISIONS), "memory, GB", "GB/s", "W", box=None)
    for name, device in DEVICES.items():
        peaks = (f"{device.peak_flops[p] / 1e12:.4g}" if p in device.peak_flops else "-" for p in PRECISIONS)
        watts = f"{device.idle_w:.0f}-{device.working_w:.0f}"
        table.add_row(name, *peaks, f"{device.memory_bytes / 1e9:.4g}", f"{device.memory_speed / 1e9:.4g}", watts)
    return table
