"""A rank's part of a worker's model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.comm import LocalGroup
from paceline.parallel.mesh import Mesh
from paceline.parallel.model_shard import ModelShard
from paceline.topology.layout import Axes


@pytest.mark.parametrize("cuts_tokens", [False, True])
def test_ranks_draw_alike_only_where_they_compute_the_same(cuts_tokens: bool) -> None:
    """Dropout of the same tokens in the same layer is the same, and no other."""

    def rank(group: LocalGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
        mesh = Mesh(group, Axes((2, 2, 1, 1, 2, 2)))
        split = cast(Any, SimpleNamespace(cuts_tokens=cuts_tokens))
        part = ModelShard(mesh.group("data"), mesh=mesh, tensor_split=split)
        place = [mesh.coordinate(axis) for axis in ("data", "context", "pipeline")]
        return part.random_stream, (*place, mesh.coordinate("tensor") if cuts_tokens else 0)

    found = LocalGroup.run(16, rank)
    num_streams = 16 if cuts_tokens else 8
    assert len({place for _, place in found}) == len({stream for stream, _ in found}) == num_streams
    assert len(set(found)) == num_streams
