"""`paceline reproduce`: published tables measured again, our numbers beside theirs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench import list_settings, print_rows, quieten
from paceline.registry import Settings


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A published table; without it they are listed.")] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Run one worker in each of so many hosts: network namespaces here; needs root.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of each host's link, like 100mbit or 1gbit.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the rows into this new file, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table into this new file.")] = None,
) -> None:
    """Measure a published table again, in shape and on a small scale, and print our numbers beside theirs.

    Every setting can be overridden: `paceline reproduce language-model-sync --num_seeds 5`; with
    `--help` after its name they are listed.
    """
    quieten(hosts)
    from paceline.benchmarks.reproductions import find_reproduction, list_reproductions

    if name is None:
        list_settings(list_reproductions())
        return
    print_rows(find_reproduction(name)(), lambda chosen: chosen.reproduce(), context, hosts, bandwidth, json, markdown)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the reproduction that is named."""
    if not arguments:
        return None
    from paceline.benchmarks.reproductions import find_reproduction

    return find_reproduction(arguments[0])()
