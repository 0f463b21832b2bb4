"""`paceline reproduce`: published tables measured again, Paceline's numbers beside the published ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench import list_settings, print_rows
from paceline.registry import Settings


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a published table; without it, all are listed.")] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Hosts with one worker each: network namespaces on this machine; needs root.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bandwidth of each host's link, like 100mbit or 1gbit.")] = None,
    json: Annotated[Path | None, typer.Option(help="New file for the rows, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="New file for the table.")] = None,
) -> None:
    """Measure a published table again, in shape and on a small scale, beside the published numbers.

    Every setting can be overridden: `paceline reproduce language-model-sync --num_seeds 5`;
    `--help` after its name lists them.
    """
    from paceline.benchmarks.reproductions import find_reproduction, list_reproductions

    if name is None:
        list_settings(list_reproductions())
        return
    print_rows(find_reproduction(name)(), lambda chosen: chosen.reproduce(), context, hosts, bandwidth, json, markdown)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the named reproduction."""
    if not arguments:
        return None
    from paceline.benchmarks.reproductions import find_reproduction

    return find_reproduction(arguments[0])()
