"""`paceline memory`: how much memory a run would need on each rank."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.data.base import Splits
    from paceline.memory import Estimate
    from paceline.monitor.events import MemoryEstimated
    from paceline.training.run import Run


def memory(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or your own: file.py:function.")],
    workers: Annotated[int, typer.Option(help="Workers: data times sharded ranks.", min=1)] = 2,
) -> None:
    """Estimate the memory that each rank of a run needs; nothing is allocated.

    Every setting of the recipe can be overridden, as for `paceline train`:
    `paceline memory transformer_lm --model.width 2048 --model.num_layers 20 --memory.recompute full`.
    """
    from paceline.cli.overrides import parse_pairs
    from paceline.cli.prepare import check_workers, make_run
    from paceline.memory import available_bytes, guess_device
    from paceline.training.memory_fit import estimate

    run = make_run(recipe, parse_pairs(context.args))
    splits = check_workers(run, workers)
    num_ranks = workers * run.layout.ranks_of_worker
    device = guess_device(num_ranks)
    needed = estimate(run, splits, num_ranks, device)
    _print(needed, num_ranks, device.type)
    available = available_bytes(device, num_ranks)
    verdict = "fits" if needed.peak_bytes <= available else "does not fit"
    typer.echo(f"it {verdict}: a rank may have {_size(available)} here")


def check_memory(run: "Run", splits: "Splits", num_workers: int) -> "MemoryEstimated | None":
    """Return what to tell of the memory that each rank needs; None where it fits by far.

    Raises:
        SettingsError: It does not fit; the message says what would.
    """
    from paceline.memory import available_bytes, guess_device
    from paceline.monitor.events import MemoryEstimated
    from paceline.training.memory_fit import check_fit

    num_ranks = num_workers * run.layout.ranks_of_worker
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks + run.sync.num_server_processes))
    device = guess_device(num_here)
    available = available_bytes(device, num_here)
    needed = check_fit(run, splits, num_ranks, device, available)
    if needed is None:
        return None
    bytes_of: dict[str, float] = {category: float(num_bytes) for category, num_bytes in needed.bytes_of.items()}
    return MemoryEstimated(peak_bytes=needed.peak_bytes, bytes_of=bytes_of, available_bytes=available)


def tell_memory(directory: Path, event: "MemoryEstimated | None") -> None:
    """Write into a run's log what was estimated."""
    import time

    from paceline.monitor.log import EventLog

    if event is not None:
        with EventLog(directory / "events.jsonl", run=directory.name, rank=-1, epoch=-1, clock=time.monotonic) as log:
            log.write(event, step=-1)


def _print(needed: "Estimate", num_ranks: int, device: str) -> None:
    typer.echo(f"tensors of each of {num_ranks} ranks on {device}, at the worst moment of a step:")
    for category, num_bytes in needed.bytes_of.items():
        typer.echo(f"  {category:14} {_size(num_bytes):>9}")
    typer.echo(f"  {'in all':14} {_size(needed.peak_bytes):>9}")
    if needed.host_bytes:
        typer.echo(f"  {'on the host':14} {_size(needed.host_bytes):>9}")


def _size(num_bytes: int) -> str:
    from paceline.monitor.formatting import size

    return size(num_bytes)
