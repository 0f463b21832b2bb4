"""`paceline bench`: measurements, as ratios within one run."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A benchmark; without it they are listed.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the rows into this file, as JSON.")] = None,
) -> None:
    """Measure Paceline beside a reference, both sides interleaved in one run, and print a table.

    Every setting of a benchmark can be overridden: `paceline bench replica --num_pairs 20`.
    """
    from paceline.benchmarks import find_benchmark, list_benchmarks, print_table, write_rows
    from paceline.cli.overrides import apply_overrides, parse_pairs

    if name is None:
        for known, benchmark in list_benchmarks().items():
            typer.echo(f"{known:12} {(benchmark.__doc__ or '').splitlines()[0]}")
        return
    settings = apply_overrides(find_benchmark(name)(), parse_pairs(context.args))
    rows = settings.measure()
    print_table(rows)
    if json is not None:
        write_rows(rows, json)
