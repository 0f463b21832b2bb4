"""`paceline compare`: the same training in several ways, side by side."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import SettingsError, unknown_name

if TYPE_CHECKING:
    from paceline.benchmarks.codec_comparison import Outcome

WHAT = ("codecs",)


def compare(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="What is compared: codecs.")],
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or your own: file.py:function.")] = "resnet",
    workers: Annotated[int, typer.Option(help="Worker processes on this machine.")] = 2,
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds from 0 on.")] = 3,
    codecs: Annotated[str | None, typer.Option(help="Those compared, separated by commas. [default: all]")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the runs; those that are finished there are kept.")] = Path(
        "runs/compare-codecs"
    ),
    json: Annotated[Path | None, typer.Option(help="Also write the rows into this new file, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table into this new file.")] = None,
) -> None:
    """Train a recipe with each codec and several seeds, and print what was sent and how well it learnt.

    Overrides of the recipe apply to all runs: `paceline compare codecs resnet --num_steps 300 --data.path mnist`.
    Called again with the same `--out` it goes on where it was.
    """
    from paceline.benchmarks import check_new
    from paceline.benchmarks.codec_comparison import CODECS, HEADINGS, as_document, cells
    from paceline.benchmarks.codec_comparison import compare as compare_outcomes
    from paceline.cli.overrides import parse_pairs

    if what not in WHAT:
        raise unknown_name("comparison", what, WHAT)
    if seeds < 1 or workers < 2:
        raise SettingsError(f"--seeds must be at least 1 and --workers 2, but got {seeds} and {workers}")
    for path, option in ((json, "--json"), (markdown, "--markdown")):
        if path is not None:
            check_new(path, option)
    chosen = list(dict.fromkeys(["none", *(codecs.split(",") if codecs else CODECS)]))
    for codec in chosen:
        if codec not in CODECS:
            raise unknown_name("codec of the comparison", codec, CODECS)
    overrides = parse_pairs(context.args)
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(seeds):
        for codec in chosen:
            directory = out / f"{codec.replace(' ', '-')}-{seed}"
            given = [*overrides, *CODECS[codec], ("seed", str(seed))]
            outcomes.setdefault(codec, []).append(_run(recipe, workers, directory, given))
            last = outcomes[codec][-1]
            typer.echo(f"{codec}, seed {seed}: held-out loss {last.loss:.4f} after {last.seconds:.1f} s")
    rows = compare_outcomes(outcomes)
    _print(HEADINGS, [cells(row) for row in rows])
    if json is not None:
        json.write_text(json_module.dumps(as_document(rows), indent=2) + "\n")
    if markdown is not None:
        lines = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, rows)]
        markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def _run(recipe: str, workers: int, directory: Path, overrides: list[tuple[str, str]]) -> "Outcome":
    """Train, unless it is done already, and return how the run ended."""
    from rich.console import Console

    from paceline.benchmarks.codec_comparison import Outcome
    from paceline.cli.prepare import prepare_new, prepare_resumed
    from paceline.launch import ExitCode
    from paceline.launch.local import launch
    from paceline.monitor.events import RunFinished, StepFinished
    from paceline.monitor.live import LiveView
    from paceline.monitor.reader import read_log, select

    log = directory / "events.jsonl"
    if not (log.exists() and select(read_log(log), RunFinished)):
        begun = (directory / "run.json").exists()
        path, file = (
            prepare_resumed(directory, workers, overrides)
            if begun
            else prepare_new(recipe, workers, directory, overrides)
        )
        code = launch(path, file.num_workers, view=LiveView(Console(quiet=True)))
        if code is not ExitCode.FINISHED:
            raise SettingsError(f"every run of a comparison must finish, but {path} did not; read {log}")
    records = read_log(log)
    finished = select(records, RunFinished)[-1].event
    if finished.held_out_loss is None:
        raise SettingsError(f"every run of a comparison must have a held-out loss, but {directory} has none")
    return Outcome(
        loss=finished.held_out_loss,
        accuracy=finished.metrics.get("accuracy"),
        wire_bytes=sum(record.event.wire_bytes or 0 for record in select(records, StepFinished)),
        seconds=finished.duration_s,
    )


def _print(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)
