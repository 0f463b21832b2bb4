"""`paceline report`: the curves of a run as a picture and a page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    tensorboard: Annotated[Path | None, typer.Option(help="Directory for a TensorBoard log too.")] = None,
) -> None:
    """Write RUN/report.png and RUN/report.html, at any time, also during the run."""
    from paceline.monitor.communication import describe_step
    from paceline.monitor.pipeline import describe_pipeline
    from paceline.monitor.reader import read_log, summarise
    from paceline.monitor.report import write_report
    from paceline.monitor.report_sections import describe_stragglers
    from paceline.monitor.usage import describe_usage

    summary = summarise(read_log(run / "events.jsonl"))
    picture, page = write_report(run)
    typer.echo(f"report: {page}\npicture: {picture}")
    if summary.typical_steps:
        typer.echo(f"timeline: {run / 'timeline.png'}\n{describe_step(summary.typical_steps[0])}")
    if summary.pipeline_steps:
        typer.echo(f"pipeline: {run / 'pipeline.png'}\n{describe_pipeline(summary.pipeline_steps)}")
    for sentence in (*describe_stragglers(summary), *describe_usage(summary)):
        typer.echo(sentence)
    if tensorboard is not None:
        from paceline.errors import storing
        from paceline.monitor.tensorboard import export_tensorboard

        with storing(tensorboard):
            num_scalars = export_tensorboard(run, tensorboard)
        typer.echo(f"tensorboard: {num_scalars} values in {tensorboard}; tensorboard --logdir {tensorboard}")
