"""`paceline compare gossip`: what each graph costs and does, in a table."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from paceline.errors import SettingsError, unknown_name
from paceline.registry import explain


def compare_gossip(
    arguments: Sequence[str],
    workers: int | None,
    seeds: int,
    only: str | None,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Train over each graph, print what came of it, and write it where asked to.

    Args:
        arguments: Overrides of `GossipComparison`, as they were typed.
        workers: Their number; none: what the comparison has.
        seeds: Runs of each.
        only: Graphs, separated by commas; none: all that need nothing given.
        json: New file that gets the rows.
        markdown: New file that gets the table.

    Raises:
        SettingsError: Something of it cannot be.
    """
    from paceline.benchmarks import check_new_files, print_table, write_files
    from paceline.benchmarks.gossip_comparison import GossipComparison
    from paceline.cli.overrides import apply_overrides, parse_pairs

    check_new_files(json, markdown)
    known = [graph.name for graph in GossipComparison().graphs]
    names = only.split(",") if only else known
    for name in names:
        if name not in known:
            raise unknown_name("each of --only", name, known)
    fields: dict[str, object] = {"num_seeds": seeds, "graphs": names}
    try:
        chosen = GossipComparison.model_validate(fields | ({"num_workers": [workers]} if workers is not None else {}))
    except ValidationError as error:
        raise SettingsError(explain(error)) from error
    rows = apply_overrides(chosen, parse_pairs(arguments)).compare()
    print_table(rows)
    write_files(rows, json, markdown)
