"""`paceline profile`: a model and the machine that trains it, measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from paceline.simulator.training.profile import Profile


def profile(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or your own: file.py:function.")],
    workers: Annotated[int, typer.Option(help="Workers that measure together, each in a process.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="New file for the profile.")] = Path("profile.json"),
) -> None:
    """Measure a model on this machine, and messages between workers, in less than a minute.

    Products of matrices by shape, memory, the model's blocks forward and backward, the optimizer, messages between each
    two workers and all-reduces of eight sizes, all in real worker processes. `paceline simulate training --profile`
    takes the file. Every setting of the recipe can be overridden, as for `paceline train`.
    """
    import os

    from paceline.cli.overrides import parse_pairs
    from paceline.cli.prepare import make_run
    from paceline.launch.processes import run_in_processes
    from paceline.planner.profiling import list_shapes, make_profile
    from paceline.planner.workload import trace_workload
    from paceline.training.compiling import NO_COMPILER

    if out.exists():
        raise SettingsError(f"--out must be a new file, but {out} exists; choose another")
    overrides = parse_pairs(context.args)
    run = make_run(recipe, overrides)
    if not run.layout.is_plain:
        raise SettingsError(
            "layout must be plain to be profiled, since each worker measures a whole model; leave it out"
        )
    if run.compiler != NO_COMPILER:
        raise SettingsError(f"compiler must be none to be profiled, but got {run.compiler}; leave it out")
    shape = trace_workload(run, run.open_data(), on_cpu=True)
    samples = max(1, -(-run.global_batch // workers) // run.num_micro_batches)
    threads = run.num_threads or max(1, len(os.sched_getaffinity(0)) // workers)
    shapes = list_shapes(shape, samples)
    measured = run_in_processes(workers, measure_recipe, recipe, overrides, samples, threads, shapes)
    made = make_profile(measured, shape, threads, run.precision)
    with storing(out):
        out.write_text(made.model_dump_json(indent=1) + "\n")
    _print(made)
    typer.echo(f"written: {out}; paceline simulate training {recipe} --profile {out} --ranks 1,2,4 takes it")


def measure_recipe(
    recipe: str, overrides: list[tuple[str, str]], samples: int, num_threads: int, shapes: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """Return what this worker measures of a recipe; see `measure_rank`."""
    from paceline.cli.prepare import make_run
    from paceline.planner.measuring import measure_rank

    return measure_rank(make_run(recipe, overrides), samples, num_threads, shapes)


def read_profile(path: Path) -> "Profile":
    """Return the profile in a file.

    Raises:
        SettingsError: The file is missing, no profile, or of another machine.
    """
    from pydantic import ValidationError

    from paceline.cli.clusters import read_json
    from paceline.planner.profiling import describe_machine
    from paceline.registry import explain
    from paceline.simulator.training.profile import Profile

    try:
        read = Profile.model_validate(read_json(path, "--profile"))
    except ValidationError as error:
        raise SettingsError(f"{path}: {explain(error)}; profile it anew: paceline profile") from error
    here = describe_machine()
    for name in ("processor", "num_cores", "torch"):
        there = getattr(read.machine, name)
        if there != getattr(here, name):
            raise SettingsError(
                f"--profile must be of this machine, but {path} is of one with {name}={there}, and this one has "
                f"{getattr(here, name)}; profile it anew: paceline profile"
            )
    return read


def _print(made: "Profile") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.monitor.formatting import size

    model, ms = made.model, 1000.0
    threads = f"{made.num_threads} thread{'s' * (made.num_threads > 1)}"
    typer.echo(f"{made.num_workers} workers of {threads} on {made.machine.processor}")
    best = max(one.flops_per_s for one in made.products)
    typer.echo(
        f"products: up to {best / 1e9:.3g} Gflop/s a worker; memory {made.memory_bytes_per_s / 1e9:.3g} GB/s; "
        f"the smallest operator {1e6 * made.launch_s:.2g} us"
    )
    for index, samples in enumerate(model.samples):
        forward, backward = model.forward_s[index], model.backward_s[index]
        typer.echo(f"{model.title}, {samples} samples: forward {ms * forward:.4g} ms, backward {ms * backward:.4g} ms")
    typer.echo(f"update {ms * model.optimizer_s:.4g} ms")
    predicted_s = sum(made.predict(model.samples[0], made.num_workers).values())
    typer.echo(
        f"a step of all workers: {ms * model.step_s:.4g} ms; from its parts {ms * predicted_s:.4g} ms "
        f"({predicted_s / model.step_s - 1:+.0%})"
    )
    for link in made.links:
        one, other = link.ranks
        speed = f"{8 * link.bytes_per_s / 1e9:.3g} Gbit/s"
        typer.echo(f"rank {one} to {other}: {1e6 * link.latency_s:.3g} us, {speed}")
    if made.exchanges:
        table = Table("all-reduce", "ms", "of it the processor's", box=None)
        for each in made.exchanges:
            table.add_row(size(each.num_bytes), f"{ms * each.wall_s:.3g}", f"{ms * each.cpu_s:.3g}")
        Console().print(table, markup=False)
