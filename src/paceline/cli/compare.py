"""`paceline compare`: the same training in several ways, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.compare_gossip import compare_gossip
from paceline.cli.recipes import find_run
from paceline.errors import SettingsError, unknown_name
from paceline.registry import Settings

if TYPE_CHECKING:
    from paceline.benchmarks.link_price import Link


def compare(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="Comparison: codecs, sync or gossip.")],
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name, or your own: file.py:function. [default: resnet]")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Worker processes on this machine. [default: 2, or --hosts; gossip: threads, 8 and 16]"),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Hosts with one worker each, like this machine, that times are priced for.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bandwidth of each host's link, like 50mbit or 1gbit.")] = None,
    latency_s: Annotated[
        float, typer.Option("--latency_s", "--latency-s", help="Latency from one host to another, s.")
    ] = 5e-4,
    within: Annotated[
        float, typer.Option(help="Losses count as equal up to this share above the one the reference ends with.")
    ] = 0.02,
    seeds: Annotated[int, typer.Option(help="Number of runs of each, with seeds from 0 on.")] = 3,
    only: Annotated[
        str | None, typer.Option(help="Names to compare, separated by commas, such as diloco,'diloco int8'.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the runs; existing ones are kept. [default: runs/compare-WHAT]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="New file for the rows, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="New file for the table.")] = None,
) -> None:
    """Train a recipe in several ways, such as with each codec, with several seeds: which one is best for it?

    Each way is what its name alone gives. The table is sorted by the time to equal loss: that of the steps after which
    the held-out loss first comes within 2 % of the one that the reference, synchronous training, ends with. A way that
    never does has not reached it, and comes last: nothing is extrapolated. A sentence of advice follows.
    With `--hosts 4 --bandwidth 50mbit` times are those on such hosts: the computing of a step is measured here, in a
    run of one worker, and what is exchanged is priced by the simulator. Without, they are those of the runs.
    Overrides of the recipe apply to all runs: `paceline compare codecs resnet --num_steps 300 --data.path mnist`;
    `paceline compare codecs resnet --help` lists its settings.
    Called again with the same `--out` it continues; runs with other settings are refused. A way that fails is a row
    with the reason, and the exit code is 1; one whose settings do not fit the run, such as dgc with Adam, only if it
    was named.
    `paceline compare gossip` trains a small network of its own over each graph; its fields are overrides too, such as
    `--num_steps 300 --skew 1`.
    """
    if what == "gossip":
        given = [value for value in (recipe, out, hosts, bandwidth) if value is not None]
        if given:
            raise SettingsError(
                f"recipe, --out, --hosts and --bandwidth must be left out of compare gossip, but got {given[0]}"
            )
        compare_gossip(context.args, workers, seeds, only, json, markdown)
        return
    from paceline.benchmarks import COMPARISONS, check_new_files
    from paceline.cli.compare_runs import RunsToCompare
    from paceline.cli.overrides import parse_pairs

    if what not in COMPARISONS:
        raise unknown_name("comparison", what, [*COMPARISONS, "gossip"])
    link = _read_link(hosts, bandwidth, latency_s, workers)
    workers = hosts or (2 if workers is None else workers)
    if seeds < 1 or workers < 2:
        raise SettingsError(f"--seeds must be at least 1 and --workers 2, but got {seeds} and {workers}")
    if not 0 <= within < 1:
        raise SettingsError(f"--within must be at least 0 and less than 1, but got {within:g}; 0.02 is 2 %")
    check_new_files(json, markdown)
    runs = RunsToCompare(
        what=what,
        recipe=recipe or "resnet",
        workers=workers,
        directory=out or Path("runs") / f"compare-{what}",
        given=parse_pairs(context.args),
        names=[" ".join(name.split()) for name in only.split(",")] if only else None,
        link=link,
    )
    if not runs.show(seeds, within, json, markdown):
        raise typer.Exit(1)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the comparison: those of a run, or of the comparison of graphs."""
    if not arguments:
        return None
    if arguments[0] != "gossip":
        return find_run(arguments[1:] or ["resnet"])
    from paceline.benchmarks.gossip_comparison import GossipComparison

    return GossipComparison()


def _read_link(hosts: int | None, bandwidth: str | None, latency_s: float, workers: int | None) -> "Link | None":
    """Return the link to price; None if times are those of the runs."""
    from paceline.benchmarks.link_price import Link
    from paceline.topology import BytesPerSecond

    if hosts is None and bandwidth is None:
        return None
    if hosts is None or bandwidth is None:
        raise SettingsError(
            f"--hosts and --bandwidth must be given together, but got {hosts} and {bandwidth}; add the other"
        )
    if hosts < 2:
        raise SettingsError(f"--hosts must be at least 2, but got {hosts}; leave it out to compare on this machine")
    if workers not in (None, hosts):
        raise SettingsError(
            f"--hosts must be the number of workers, one on each, but got {hosts} and --workers {workers}; leave out "
            "--workers"
        )
    if not 0 <= latency_s < float("inf"):
        raise SettingsError(f"--latency_s must be at least 0 and finite, but got {latency_s:g}; 0.02 is 20 ms")
    return Link(hosts, BytesPerSecond.parse(bandwidth), latency_s)
