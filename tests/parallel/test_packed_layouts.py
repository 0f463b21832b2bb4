"""Documents that share rows train alike where ranks divide the tokens of a row, or the model."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.data import Interval, Loader
from paceline.data.base import Spec
from paceline.data.batch import Batch
from paceline.data.packed_text import PackedSource
from paceline.data.tokens import encode_documents
from paceline.parallel.parallelize import parallelize
from paceline.recipes.transformer_lm import TransformerLM
from paceline.replica.replica import Replica
from paceline.replica.state import capture
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout
from paceline.training.objective import NextToken

ROW_LENGTH = 16
# As in test_layouts.py: sums in another order, and AdamW's division by gradients near 0.
LOSS_TOLERANCE = 2e-5
PARAMETER_TOLERANCE = 2e-4


def make_source() -> PackedSource:
    generator = np.random.default_rng(0)
    texts = [bytes(generator.integers(1, 250, generator.integers(2, 20)).astype(np.uint8)) for _ in range(40)]
    return PackedSource(encode_documents(texts, None, None), np.arange(len(texts)), ROW_LENGTH, "best_fit")


def train(group: Any, layout: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    source = make_source()
    model = TransformerLM(width=16, num_layers=2, num_heads=4).build(Spec(256, (ROW_LENGTH,)))
    sample = Batch(source.read_first(), 1, Interval(0, 1)).inputs
    module = parallelize(model, Layout(**layout), group=group, sample=sample)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    replica = Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1)
    shard, losses = replica.shard, []
    for batch in Loader(source, 4, group=shard.data_parallel_group, num_steps=5, split=shard.split_context):
        loss = NextToken().loss(replica, batch)
        replica.backward(loss.mean, weight=loss.weight)
        losses.append(replica.update().loss)
    tensors, _ = capture(replica)
    replica.close()
    return losses, {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model/")}


def compare(layouts: list[dict[str, int]]) -> list[list[float]]:
    """Return how far losses and parameters of layouts are from one process's, on rank 0."""
    group = join()
    torch.set_num_threads(1)
    alone = train(LocalGroup(), {}) if group.rank == 0 else None
    differences = []
    for layout in layouts:
        losses, tensors = train(group, layout)
        if alone is not None:
            assert tensors.keys() == alone[1].keys()
            loss = max(abs(a - b) for a, b in zip(losses, alone[0], strict=True))
            parameter = max(float((tensors[name] - alone[1][name]).abs().max()) for name in tensors)
            differences.append([loss, parameter])
    group.close()
    return differences


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("num_ranks", "layouts"), [(2, [{"context": 2}, {"tensor": 2}]), (4, [{"tensor": 2, "context": 2}])]
)
def test_packed_rows_train_as_on_one_process(num_ranks: int, layouts: list[dict[str, int]]) -> None:
    results = run_processes(num_ranks, compare, {"layouts": layouts}, timeout_s=120)
    check_exits(results)
    for layout, (loss, parameter) in zip(layouts, results[0].value, strict=True):
        assert loss < LOSS_TOLERANCE, layout
        assert parameter < PARAMETER_TOLERANCE, layout
