"""`paceline simulate`: cost of a collective on a cluster, from 2 ranks to thousands, or of whole training steps."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.simulate_studies import STUDIES, find_study, simulate_study
from paceline.cli.simulate_training import simulate_training
from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.registry import Settings
    from paceline.simulator.scaling import Prediction, Scaling


def simulate(
    context: typer.Context,
    collective: Annotated[
        str,
        typer.Argument(
            help="all-reduce, reduce-scatter, all-gather, broadcast, all-to-all; or training, failures, ownership."
        ),
    ],
    recipe: Annotated[
        str | None, typer.Argument(help="With training: a recipe's name, or your own: file.py:function.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks: 2:1024 doubles from 2 to 1024; 3,6,12 is a list.")] = "2:64",
    algorithms: Annotated[str | None, typer.Option(help="Algorithms, with commas; by default all that fit.")] = None,
    num_bytes: Annotated[str, typer.Option("--bytes", help="Size of the buffer: 100MB, 64MiB, 4096.")] = "100MB",
    bandwidths: Annotated[str, typer.Option(help="Bandwidths to compare, in Gb/s or with a unit.")] = "25,100,200",
    compute_s: Annotated[float, typer.Option("--compute_s", "--compute-s", help="Computing in a step, s.")] = 0.1,
    overlap: Annotated[float, typer.Option(help="Fraction of computing that can hide the collective, 0 to 1.")] = 0.0,
    pace: Annotated[
        str, typer.Option(help="together, or own: ranks run ahead of each other; truer and slower.")
    ] = "together",
    picture: Annotated[Path | None, typer.Option(help="New .png or .svg for the efficiency.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="New file for all points, as JSON.")] = None,
    spec: Annotated[Path | None, typer.Option(help="With training: rows of steps to price, as JSON.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="With training: measured rows that correct them.")] = None,
    profile: Annotated[Path | None, typer.Option(help="With training: a file of `paceline profile`.")] = None,
) -> None:
    """Predict times of a collective by algorithm and ranks, and the scaling of training that waits for it.

    `simulate training mine.py:run --cluster dgx_h100 --ranks 8:1024` predicts a run on more and more ranks; its
    settings can be overridden. `simulate training --spec IN.json --json OUT.json` prices rows of training steps.
    `simulate failures` says what failures and preemptions do to a long run, and how often to save; `simulate ownership`
    compares hosts that are bought with rented ones. `simulate failures --help` lists their settings.

    The cluster is chosen by name, `--cluster fat_tree`, and each setting of it can be overridden:
    `--cluster.bandwidth 25gbit --cluster.oversubscription 2`.
    """
    from paceline.cli.overrides import parse_pairs
    from paceline.simulator.picture import draw_scaling

    if collective != "training":
        _refuse_training(collective, recipe, spec, calibrate, profile)
    if collective in STUDIES:
        _refuse_unused(collective, picture)
        simulate_study(collective, context.args, json_file)
        return
    if collective == "training":
        if recipe is None:
            _refuse_unused("training without a recipe", picture, context.args)
            simulate_training(spec, calibrate, json_file, profile)
            return
        if spec is not None:
            raise SettingsError(f"--spec must be given without a recipe, but got {recipe}; leave one out")
        _check_files(picture, json_file)
        from paceline.cli.simulate_scaling import include_last, simulate_scaling

        numbers = include_last(ranks, parse_ranks(ranks))
        simulate_scaling(recipe, parse_pairs(context.args), numbers, calibrate, picture, json_file, profile)
        return
    _check_files(picture, json_file)
    scaling = _make_scaling(
        parse_pairs(context.args), collective, parse_ranks(ranks), num_bytes, compute_s, overlap, pace
    )
    names = _choose_algorithms(scaling, algorithms)
    compared = parse_bandwidths(bandwidths)
    predictions, refusals = scaling.predict_all(names, dict.fromkeys([float(scaling.cluster.bandwidth), *compared]))
    if not predictions:
        raise SettingsError("\n".join(refusals.values()))
    if picture is not None:
        picture.write_bytes(draw_scaling(_at(predictions, compared), _title(scaling), picture.suffix[1:]))
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps([asdict(point) for point in predictions], indent=2) + "\n")
    _print_tables(scaling, predictions, compared)
    for name, reason in refusals.items():
        typer.echo(f"{name} is skipped where it cannot run: {reason}")


def _refuse_training(collective: str, recipe: str | None, *files: Path | None) -> None:
    """Refuse what only training reads."""
    if recipe is not None:
        raise SettingsError(f"a recipe must be with training, but got {recipe} with {collective}; leave it out")
    if any(file is not None for file in files):
        raise SettingsError(
            f"--spec, --calibrate and --profile must be with training, but got {collective}; leave them out"
        )


def _refuse_unused(what: str, picture: Path | None, settings: Sequence[str] = ()) -> None:
    """Refuse a picture that nobody would draw, and settings that nobody would read."""
    if picture is not None:
        raise SettingsError(f"--picture must be with a collective or a recipe, but got {what}; leave it out")
    if settings:
        raise SettingsError(f"settings must be with a recipe, but got {settings[0]} for {what}; leave them out")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks that `text` names: ``2:1024`` doubles, ``3,6,12`` is a list.

    Raises:
        SettingsError: The text names no ranks.
    """
    try:
        if ":" not in text:
            return tuple(int(part) for part in text.split(","))
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        first, last = 0, 0
    if not 1 <= first <= last:
        raise SettingsError(f"--ranks must be like 2:1024 or 3,6,12, but got {text!r}; write it so")
    return tuple(first * 2**power for power in range((last // first).bit_length()))


def parse_bandwidths(text: str) -> list[float]:
    """Return the bandwidths that `text` lists, in bytes/s; numbers without a unit are Gb/s.

    Raises:
        SettingsError: One of them is no bandwidth.
    """
    from paceline.topology import BytesPerSecond

    parts = [part.strip() for part in text.split(",")]
    return [BytesPerSecond.parse(f"{part}gbit" if part[-1:].isdigit() else part) for part in parts]


def find_settings(arguments: Sequence[str] = ()) -> "Settings":
    """Return the settings to override: those of a study, or of the cluster."""
    if arguments and arguments[0] in STUDIES:
        return find_study(arguments[0])
    from paceline.registry import Settings
    from paceline.topology import Cluster, Switch

    class ChosenCluster(Settings):
        cluster: Cluster = Switch()
        """Cluster that the collective runs on."""

    return ChosenCluster()


def _make_scaling(
    pairs: list[tuple[str, str]],
    collective: str,
    num_ranks: tuple[int, ...],
    num_bytes: str,
    compute_s: float,
    overlap: float,
    pace: str,
) -> "Scaling":
    from pydantic import ValidationError

    from paceline.cli.overrides import apply_overrides
    from paceline.registry import explain
    from paceline.simulator import Scaling
    from paceline.topology import parse_size

    if pace not in ("together", "own"):
        raise SettingsError(f"--pace must be together or own, but got {pace!r}; choose one")
    try:
        return Scaling.model_validate(
            {
                "collective": collective.replace("-", "_"),
                **dict(apply_overrides(find_settings(), pairs)),
                "num_ranks": num_ranks,
                "num_bytes": parse_size(num_bytes),
                "compute_s": compute_s,
                "overlap": overlap,
                "own_pace": pace == "own",
            }
        )
    except ValidationError as error:
        raise SettingsError(explain(error)) from error


def _choose_algorithms(scaling: "Scaling", names: str | None) -> list[str]:
    from paceline.programs import list_algorithms

    if names is not None:
        return [name.strip().replace("-", "_") for name in names.split(",")]
    return [name for name, variant in list_algorithms().items() if scaling.collective in variant.collectives]


def _check_files(picture: Path | None, json_file: Path | None) -> None:
    from paceline.simulator.picture import FORMATS

    for option, path in (("--picture", picture), ("--json", json_file)):
        if path is not None and path.exists():
            raise SettingsError(f"{option} must be a new file, but {path} exists; choose another")
    if picture is not None and picture.suffix[1:] not in FORMATS:
        known = " or ".join(f".{name}" for name in FORMATS)
        raise SettingsError(f"--picture must end in {known}, but got {picture}; choose another name")


def _title(scaling: "Scaling") -> str:
    from paceline.monitor.formatting import number, size

    what = f"{scaling.collective.replace('_', '-')} of {size(scaling.num_bytes)} on {scaling.cluster.name}"
    return f"{what}, {number(1000 * scaling.compute_s)} ms of computing a step"


def _at(predictions: "Sequence[Prediction]", bandwidths: Sequence[float]) -> "list[Prediction]":
    return [point for point in predictions if point.bandwidth_bytes_per_s in bandwidths]


def _print_tables(scaling: "Scaling", predictions: "Sequence[Prediction]", bandwidths: Sequence[float]) -> None:
    from rich.console import Console

    from paceline.monitor.formatting import number

    console = Console()
    own = float(scaling.cluster.bandwidth)
    console.print(f"{_title(scaling)}\n\ntime in ms at {_gbits(own)}; * the fastest", markup=False, highlight=False)
    _print_grid(console, _at(predictions, [own]), lambda point: 1000 * point.total_s, min, number)
    for bandwidth in bandwidths:
        console.print(f"\nscaling efficiency at {_gbits(bandwidth)}; * the best", markup=False, highlight=False)
        _print_grid(console, _at(predictions, [bandwidth]), lambda point: point.efficiency, max, "{:.1%}".format)


def _print_grid(
    console: "Console",
    points: "Sequence[Prediction]",
    value: "Callable[[Prediction], float]",
    best: "Callable[[Iterable[float]], float]",
    formatter: Callable[[float], str],
) -> None:
    """Print one column per algorithm and one row per number of ranks."""
    from rich.table import Table

    names = list(dict.fromkeys(point.algorithm for point in points))
    table = Table("ranks", *(name.replace("_", "\n") for name in names), box=None)
    for num_ranks in dict.fromkeys(point.num_ranks for point in points):
        row = {point.algorithm: value(point) for point in points if point.num_ranks == num_ranks}
        winner = best(row.values())
        cells = [formatter(row[name]) + "*" * (row[name] == winner) if name in row else "-" for name in names]
        table.add_row(f"{num_ranks:,}", *cells)
    console.print(table, markup=False)


def _gbits(bytes_per_s: float) -> str:
    return f"{8e-9 * bytes_per_s:.4g} Gb/s"
