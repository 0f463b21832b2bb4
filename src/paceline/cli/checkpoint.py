"""`paceline checkpoint`: a run's checkpoints, listed, verified and compared."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.checkpoint import Checkpoint

commands = typer.Typer(no_args_is_help=True, help="List, verify or compare checkpoints.")

Place = Annotated[Path, typer.Argument(help="Directory of a run, folder of checkpoints, or directory of one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_MOST_SHOWN = 20


@commands.command("list")
def list_checkpoints(run: Place, as_json: AsJson = False) -> None:
    """List checkpoints, the newest first: step, size, what of it is shared with earlier ones, and the best one.

    Nothing but their manifests is read: `paceline checkpoint verify` reads all.
    """
    from paceline.checkpoint import Checkpoint, CheckpointStore, DamagedError

    store = CheckpointStore(_find_folder(run))
    best = store.find_best()
    rows: list[dict[str, Any]] = []
    for path in _list_paths(run):
        row: dict[str, Any] = {"path": str(path), "is_best": path == best}
        try:
            found = Checkpoint.open(path)
            row |= {"step": found.step, "num_bytes": found.num_bytes, "shared_bytes": found.shared_bytes}
            row |= {"num_tensors": len(found.list_tensors())}
        except DamagedError as error:
            row["damage"] = error.reason
        rows.append(row)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(f"{'step':>10}  {'MB':>10}  {'shared MB':>10}  {'tensors':>7}  path")
    for row in rows:
        if "damage" in row:
            typer.echo(f"{'':10}  {'':10}  {'':10}  {'':7}  {row['path']}: {row['damage']}")
            continue
        size, shared = row["num_bytes"] / 1e6, row["shared_bytes"] / 1e6
        mark = " (best)" if row["is_best"] else ""
        typer.echo(f"{row['step']:10,}  {size:10.2f}  {shared:10.2f}  {row['num_tensors']:7,}  {row['path']}{mark}")


@commands.command()
def verify(run: Place, as_json: AsJson = False) -> None:
    """Read every byte of every checkpoint, and compare it with its digest. Exit code 1 if one is damaged."""
    from paceline.checkpoint import Checkpoint, DamagedError

    rows: list[dict[str, Any]] = []
    for path in _list_paths(run):
        row: dict[str, Any] = {"path": str(path), "damage": None}
        try:
            Checkpoint.open(path).verify()
        except DamagedError as error:
            row["damage"] = error.reason
        rows.append(row)
        if not as_json:
            typer.echo(f"{path}: {row['damage'] or 'whole'}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if any(row["damage"] for row in rows):
        raise typer.Exit(1)


@commands.command()
def diff(
    first: Place,
    second: Place,
    which: Annotated[str, typer.Option(help="Checkpoint of the first: newest, best or a step.")] = "newest",
    other: Annotated[str, typer.Option(help="Checkpoint of the second: newest, best or a step.")] = "newest",
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: which tensors differ and by how much, and which settings and positions.

    Exit code 1 if they differ. Compare two steps of one run with `--which 100 --other 200`.
    """
    from dataclasses import asdict

    from paceline.checkpoint.comparison import compare_documents, compare_tensors
    from paceline.checkpoint.find import find_checkpoint

    one, two = find_checkpoint(first, which), find_checkpoint(second, other)
    tensors = list(compare_tensors(one, two))
    documents = list(compare_documents(one.read_document(), two.read_document()))
    if as_json:
        found = {
            "first": str(one.path),
            "second": str(two.path),
            "tensors": [asdict(tensor) for tensor in tensors],
            "documents": [{"path": path, "first": a, "second": b} for path, a, b in documents],
        }
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in _describe(one, two, tensors, documents):
            typer.echo(line)
    if tensors or documents:
        raise typer.Exit(1)


def _describe(one: "Checkpoint", two: "Checkpoint", tensors: list[Any], documents: list[Any]) -> Iterator[str]:
    yield f"{one.path} (step {one.step:,}) and {two.path} (step {two.step:,})"
    if not tensors and not documents:
        yield "They are the same."
        return
    yield f"tensors: {len(tensors)} of {len(one.list_tensors().keys() | two.list_tensors().keys())} differ"
    if any(tensor.num_elements for tensor in tensors):
        yield f"  {'elements':>8}  {'largest':>10}  {'relative':>10}  name"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.num_elements > 0, -tensor.relative))[:_MOST_SHOWN]:
        if tensor.num_elements:
            yield f"  {tensor.share:8.1%}  {tensor.largest:10.3g}  {tensor.relative:10.3g}  {tensor.name}"
        else:
            yield f"  {tensor.name}: {tensor.reason}"
    if len(tensors) > _MOST_SHOWN:
        yield f"  and {len(tensors) - _MOST_SHOWN} more (--json for all)"
    yield f"documents: {len(documents)} values differ"
    for path, a, b in documents[:_MOST_SHOWN]:
        yield f"  {path}: {_shorten(a)} and {_shorten(b)}"
    if len(documents) > _MOST_SHOWN:
        yield f"  and {len(documents) - _MOST_SHOWN} more (--json for all)"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _find_folder(run: Path) -> Path:
    return run / "checkpoints" if (run / "checkpoints").is_dir() else run


def _list_paths(run: Path) -> list[Path]:
    """Return the directories of the checkpoints at a place, the newest first, finished or not.

    Raises:
        CheckpointError: There is none.
    """
    from paceline.checkpoint import CheckpointStore
    from paceline.checkpoint.find import holds_checkpoint
    from paceline.errors import CheckpointError

    if holds_checkpoint(run):
        return [run]
    found = CheckpointStore(_find_folder(run)).list_directories()
    if not found:
        raise CheckpointError(f"{run} must hold checkpoints, but there is none; check the path")
    return found
