"""`paceline compare gossip`: cost and effect of each graph, in a table."""

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
    """Train over each graph, print the results, and write the requested files.

    Args:
        arguments: Overrides of `GossipComparison`, as typed.
        workers: Number of workers; None for the comparison's own.
        seeds: Number of runs of each.
        only: Graphs, separated by commas; None for all without required settings.
        json: New file for the rows.
        markdown: New file for the table.

    Raises:
        SettingsError: An argument is invalid.
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
