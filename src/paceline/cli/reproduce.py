"""`paceline reproduce`: published tables measured again, our numbers beside theirs."""

import os
from pathlib import Path
from typing import Annotated

import typer


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

    Every setting can be overridden: `paceline reproduce language-model-sync --num_seeds 5`.
    """
    if hosts is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of addresses without names, as hosts' are
    from paceline.benchmarks import check_new_files, print_table, write_files
    from paceline.benchmarks.reproductions import find_reproduction, list_reproductions
    from paceline.cli.bench import place_workers
    from paceline.cli.overrides import apply_overrides, parse_pairs

    if name is None:
        for known, reproduction in list_reproductions().items():
            typer.echo(f"{known:20} {(reproduction.__doc__ or '').splitlines()[0]}")
        return
    check_new_files(json, markdown)
    pairs = [*place_workers(hosts, bandwidth), *parse_pairs(context.args)]
    rows = apply_overrides(find_reproduction(name)(), pairs).reproduce()
    print_table(rows)
    write_files(rows, json, markdown)
