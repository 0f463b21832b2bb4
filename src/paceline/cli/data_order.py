"""`paceline data order`: how well orders mix the data of a run."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.data import SampleOrder, Source
    from paceline.data.mixing import Labels


def order(
    context: typer.Context,
    data: Annotated[str, typer.Argument(help="A recipe's name, or your own: file.py:function.")],
    probes: Annotated[int, typer.Option(help="Samples whose labels are read.", min=2)] = 4096,
) -> None:
    """Compare how well orders mix a run's training data, and how many shards each reads at a time.

    Every setting of the recipe can be overridden, as for `paceline train`:
    `paceline data order resnet --order windows --order.window 8 --order.shard_samples 50`.
    """
    from paceline.cli.overrides import parse_pairs
    from paceline.cli.prepare import make_run
    from paceline.data import Full, IterableSource
    from paceline.data.mixing import label_places, read_labels
    from paceline.errors import SettingsError

    run = make_run(data, parse_pairs(context.args))
    source = run.open_data().train
    if isinstance(source, IterableSource):
        raise SettingsError(
            "data must have samples under an index for its order to be measured, but got an iterable data set, which "
            "has its own order; give another"
        )
    chosen = run.order or Full()
    labels = read_labels(source, probes)
    columns = {"places": label_places(source)} | ({"labels": labels} if labels is not None else {})
    _print(source, chosen, columns, run.seed, run.global_batch)


def _print(source: "Source", chosen: "SampleOrder", columns: "dict[str, Labels]", seed: int, global_batch: int) -> None:
    from paceline.data import Full, Sequential, Windows
    from paceline.data.mixing import CLUMPED, measure_clumping

    windows = chosen if isinstance(chosen, Windows) else Windows()
    sizes = [int(size) for size in windows.cut(source.shard_sizes) if size]
    typer.echo(f"{len(source):,} samples in {len(sizes):,} shards of {min(sizes):,} to {max(sizes):,}")
    typer.echo(
        f"clumping in batches of {global_batch:,}: 0 as by chance, 1 if each has one kind; good below {CLUMPED}\n"
        "(places: as if the data were sorted)"
    )
    tried: dict[str, tuple[SampleOrder, int]] = {"sequential": (Sequential(), 1)}
    widths = {2**power for power in range(20) if 2**power < len(sizes)}
    for window in sorted(widths | ({windows.window} if windows is chosen else set())):
        tried[f"windows {window}"] = (windows.model_copy(update={"window": window}), min(window, len(sizes)))
    tried["full"] = (Full(), len(sizes))
    typer.echo(f"  {'order':16} {'shards at a time':>16}" + "".join(f" {name:>8}" for name in columns))
    for name, (one, num_open) in tried.items():
        arrangement = source.arrange(one, seed)
        values = [measure_clumping(arrangement, seed, labels, global_batch) for labels in columns.values()]
        mark = "  <- this run" if one == chosen else ""
        typer.echo(f"  {name:16} {num_open:16,}" + "".join(f" {value:8.3f}" for value in values) + mark)
