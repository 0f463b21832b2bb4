"""`paceline bench`: measurements, as ratios within one run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.errors import SettingsError
from paceline.launch.signals import cleaning_up_when_asked
from paceline.registry import Settings

if TYPE_CHECKING:
    from paceline.benchmarks import TableRow

S = TypeVar("S", bound=Settings)


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a benchmark; without it, all are listed.")] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Hosts with one worker each: network namespaces on this machine; needs root.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bandwidth of each host's link, like 100mbit or 1gbit.")] = None,
    json: Annotated[Path | None, typer.Option(help="New file for the rows, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="New file for the table.")] = None,
) -> None:
    """Measure Paceline beside a reference, both sides interleaved in one run, and print a table.

    Every setting of a benchmark can be overridden: `paceline bench replica --num_pairs 20`; `paceline bench replica
    --help` lists them. With `--hosts 4 --bandwidth 100mbit` its workers run on separate hosts with limited links;
    `--workers.num_workers 8` puts two on each.
    """
    from paceline.benchmarks import find_benchmark, list_benchmarks

    if name is None:
        list_settings(list_benchmarks())
        return
    print_rows(find_benchmark(name)(), lambda chosen: chosen.measure(), context, hosts, bandwidth, json, markdown)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the named benchmark."""
    if not arguments:
        return None
    from paceline.benchmarks import find_benchmark

    return find_benchmark(arguments[0])()


def list_settings(known: Mapping[str, type[Settings]]) -> None:
    """Print each name with the first line of its docstring."""
    width = max(len(name) for name in known)
    for name, settings in known.items():
        typer.echo(f"{name:{width}} {(settings.__doc__ or '').splitlines()[0]}")


def print_rows(
    settings: S,
    measure: Callable[[S], Sequence["TableRow"]],
    context: typer.Context,
    hosts: int | None,
    bandwidth: str | None,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Measure with the overrides of the command line, print the table, and write the requested files."""
    from paceline.benchmarks import check_new_files, print_table, write_files
    from paceline.cli.overrides import apply_overrides, parse_pairs

    check_new_files(json, markdown)
    chosen = apply_overrides(settings, [*_place_workers(hosts, bandwidth), *parse_pairs(context.args)])
    with cleaning_up_when_asked():
        rows = measure(chosen)
    print_table(rows)
    write_files(rows, json, markdown)


def _place_workers(hosts: int | None, bandwidth: str | None) -> list[tuple[str, Any]]:
    """Return the overrides for workers on hosts, one on each."""
    if hosts is None and bandwidth is None:
        return []
    if hosts is None or bandwidth is None:
        raise SettingsError(
            f"--hosts and --bandwidth must be given together, but got {hosts} and {bandwidth}; add the other"
        )
    return [
        ("workers.num_hosts", str(hosts)),
        ("workers.num_workers", str(hosts)),
        ("workers.bandwidth", bandwidth),
    ]
