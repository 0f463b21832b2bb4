"""`paceline reproduce`: published tables measured again or predicted, Paceline's numbers beside the published ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

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
    """Measure a published table again, in shape and on a small scale, or predict it, beside the published numbers.

    `paceline reproduce all` predicts all tables that need no training; its --markdown is a page.
    Every setting can be overridden: `paceline reproduce language-model-sync --num_seeds 5`;
    `--help` after its name lists them.
    """
    from paceline.benchmarks import check_new_files
    from paceline.benchmarks.reproductions import (
        AllTables,
        Reproduction,
        find_reproduction,
        list_reproductions,
    )
    from paceline.benchmarks.reproductions.all_tables import write_page

    if name is None:
        list_settings(list_reproductions())
        return
    settings, kept = find_reproduction(name)(), list[Any]()

    def measure(chosen: Reproduction) -> Sequence[Any]:
        kept.extend(chosen.reproduce())
        return kept

    is_page = isinstance(settings, AllTables) and markdown is not None
    if is_page:
        check_new_files(json, markdown)
    print_rows(settings, measure, context, hosts, bandwidth, json, None if is_page else markdown)
    if is_page and markdown is not None:
        write_page(kept, markdown)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the named reproduction."""
    if not arguments:
        return None
    from paceline.benchmarks.reproductions import find_reproduction

    return find_reproduction(arguments[0])()
