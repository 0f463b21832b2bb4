"""`paceline trace`: the sampled steps of a run as a Chrome trace."""

from pathlib import Path
from typing import Annotated

import typer


def trace(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    out: Annotated[Path | None, typer.Option(help="New file; by default RUN/trace.json.")] = None,
) -> None:
    """Write the timeline of computing and communication, for https://ui.perfetto.dev or chrome://tracing."""
    from paceline.monitor.trace import export_trace

    path = out if out is not None else run / "trace.json"
    num_steps = export_trace(run, path)
    typer.echo(f"trace: {num_steps:,} sampled steps in {path}; open it at https://ui.perfetto.dev")
