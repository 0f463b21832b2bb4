"""`paceline evaluate`: the loss and the metrics of a trained model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.training import Run


def evaluate(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Directory of a run, or URL that it has copied its checkpoints to.")],
    checkpoint: Annotated[
        str, typer.Option(help="newest for the newest that is whole, best for what keep_best has kept, or a step.")
    ] = "newest",
    averaged: Annotated[
        bool | None,
        typer.Option(
            help="Whether to evaluate moving averages of parameters; by default where the run has them (ema)."
        ),
    ] = None,
) -> None:
    """Evaluate the trained model of a run on held-out data, on this process alone.

    Options replace the run's own settings, as for `paceline train`: `--data mine.py:make_test_set`, `--metrics`,
    `--loss`, `--collate_fn`, `--precision`, `--global_batch`, `--evaluate_samples`. Data without a held-out part is
    used whole.
    """
    from paceline.cli.overrides import apply_overrides, parse_pairs
    from paceline.exporting import evaluate_run

    pairs = parse_pairs(context.args)
    judged = evaluate_run(run, checkpoint, averaged=averaged, change=lambda settings: apply_overrides(settings, pairs))
    found, what = judged.evaluation, "moving averages" if judged.averaged else "parameters"
    which = "held-out samples" if judged.held_out else "samples, all of the data"
    typer.echo(f"step {judged.step} of {run}, its {what}, on {found.num_samples:,} {which}:")
    for name, value in {"loss": found.loss, **found.metrics}.items():
        typer.echo(f"  {name:14} {value:.6g}")


def find_trained(arguments: Sequence[str]) -> "Run | None":
    """Return the run whose directory is the first argument of a command."""
    if not arguments:
        return None
    from paceline.checkpoint.find import find_checkpoint
    from paceline.exporting.load import load_checkpoint_run

    return load_checkpoint_run(find_checkpoint(arguments[0]))
