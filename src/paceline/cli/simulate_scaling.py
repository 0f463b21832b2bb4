"""`paceline simulate training RECIPE`: a run of a recipe on more and more ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from paceline.planner.scaling import RunScaling, ScalingPoint
    from paceline.topology import Cluster

DEFAULT_CLUSTER = "dgx_h100"
_MOST_ASSUMED = 6


def simulate_scaling(
    recipe: str,
    pairs: list[tuple[str, str]],
    num_ranks: tuple[int, ...],
    calibrate: Path | None,
    picture: Path | None,
    json_file: Path | None,
    profile_file: Path | None = None,
) -> None:
    """Predict a recipe's run on each number of ranks; print the curves, draw `picture` and write `json_file`.

    Raises:
        SettingsError: The recipe, the cluster or a setting is wrong, or nothing can be predicted.
    """
    from paceline.cli.prepare import make_run
    from paceline.cli.profile import read_profile
    from paceline.cli.simulate_training import read_measured
    from paceline.planner.scaling import predict_scaling
    from paceline.planner.workload import trace_workload
    from paceline.simulator.training.answers import find_posterior

    of_cluster = [pair for pair in pairs if pair[0].partition(".")[0] == "cluster"]
    profile = None if profile_file is None else read_profile(profile_file)
    if profile is not None and of_cluster:
        raise SettingsError("--cluster must be left out with --profile, which is of this machine; leave one out")
    cluster = _find_cluster(of_cluster) if profile is None else profile.cluster
    run = make_run(recipe, [pair for pair in pairs if pair not in of_cluster])
    splits = run.open_data()
    on_cpu = cluster.device is not None and cluster.device.is_host
    shape = trace_workload(run, splits, on_cpu=on_cpu)
    posterior = find_posterior(read_measured(calibrate))
    scaling = predict_scaling(run, shape, run.count_steps(splits), cluster, num_ranks, posterior, profile)
    title = f"{shape.title} of {shape.num_parameters:,.0f} parameters on {cluster.name}"
    if picture is not None:
        from paceline.simulator.picture import draw_curves

        curves = {
            f"{way} scaling": {"efficiency": [(p.num_ranks, *p.efficiency) for p in scaling.points if p.way == way]}
            for way in ("weak", "strong")
        }
        picture.write_bytes(draw_curves(curves, title, picture.suffix[1:]))
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps(_to_document(scaling, title), indent=1) + "\n")
    _print(scaling, title)


def _find_cluster(pairs: list[tuple[str, str]]) -> "Cluster":
    """Return the cluster that overrides describe: a name or a JSON file, and settings of it."""
    from paceline.cli.clusters import read_cluster
    from paceline.cli.overrides import apply_overrides
    from paceline.registry import Settings
    from paceline.topology import Cluster

    named = next((value for name, value in pairs if name == "cluster"), DEFAULT_CLUSTER)
    given = read_cluster(named)

    class ScaledCluster(Settings):
        cluster: Cluster = given
        """Cluster that the ranks are on."""

    return apply_overrides(ScaledCluster(), [pair for pair in pairs if pair[0] != "cluster"]).cluster


def _to_document(scaling: "RunScaling", title: str) -> dict[str, Any]:
    refusals = [{"way": way, "num_ranks": number, "error": why} for (way, number), why in scaling.refusals.items()]
    return {
        "version": 1,
        "title": title,
        "num_samples": scaling.num_samples,
        "alone_s": scaling.alone_s,
        "points": [asdict(point) for point in scaling.points],
        "refused": refusals,
    }


def _print(scaling: "RunScaling", title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.monitor.formatting import duration

    console = Console()
    if not console.is_terminal:
        console.width = 200
    typer.echo(f"{title}: one rank alone takes T(1) = {duration(scaling.alone_s)} for {scaling.num_samples:,} samples")
    typer.echo("T(n) = T(1) / (n E(n)); in brackets 90 % intervals")
    for way, words in (("weak", "a worker keeps its samples"), ("strong", "the global batch stays")):
        points = [point for point in scaling.points if point.way == way]
        if not points:
            continue
        typer.echo(f"\n{way} scaling, {words}:")
        table = Table(
            *("ranks", "hosts", "batch", "a rank", "step, s", "", "E(n)", "", "T(n)", "", "kWh", ""),
            *("most of it", "GB", ""),
            box=None,
        )
        for point in points:
            table.add_row(*_cells(point))
        console.print(table, markup=False)
    for way in ("weak", "strong"):
        refused = {ranks: reason for (its, ranks), reason in scaling.refusals.items() if its == way}
        if refused:
            numbers = ", ".join(f"{ranks:,}" for ranks in refused)
            typer.echo(f"{way} scaling leaves out {numbers} ranks: {next(iter(refused.values()))}")
    if too_large := [point for point in scaling.points if not point.fits]:
        least = min(too_large, key=lambda point: point.num_ranks)
        typer.echo(
            f"* more memory than a device is sure to have, such as on {least.num_ranks:,} ranks: share the model "
            "(--layout.sharded, --layout.tensor, --layout.pipeline), or save memory (--memory.recompute)"
        )
    last = scaling.points[-1]
    rest = len(last.assumed) - _MOST_ASSUMED
    more = f", and {rest} more" if rest > 0 else ""
    typer.echo(f"basis: {last.basis}; assumed: {', '.join(last.assumed[:_MOST_ASSUMED]) or 'nothing'}{more}")


def _cells(point: "ScalingPoint") -> tuple[str, ...]:
    from paceline.monitor.formatting import duration, number
    from paceline.topology.site import J_PER_KWH

    step, low, high = point.step_s
    efficiency, least, most = point.efficiency
    times = [duration(point.time_s * end / step) for end in (low, high)]
    energy, *energies = (number(value / J_PER_KWH) for value in point.energy_j)
    memory, memory_high = (f"{value / 1e9:.3g}" for value in point.memory_bytes)
    return (
        f"{point.num_ranks:,}",
        f"{point.num_hosts:,}",
        f"{point.global_batch:,}",
        f"{point.batch_per_rank:.4g}",
        number(step),
        f"({number(low)} to {number(high)})",
        f"{efficiency:.1%}",
        f"({least:.0%} to {most:.0%})",
        duration(point.time_s),
        f"({' to '.join(times)})",
        energy if point.energy_j[0] else "?",
        f"({' to '.join(energies)})" if point.energy_j[0] else "",
        point.bound,
        f"{memory}{'' if point.fits else '*'}",
        f"(up to {memory_high})",
    )


def include_last(text: str, num_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers of ranks with the end of a range too, where doubling does not meet it.

    Raises:
        SettingsError: A number is below 1.
    """
    last = int(text.rpartition(":")[2]) if ":" in text else num_ranks[-1]
    if min(num_ranks) < 1:
        raise SettingsError(f"--ranks must be at least 1, but got {min(num_ranks)}; write more")
    return tuple(dict.fromkeys((*num_ranks, last)))
