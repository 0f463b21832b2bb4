"""`paceline bench`: measurements, as ratios within one run."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import SettingsError


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A benchmark; without it they are listed.")] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Run one worker in each of so many hosts: network namespaces here; needs root.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of each host's link, like 100mbit or 1gbit.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the rows into this new file, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table into this new file.")] = None,
) -> None:
    """Measure Paceline beside a reference, both sides interleaved in one run, and print a table.

    Every setting of a benchmark can be overridden: `paceline bench replica --num_pairs 20`. With `--hosts 4 --bandwidth
    100mbit` its workers run in hosts of their own, whose links are limited; `--workers.num_workers 8` puts two in each.
    """
    if hosts is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without names, as hosts' are
    from paceline.benchmarks import check_new_files, find_benchmark, list_benchmarks, print_table, write_files
    from paceline.cli.overrides import apply_overrides, parse_pairs

    if name is None:
        for known, benchmark in list_benchmarks().items():
            typer.echo(f"{known:12} {(benchmark.__doc__ or '').splitlines()[0]}")
        return
    check_new_files(json, markdown)
    pairs = [*place_workers(hosts, bandwidth), *parse_pairs(context.args)]
    rows = apply_overrides(find_benchmark(name)(), pairs).measure()
    print_table(rows)
    write_files(rows, json, markdown)


def place_workers(hosts: int | None, bandwidth: str | None) -> list[tuple[str, Any]]:
    """Return the overrides of a benchmark whose workers run on hosts, one on each."""
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
