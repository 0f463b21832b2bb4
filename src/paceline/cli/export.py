"""`paceline export`: export of a run's trained model for other tools."""

from typing import Annotated

import typer


def export(
    run: Annotated[
        str, typer.Argument(help="Directory of a run, a folder of checkpoints of your own loop, or the URL of copies.")
    ],
    to: Annotated[
        str, typer.Option(help="New path or URL: a .safetensors or .pt file, or a folder for models of transformers.")
    ],
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint: newest for the newest valid one, best for that of keep_best, or a step.")
    ] = "newest",
    averaged: Annotated[
        bool | None,
        typer.Option(help="Whether to take moving averages of parameters; by default if the run has them (ema)."),
    ] = None,
) -> None:
    """Write the whole trained model of a run, of any rule and layout, in this process alone.

    Load a .safetensors file with `safetensors.torch.load_model`, a .pt file, which holds a `state_dict`, with
    `torch.load`; a name without ending becomes a folder for `from_pretrained`. Nothing is overwritten. Other runs
    start from any of them with `--initial`.
    """
    from paceline.checkpoint.find import find_checkpoint
    from paceline.exporting.write import export_checkpoint, find_format

    find_format(to)  # before a checkpoint is read
    found = find_checkpoint(run, checkpoint)
    weights = export_checkpoint(found, to, averaged=averaged)
    what = "moving averages" if weights.averaged else "model"
    typer.echo(f"exported: {to}, the {what} of step {found.step} ({found.path})")
