"""What a layout saves loads into any other; codecs and relaxed rules work between ranks that share a model."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layouts import (
    GLOBAL_BATCH,
    PARAMETER_TOLERANCE,
    make_model,
    make_replica,
    take_step,
    train,
)

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.errors import CheckpointError, SettingsError
from paceline.parallel.parallelize import parallelize
from paceline.sync import DPSGD, EASGD, DiLoCo, EveryStep, LocalSGD, Rule, StreamingDiLoCo
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout
from paceline.training.optimizer_state import model_tensors
from paceline.training.state import capture, restore

HALF = 3
CHAIN = [
    {"sharded": 4, "zero_stage": 3},
    {"sharded": 2, "pipeline": 2, "order": "1f1b"},
    {"tensor": 2, "pipeline": 2, "order": "1f1b"},
    {"sharded": 2, "zero_stage": 1, "context": 2},
    {"data": 4},
    {"data": 2, "tensor": 2},
]


def difference(replica: Any, expected: dict[str, torch.Tensor]) -> float:
    """Return on rank 0 how far the whole model's parameters are from the expected ones."""
    tensors, _ = capture(replica)
    if replica.part.world.rank:
        return 0.0
    return max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items())


def go_through_layouts(folder: str) -> dict[str, float]:
    """A step in each layout, then on in the next from its checkpoint."""
    group = join()
    torch.set_num_threads(1)
    store = CheckpointStore(Path(folder) / "chain", keep=None)
    checkpoint: Checkpoint | None = None
    for step, layout in enumerate(CHAIN):
        replica = make_replica(make_model(), group, layout)
        restore(checkpoint if group.rank == 0 else None, replica)
        take_step(replica, step, 1)
        tensors, document = capture(replica)
        if group.rank == 0:
            checkpoint = Checkpoint.open(store.save(tensors, document, step + 1).path)
        replica.close()
    refuse_another_model(group, checkpoint)
    alone = train(LocalGroup(), {}, 1, num_steps=len(CHAIN))[1] if group.rank == 0 else {}
    result = {}
    if checkpoint is not None:
        found = {name: torch.empty_like(tensor) for name, tensor in alone.items()}
        checkpoint.load(found, strict=False)
        result["chain"] = max(float((found[name] - tensor).abs().max()) for name, tensor in alone.items())
    result |= {"resumed": resume_bit_for_bit(group, folder)}
    result |= {f"codec {name}": value for name, value in run_codecs(group, alone).items()}
    result |= {rule.name: run_relaxed(group, rule) for rule in RELAXED}
    group.close()
    return result


def refuse_another_model(group: Any, checkpoint: Checkpoint | None) -> None:
    replica = make_replica(make_model(num_layers=3), group, {"data": 2, "tensor": 2})
    with pytest.raises(CheckpointError, match=r"layers\.2\.\S+ of shape .* is missing"):
        restore(checkpoint, replica)
    replica.close()


def resume_bit_for_bit(group: Any, folder: str) -> float:
    """DiLoCo between sharded pairs, stopped in the middle of a period: it goes on as if it had not been."""
    layout = {"data": 2, "sharded": 2}
    sync = DiLoCo(period=4, codec={"name": "int8"}, synchronous_steps=0)  # type: ignore[arg-type]
    whole = make_replica(make_model(), group, layout, sync=sync)
    for step in range(HALF):
        take_step(whole, step, 1)
    tensors, document = capture(whole)
    checkpoint = None
    if group.rank == 0:
        checkpoint = Checkpoint.open(CheckpointStore(Path(folder) / "half").save(tensors, document, HALF).path)
    resumed = make_replica(make_model(), group, layout, sync=sync)
    restore(checkpoint, resumed)
    for replica in (whole, resumed):
        for step in range(HALF, 2 * HALF):
            take_step(replica, step, 1)
    differences = []
    for (name, ours), theirs in zip(
        model_tensors(resumed.module).items(), model_tensors(whole.module).values(), strict=True
    ):
        assert ours.shape == theirs.shape, name
        differences.append(float((ours - theirs).abs().max()))
    whole.close()
    resumed.close()
    return max(differences)


def run_codecs(group: Any, alone: dict[str, torch.Tensor]) -> dict[str, float]:
    """Codecs that keep everything, between sharded pairs and inside them, change nothing."""
    everything = {"name": "top_k", "density": 1.0}
    results = {}
    between = make_replica(make_model(), group, {"data": 2, "sharded": 2}, sync=EveryStep(codec=everything))  # type: ignore[arg-type]
    inside = make_replica(make_model(), group, {"data": 2, "sharded": 2}, sharded_codec=everything)
    for name, replica in (("between", between), ("inside", inside)):
        for step in range(len(CHAIN)):
            take_step(replica, step, 2)
        results[name] = difference(replica, alone)
        assert replica.wire_bytes > 0
        replica.close()
    return results


RELAXED = (
    DiLoCo(period=3, synchronous_steps=0),
    StreamingDiLoCo(period=4, num_fragments=2, synchronous_steps=0),
    LocalSGD(period=3, synchronous_steps=0),
    EASGD(period=2),
    DPSGD(),
)


def run_relaxed(group: Any, sync: Rule) -> float:
    """A rule between two sharded pairs is that rule between two workers with the samples of a pair each."""
    replica = make_replica(make_model(), group, {"data": 2, "sharded": 2}, sync=sync)
    for step in range(6):
        take_step(replica, step, 1)
    with replica.consensus():
        found = {
            name: tensor.full_tensor().clone()  # type: ignore[attr-defined]
            for name, tensor in model_tensors(replica.module).items()
        }
    replica.close()
    if group.rank:
        return 0.0

    models = [make_model() for _ in range(2)]  # here: threads would share torch's generator

    def work(thread: LocalGroup) -> dict[str, torch.Tensor]:
        # Readers have 1, 2, 4 and 5 of twelve samples; the first pair has 3 of them.
        alone = make_replica(models[thread.rank], thread, {}, sync=sync)
        for step in range(6):
            take_step(alone, step, 1, weights=[3.0, 9.0])
        with alone.consensus():
            tensors = {name: tensor.clone() for name, tensor in model_tensors(alone.module).items()}
        alone.close()
        return tensors

    expected = LocalGroup.run(2, work)[0]
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def test_layouts_load_each_other_and_compose_with_codecs_and_relaxed_rules() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(4, go_through_layouts, {"folder": folder}, timeout_s=58)

    assert [result.exit_code for result in results] == [0] * 4, results[0].output
    found = results[0].value
    assert found["chain"] < PARAMETER_TOLERANCE
    assert max(result.value["resumed"] for result in results) == 0.0
    assert found["codec between"] < PARAMETER_TOLERANCE
    assert found["codec inside"] < PARAMETER_TOLERANCE
    for rule in RELAXED:
        assert found[rule.name] < PARAMETER_TOLERANCE, rule.name


def test_axes_that_do_not_multiply_show_their_product() -> None:
    with pytest.raises(SettingsError, match=r"data\(2\) \* tensor\(2\) = 4 and num_ranks=8"):
        Layout(data=2, tensor=2).resolve(8)
    with pytest.raises(SettingsError, match=r"multiple of sharded\(3\) = 3, but got 8; start 9"):
        Layout(sharded=3).resolve(8)


def test_threads_cannot_share_a_model() -> None:
    def work(group: LocalGroup) -> None:
        with pytest.raises(SettingsError, match="must be processes"):
            parallelize(make_model(), Layout(tensor=2), group=group)

    LocalGroup.run(2, work)
    assert GLOBAL_BATCH > 2
