import json

import pytest
from typer.testing import CliRunner

from paceline.benchmarks.gossip_comparison import GossipComparison
from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.topology.graphs import RingGraph


def compare(**fields):
    settings = {"num_workers": (4,), "num_seeds": 2, "num_steps": 40, **fields}
    return {row.graph: row for row in GossipComparison(**settings).compare()}


def test_each_graph_stands_beside_all_reduce():
    rows = compare(graphs=("ring", "one_peer_exponential", "complete"))
    assert list(rows) == ["all-reduce", "ring", "one_peer_exponential", "complete"]
    reference, ring, one_peer, complete = rows.values()
    assert (reference.loss_ratio, reference.consensus_distance, reference.num_seeds) == (1.0, 0.0, 2)
    assert ring.spectral_gap == RingGraph().spectral_gap(4)
    num_bytes = 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert [row.wire_bytes for row in (ring, one_peer, complete)] == [2 * num_bytes, num_bytes, 3 * num_bytes]
    assert reference.wire_bytes == pytest.approx(1.5 * num_bytes)
    for row in (ring, one_peer, complete):
        assert 1e-4 < row.consensus_distance < 0.5
        # They see the same samples; what is left is that gradients are made a little apart.
        assert row.loss_ratio == pytest.approx(1, abs=0.05)
        assert len(row.cells()) == len(row.headings)


def test_workers_whose_samples_differ_drift_apart():
    (_, alike), (_, skewed) = (list(compare(graphs=("ring",), skew=skew).values()) for skew in (0.0, 1.0))
    assert skewed.consensus_distance > 1.2 * alike.consensus_distance


def test_the_command_prints_and_writes_a_table(tmp_path):
    path = tmp_path / "rows.json"
    line = "compare gossip --workers 3 --seeds 1 --only star,ring --num_steps 3 --skew 0.5 --markdown"
    result = CliRunner().invoke(app, [*line.split(), str(tmp_path / "rows.md"), "--json", str(path)])
    assert result.exception is None, result.output
    rows = json.loads(path.read_text())
    assert [(row["graph"], row["num_workers"], row["num_seeds"]) for row in rows] == [
        ("all-reduce", 3, 1),
        ("star", 3, 1),
        ("ring", 3, 1),
    ]
    assert "spectral gap" in result.output
    assert len((tmp_path / "rows.md").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare gossip --only rnig", "each of --only must be a known name, but got 'rnig'"),
        ("compare gossip --workers 1", "num_workers.0 must be greater than or equal to 2, but got 1"),
        ("compare gossip --seeds 0", "num_seeds must be greater than or equal to 1, but got 0"),
        ("compare gossip --num_stpes 3", "num_stpes"),
        ("compare gossip resnet", "--bandwidth must be left out of compare gossip, but got resnet"),
        ("compare gossip --json {old}", "--json must be a new file"),
    ],
    ids=["graph", "workers", "seeds", "field", "recipe", "json"],
)
def test_what_cannot_be_compared_is_refused(line, words, tmp_path):
    old = tmp_path / "old"
    old.touch()
    result = CliRunner().invoke(app, line.format(old=old).split())
    assert isinstance(result.exception, SettingsError)
    assert words in str(result.exception)
