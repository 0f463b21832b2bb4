"""`paceline data`: files of a data set indexed, checked and converted, and the order of their samples."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.data_order import order
from paceline.cli.overrides_command import OverridesCommand
from paceline.cli.recipes import find_run

if TYPE_CHECKING:
    from paceline.data.formats.check import Found

commands = typer.Typer(no_args_is_help=True, help="Index, check, convert or order the samples of a data set.")

Place = Annotated[str, typer.Argument(metavar="DATA", help="Folder or file of the data.")]
FormatName = Annotated[str, typer.Option("--format", help="Format of the files; auto for what their names say.")]
Processes = Annotated[int | None, typer.Option(help="Processes that read. [default: one for each core]", min=1)]
Length = Annotated[int | None, typer.Option("--sequence_length", help="Tokens of a sample, of tokens or text.", min=1)]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_SHOWN = 10


@commands.command()
def index(data: Place, format_name: FormatName = "auto", processes: Processes = None) -> None:
    """Read all files once, and write down the place of each sample and the digest of each 1 MiB beside them.

    A run reads samples by it, and refuses data that has changed since. Run it again after you changed files.
    """
    from paceline.data.formats.index import write_index
    from paceline.data.formats.opening import open_place

    place = open_place(data)
    manifest = write_index(place, format_name, num_processes=processes or _count_cores())
    num_bytes = sum(file.num_bytes for file in manifest.files)
    num_samples = sum(file.num_samples for file in manifest.files)
    typer.echo(
        f"{place}: {num_samples:,} samples in {len(manifest.files):,} files of format {manifest.format}, "
        f"{num_bytes:,} bytes"
    )
    typer.echo(f"fingerprint {manifest.fingerprint}")


@commands.command()
def check(
    data: Place, format_name: FormatName = "auto", processes: Processes = None, sequence_length: Length = None
) -> None:
    """Read every sample: sizes, lengths, classes, exact duplicates, and samples that cannot be read.

    Files are compared with their index, if there is one. Exit code 1 if a sample cannot be read, a file has changed, or
    one of the data's format has been added since.
    """
    from paceline.data.formats.check import check_data
    from paceline.data.formats.source import FileSource

    source = FileSource(data, format=format_name, sequence_length=sequence_length)
    found = check_data(source, processes or _count_cores())
    typer.echo(f"{source}, format {source.manifest.format}, fingerprint {source.fingerprint}")
    _print_found(found)
    if not found.is_sound:
        raise typer.Exit(1)


@commands.command()
def prepare(
    data: Place,
    out: Annotated[str, typer.Argument(help="Folder of this machine for the shards.")],
    to: Annotated[str, typer.Option("--format", help="Format to write.")] = "tar",
    source_format: Annotated[str, typer.Option("--from", help="Format of the data; auto for what names say.")] = "auto",
    shard_bytes: Annotated[str, typer.Option("--shard_bytes", help="Size of a shard's file, such as 64MB.")] = "64MB",
    processes: Processes = None,
    sequence_length: Length = None,
    keep: Annotated[str, typer.Option(help="Function (sample) -> bool that says which stay: file.py:function.")] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json that makes tokens of each sample's text.")
    ] = None,
    change: Annotated[
        str, typer.Option(help="Function (samples) -> samples that makes others of them: file.py:function.")
    ] = "",
) -> None:
    """Convert data of any format into shards of any other, with as many bytes and samples in each.

    The shards have the same bytes at any number of processes. After a kill the same command goes on where it was.
    """
    from paceline.data.formats import find_format
    from paceline.data.formats.prepare import prepare as convert
    from paceline.data.formats.source import FileSource
    from paceline.data.storage import find_local
    from paceline.errors import SettingsError

    form = find_format(to, ())
    folder = find_local(out)
    if folder is None:
        raise SettingsError(f"OUT must be a folder of this machine, but got {out}; prepare here, then copy the folder")
    source = FileSource(data, format=source_format, sequence_length=sequence_length)
    prepared = convert(
        source,
        folder,
        to,
        parse_bytes(shard_bytes),
        num_processes=processes or _count_cores(),
        hook=_make_hook(keep, change, tokenizer),
        hook_name=_name_hook(keep, change, tokenizer),
    )
    by_bytes, by_samples = prepared.balance
    what = "joined documents" if form.is_strided else "samples"
    typer.echo(
        f"{folder}: {prepared.num_samples:,} {what} of {prepared.num_read:,} in {len(prepared.manifest.files):,} files "
        f"of format {to}; the largest shard has {by_bytes:.3f} times the bytes of the smallest, and {by_samples:.3f} "
        "times its samples"
    )
    if prepared.left_out:
        typer.echo(f"left out, as format {to} does not hold them: {', '.join(prepared.left_out)}; tar holds all leaves")
    typer.echo(f"fingerprint {prepared.manifest.fingerprint}")


commands.command(cls=OverridesCommand.of(find_run))(order)


def parse_bytes(text: str) -> int:
    """Return a number of bytes, of a number with a unit such as MB or MiB.

    Raises:
        SettingsError: The text is no number of bytes.
    """
    from paceline.errors import SettingsError

    number = text.rstrip("BKMGIbkmgi ")
    unit = text[len(number) :].strip().upper()
    try:
        num_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        num_bytes = 0
    if num_bytes < 1:
        raise SettingsError(f"shard_bytes must be a number of bytes such as 64MB or 1GiB, but got {text!r}")
    return num_bytes


def _make_hook(
    keep: str, change: str, tokenizer: Path | None
) -> Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]] | None:
    """Return the hook of the user's functions, the filter first, and then of the tokenizer."""
    if not keep and not change and tokenizer is None:
        return None
    from paceline.data.tokens import tokenise_samples
    from paceline.functions import find_function

    is_kept = find_function(keep) if keep else None
    make = find_function(change) if change else None

    def hook(samples: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        kept = [sample for sample in samples if is_kept is None or is_kept(sample)]
        made = kept if make is None else list(make(kept))
        return made if tokenizer is None else tokenise_samples(made, tokenizer)

    return hook


def _name_hook(keep: str, change: str, tokenizer: Path | None) -> str:
    """Return the functions' names, with digests of their files and of the tokenizer: an edited one is another hook."""
    import importlib.util

    from blake3 import blake3

    names = []
    for path in filter(None, (keep, change)):
        module = path.rpartition(":")[0]
        spec = None if module.endswith(".py") else importlib.util.find_spec(module)
        file = module if module.endswith(".py") else spec.origin if spec and spec.has_location else None
        names += [path, blake3(Path(file).read_bytes()).hexdigest() if file else ""]
    return " ".join([*names, blake3(tokenizer.read_bytes()).hexdigest()] if tokenizer else names)


def _print_found(found: "Found") -> None:
    typer.echo(f"bytes of a sample: {_spread(found.sizes)}")
    for leaf, lengths in found.lengths.items():
        typer.echo(f"length of {leaf}: {_spread(lengths)}")
    for leaf, counts in found.list_classes().items():
        shown = ", ".join(f"{value}: {count:,}" for value, count in list(counts.items())[:_MOST_SHOWN])
        more = f" and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
        typer.echo(f"samples by {leaf}: {shown}{more}")
    duplicates = found.list_duplicates()
    typer.echo(f"exact duplicates: {sum(len(same) - 1 for same in duplicates):,}")
    for same in duplicates[:_MOST_SHOWN]:
        typer.echo(f"  samples {', '.join(map(str, same[:_MOST_SHOWN]))} are the same")
    typer.echo(f"unreadable samples: {len(found.unreadable):,}")
    for number, reason in found.unreadable[:_MOST_SHOWN]:
        typer.echo(f"  sample {number}: {reason}")
    for block in found.changed[:_MOST_SHOWN]:
        typer.echo(f"changed since the index was made: {block}")


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    return f"{ordered[0]:,} to {ordered[-1]:,}, median {ordered[len(ordered) // 2]:,}, {sum(ordered):,} in all"


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))
