"""`paceline data`: files of a data set indexed, checked and converted."""

from typing import Annotated

import typer

commands = typer.Typer(no_args_is_help=True, help="Index, check or convert the files of a data set.")

Path_ = Annotated[str, typer.Argument(metavar="DATA", help="Folder or file of the data.")]
FormatName = Annotated[str, typer.Option("--format", help="Format of the files; auto for what their names say.")]
Processes = Annotated[int | None, typer.Option(help="Processes that read. [default: one for each core]", min=1)]


@commands.command()
def index(data: Path_, format_name: FormatName = "auto", processes: Processes = None) -> None:
    """Read all files once, and write down the place of each sample and the digest of each 1 MiB beside them.

    A run reads samples by it, and refuses data that has changed since. Run it again after you changed files.
    """
    from paceline.data.formats.index import write_index
    from paceline.data.formats.opening import open_place

    place = open_place(data)
    manifest = write_index(place, format_name, num_processes=processes or count_cores())
    num_bytes = sum(file.num_bytes for file in manifest.files)
    num_samples = sum(file.num_samples for file in manifest.files)
    typer.echo(
        f"{place}: {num_samples:,} samples in {len(manifest.files):,} files of format {manifest.format}, "
        f"{num_bytes:,} bytes"
    )
    typer.echo(f"fingerprint {manifest.fingerprint}")


def count_cores() -> int:
    """Return the number of cores of this process."""
    import os

    return len(os.sched_getaffinity(0))
