"""`paceline export`: the trained model of a run, written for other tools."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or a folder of checkpoints of your own loop.")],
    to: Annotated[
        Path, typer.Option(help="What to write: a file .safetensors or .pt, or a folder for models of transformers.")
    ],
    checkpoint: Annotated[
        str, typer.Option(help="newest for the newest that is whole, best for what keep_best has kept, or a step.")
    ] = "newest",
    averaged: Annotated[
        bool | None,
        typer.Option(help="Whether to take moving averages of parameters; by default where the run has them (ema)."),
    ] = None,
) -> None:
    """Write the trained model of a run, whole, whatever rule and layout trained it, on this process alone.

    A file .safetensors is for `safetensors.torch.load_model`; one that ends in .pt for `torch.load`, which gives a
    `state_dict`; a name without ending becomes a folder for `from_pretrained`. Nothing is overwritten. Other runs
    start from any of them with `--initial`.
    """
    from paceline.checkpoint.find import find_checkpoint
    from paceline.exporting.write import export_checkpoint, find_format

    find_format(to)  # before a checkpoint is read
    found = find_checkpoint(run, checkpoint)
    weights = export_checkpoint(found, to, averaged=averaged)
    what = "moving averages" if weights.averaged else "model"
    typer.echo(f"exported: {to}, the {what} of step {found.step} ({found.path})")
