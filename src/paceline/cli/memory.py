"""`paceline memory`: estimated memory of a run on each rank."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.memory import Estimate


def memory(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or your own: file.py:function.")],
    workers: Annotated[
        int | None,
        typer.Option(help="Workers: data times sharded times expert ranks. [default: 2, or the layout's]", min=1),
    ] = None,
) -> None:
    """Estimate the memory that each rank of a run needs; nothing is allocated.

    Every setting of the recipe can be overridden, as for `paceline train`:
    `paceline memory transformer_lm --model.width 2048 --model.num_layers 20 --memory.recompute full`.
    """
    from paceline.cli.overrides import parse_pairs
    from paceline.cli.prepare import make_run
    from paceline.memory import available_bytes, guess_device
    from paceline.training.memory_fit import estimate
    from paceline.training.rehearsal import check_workers

    run = make_run(recipe, parse_pairs(context.args))
    workers = workers or run.layout.default_workers
    splits = check_workers(run, workers)
    num_ranks = workers * run.layout.ranks_of_worker
    device = guess_device(num_ranks)
    needed = estimate(run, splits, num_ranks, device)
    _print(needed, num_ranks, device.type)
    if run.peer_memory.interval:
        part_bytes = needed.bytes_of["parameters"] + needed.bytes_of["optimizer"]
        num_bytes = run.peer_memory.count_bytes(part_bytes, num_ranks)
        typer.echo(
            f"copies in peers' memory take {_size(num_bytes)} of the host's for each rank, in {run.peer_memory.folder}"
        )
    available = available_bytes(device, num_ranks)
    outcome = "fits" if needed.peak_bytes <= available else "may not fit" if needed.division else "does not fit"
    typer.echo(f"it {outcome}: a rank may have {_size(available)} here")


def _print(needed: "Estimate", num_ranks: int, device: str) -> None:
    typer.echo(f"tensors of each of {num_ranks} ranks on {device}, at the worst moment of a step:")
    for category, num_bytes in needed.bytes_of.items():
        typer.echo(f"  {category:14} {_size(num_bytes):>9}")
    typer.echo(f"  {'in all':14} {_size(needed.peak_bytes):>9}")
    if needed.most_bytes:
        typer.echo(f"  {'at most':14} {_size(needed.most_bytes):>9}, if tokens use the experts of one rank most")
    if needed.division:
        typer.echo(f"  an estimate by division, since ranks could not be rehearsed: {needed.division}")
    if needed.host_bytes:
        typer.echo(f"  {'on the host':14} {_size(needed.host_bytes):>9}")


def _size(num_bytes: int) -> str:
    from paceline.monitor.formatting import size

    return size(num_bytes)
