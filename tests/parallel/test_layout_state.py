"""What a layout saves loads into any other; codecs and relaxed rules work between ranks that share a model."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layouts import (
    GLOBAL_BATCH,
    PARAMETER_TOLERANCE,
    make_model,
    make_replica,
    samples_of,
    take_step,
    train,
)

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import CheckpointError, DivergenceError, SettingsError
from paceline.parallel.local import local, wrap
from paceline.parallel.parallelize import parallelize
from paceline.parallel.tensor import full_tensor
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.replica.named_tensors import model_tensors
from paceline.replica.state import capture, full_state_dict, restore
from paceline.sync import DPSGD, EASGD, DiLoCo, EveryStep, LocalSGD, Rule, StreamingDiLoCo
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

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
    if replica.shard.world.rank:
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
        check_full_state_dict(replica, tensors)
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
    result |= {f"codec {name}": value for name, value in run_codecs(group, alone).items()}
    result |= {rule.name: run_relaxed(group, rule) for rule in RELAXED}
    group.close()
    return result


def go_on(folder: str) -> dict[str, Any]:
    """In the same layout, and in others, with what codecs and rules keep."""
    group = join()
    torch.set_num_threads(1)
    store = CheckpointStore(Path(folder), keep=None)
    result = {
        "resumed": resume_bit_for_bit(group, store),
        "feedback": hand_on_feedback(group, store),
        "sharded feedback": hand_on_sharded_feedback(group, store),
        "mean": begin_anew(group, store),
        "outer": grow_by_workers(group, store),
        "divergence": find_divergence(group),
        "judged": judge_averages(group),
    }
    group.close()
    return result


def check_full_state_dict(replica: Any, tensors: dict[str, torch.Tensor]) -> None:
    """On rank 0 it is what a model outside of the layout loads; on others it is empty."""
    state = full_state_dict(replica)
    if replica.shard.world.rank:
        assert not state
        return
    model = make_model()
    model.load_state_dict(state)
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, tensors[f"model/{name}"]), name


def refuse_another_model(group: Any, checkpoint: Checkpoint | None) -> None:
    replica = make_replica(make_model(num_layers=3), group, {"data": 2, "tensor": 2})
    with pytest.raises(CheckpointError, match=r"layers\.2\.\S+ is missing in it and of shape"):
        restore(checkpoint, replica)
    replica.close()


INT8 = EveryStep(codec={"name": "int8", "dense_below": 0})  # type: ignore[arg-type]
"""Holds back on the way to the owners of parts, and there again."""

RESUMED = [
    ({"data": 2, "sharded": 2}, DiLoCo(period=4, codec=INT8.codec, synchronous_steps=0)),
    ({"data": 2, "sharded": 2}, StreamingDiLoCo(period=4, num_fragments=2, codec=INT8.codec, synchronous_steps=0)),
    ({"data": 2, "tensor": 2}, INT8),
    ({"sharded": 2, "zero_stage": 1, "context": 2}, INT8),
    ({"data": 2, "pipeline": 2}, DPSGD()),
]
"""Layouts and rules that are stopped in the middle of a period."""


def resume_bit_for_bit(group: Any, store: CheckpointStore) -> list[float]:
    """Go on as if nothing had been."""
    differences = []
    for layout, sync in RESUMED:
        whole = make_replica(make_model(), group, layout, sync=sync)
        for step in range(HALF):
            take_step(whole, step, 1)
        checkpoint = save(whole, store)
        resumed = make_replica(make_model(), group, layout, sync=sync)
        restore(checkpoint, resumed)
        for replica in (whole, resumed):
            for step in range(HALF, 2 * HALF):
                take_step(replica, step, 1)
        ours, theirs = model_tensors(resumed.module), model_tensors(whole.module)
        assert ours.keys() == theirs.keys()
        differences.append(max(float((local(ours[name]) - local(theirs[name])).abs().max()) for name in ours))
        kept = whole.state.feedback()
        assert kept.keys() == resumed.state.feedback().keys()
        differences += [float((tensor - resumed.state.feedback()[name]).abs().sum()) for name, tensor in kept.items()]
        for name, average in whole.state.average.tensors.items():  # type: ignore[union-attr]
            differences.append(float((average - resumed.state.average.tensors[name]).abs().max()))  # type: ignore[union-attr]
        whole.close()
        resumed.close()
    return differences


def save(replica: Any, store: CheckpointStore) -> Checkpoint | None:
    tensors, document = capture(replica)
    if replica.shard.world.rank:
        return None
    return Checkpoint.open(store.save(tensors, document, replica.num_updates).path)


def add_up_feedback(replica: Any) -> dict[str, torch.Tensor]:
    """Return what all ranks hold back of the parameters that this one has, as whole tensors."""
    kept = {name: tensor.tolist() for name, tensor in replica.state.feedback().items()}
    everybody = replica.group.gather_documents(kept, name="feedback")
    found = {}
    for name, parameter in replica.module.named_parameters():
        states = [
            {site: torch.tensor(theirs[key]) for site in ("worker", "owner") if (key := f"{name}/{site}") in theirs}
            for theirs in everybody
        ]
        held_back = INT8.codec.held_back(states, local(parameter).shape)
        found[name] = full_tensor(
            wrap(parameter, torch.zeros_like(local(parameter)) if held_back is None else held_back)
        )
    return found


def hand_on_feedback(group: Any, store: CheckpointStore) -> dict[str, Any]:
    """What codecs hold back of each parameter stays, whoever holds which slice of it; where it cannot, that is told."""
    checkpoint, expected, differences = None, {}, []
    for layout in ({"data": 2, "sharded": 2}, {"data": 4}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}):
        replica = make_replica(make_model(), group, layout, sync=INT8)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FeedbackDroppedWarning)
            restore(checkpoint, replica)
        found = add_up_feedback(replica)
        differences += [float((tensor - expected[name]).abs().max()) for name, tensor in found.items() if expected]
        if checkpoint is None and not expected:
            for step in range(3):
                take_step(replica, step, 1)
            expected = add_up_feedback(replica)
        checkpoint = save(replica, store)
        replica.close()
    alone = make_replica(make_model(), group, {"sharded": 4}, sync=INT8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore(checkpoint, alone)
    alone.close()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return {"largest": largest, "difference": max(differences), "told": [str(one.message) for one in told]}


def hand_on_sharded_feedback(group: Any, store: CheckpointStore) -> dict[str, Any]:
    """What the codec inside the sharded axis holds back comes back in the same layout alone; elsewhere it is told."""
    codec = {"name": "top_k", "density": 0.1, "dense_below": 0}
    layout = {"data": 2, "sharded": 2}
    straight = make_replica(make_model(), group, layout, sharded_codec=codec)
    take_step(straight, 0, 1)
    checkpoint, kept = save(straight, store), straight.shard.reduce_scatter.state()  # type: ignore[union-attr]
    resumed = make_replica(make_model(), group, layout, sharded_codec=codec)
    restore(checkpoint, resumed)
    loaded = resumed.shard.reduce_scatter.state()  # type: ignore[union-attr]
    assert kept
    assert kept.keys() == loaded.keys()
    is_same = all(torch.equal(tensor, loaded[name]) for name, tensor in kept.items())
    other = make_replica(make_model(), group, layout)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore(checkpoint, other)
    for replica in (straight, resumed, other):
        replica.close()
    return {"same": is_same, "told": [str(one.message) for one in told]}


def begin_anew(group: Any, store: CheckpointStore) -> dict[str, Any]:
    """Out of another layout a rule begins anew, from the consensus and the mean of the workers' optimizers."""
    sync = DiLoCo(period=2, synchronous_steps=0, codec=INT8.codec)
    replica = make_replica(make_model(), group, {"data": 2, "sharded": 2}, sync=sync)
    for step in range(3):
        take_step(replica, step, 1)
    expected = {}
    for name, parameter in replica.module.named_parameters():
        moment = local(replica.optimizer.state[parameter]["exp_avg"]).clone()
        replica.group.all_reduce(moment, name="moments").wait()
        expected[name] = full_tensor(wrap(parameter, moment / 2))
    checkpoint = save(replica, store)
    with replica.consensus():
        common = {name: full_tensor(parameter).clone() for name, parameter in replica.module.named_parameters()}
    replica.close()
    other = make_replica(make_model(), group, {"data": 4}, sync=sync)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore(checkpoint, other)
    differences = [0.0]
    for name, parameter in other.module.named_parameters():
        differences.append(float((parameter - common[name]).detach().abs().max()))
        differences.append(float((other.optimizer.state[parameter]["exp_avg"] - expected[name]).abs().max()))
    other.close()
    return {"difference": max(differences), "told": [str(one.message) for one in told]}


def grow_by_workers(group: Any, store: CheckpointStore) -> list[float]:
    """Where the model is cut in the same way, a rule goes on with more workers: here with its outer momentum."""
    sync = DiLoCo(period=2, synchronous_steps=0)
    checkpoint = None
    if group.rank < 2:
        pair = group.subgroup([0, 1], "pair")
        replica = make_replica(make_model(), pair, {"sharded": 2}, sync=sync)
        for step in range(2):
            take_step(replica, step, 1)
        checkpoint = save(replica, store)
        velocities = {
            name: t.tolist() for name, t in replica.state.sync_state()[1].items() if name.startswith("velocity")
        }
        replica.close()
    else:
        velocities = {}
    expected = group.gather_documents(velocities, name="velocities")[group.rank % 2]
    grown = make_replica(make_model(), group, {"data": 2, "sharded": 2}, sync=sync)
    restore(checkpoint, grown)
    found = {name: t for name, t in grown.state.sync_state()[1].items() if name.startswith("velocity")}
    assert found
    assert found.keys() == expected.keys()
    differences = [float((tensor - torch.tensor(expected[name])).abs().sum()) for name, tensor in found.items()]
    take_step(grown, 2, 1)
    grown.close()
    return [max(differences), sum(float(tensor.abs().sum()) for tensor in found.values())]


def find_divergence(group: Any) -> str:
    """State of an optimizer that ranks share is compared where two of them keep the same of it."""
    replica = make_replica(make_model(), group, {"sharded": 2, "zero_stage": 1, "context": 2})
    take_step(replica, 0, 1)
    if group.rank == 3:
        states = iter(local_optimizer(replica.optimizer).state.values())
        next(states)["exp_avg"].view(-1)[0] += 1
    try:
        replica.compare()
    except DivergenceError as error:
        return str(error)
    finally:
        replica.close()
    return ""


def judge_averages(group: Any) -> list[float]:
    """Run averages where blocks stay gathered: what is trained then is the model again, not its averages."""
    replicas = [make_replica(make_model(), group, {"sharded": 4, "zero_stage": 2}) for _ in range(2)]
    judged, losses = replicas[0], []
    for step in range(3):
        for replica in replicas:
            take_step(replica, step, 1)
        inputs, targets = samples_of(step, 0, 4)
        for parameters in (judged.consensus, judged.averaged):
            with parameters():  # with gradients, so that nothing lets go of what was gathered
                losses.append(float(F.cross_entropy(judged(inputs).flatten(0, -2).detach(), targets.flatten())))
    tensors, expected = (capture(replica)[0] for replica in replicas)
    for replica in replicas:
        replica.close()
    differences = [float((tensor - expected[name]).abs().max()) for name, tensor in tensors.items()]
    return [max(differences, default=0.0), abs(losses[-1] - losses[-2])]


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
    found = {}
    for parameters in (replica.consensus, replica.averaged):
        with parameters():
            for name, tensor in model_tensors(replica.module).items():
                found[f"{parameters.__name__}/{name}"] = tensor.full_tensor().clone()  # type: ignore[attr-defined]
    replica.close()
    if group.rank:
        return 0.0

    models = [make_model() for _ in range(2)]  # here: threads would share torch's generator

    def work(thread: LocalGroup) -> dict[str, torch.Tensor]:
        # Readers have 1, 2, 4 and 5 of twelve samples; the first pair has 3 of them.
        alone = make_replica(models[thread.rank], thread, {}, sync=sync)
        for step in range(6):
            take_step(alone, step, 1, weights=[3.0, 9.0])
        tensors = {}
        for parameters in (alone.consensus, alone.averaged):
            with parameters():
                named = model_tensors(alone.module).items()
                tensors |= {f"{parameters.__name__}/{name}": tensor.clone() for name, tensor in named}
        alone.close()
        return tensors

    expected = LocalGroup.run(2, work)[0]
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def test_layouts_load_each_other_and_compose_with_codecs_and_relaxed_rules() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(4, go_through_layouts, {"folder": folder}, timeout_s=58)

    check_exits(results)
    found = results[0].value
    assert found["chain"] < PARAMETER_TOLERANCE
    assert found["codec between"] < PARAMETER_TOLERANCE
    assert found["codec inside"] < PARAMETER_TOLERANCE
    for rule in RELAXED:
        assert found[rule.name] < PARAMETER_TOLERANCE, rule.name


@pytest.mark.slow
def test_what_codecs_and_rules_keep_comes_back_or_is_told(tmp_path: Path) -> None:
    results = run_processes(4, go_on, {"folder": str(tmp_path)}, timeout_s=58)

    check_exits(results)
    assert [max(result.value["resumed"]) for result in results] == [0.0] * 4
    feedback = [result.value["feedback"] for result in results]
    assert feedback[0]["largest"] > 1e-4
    # Sums of two to four residuals round.
    assert max(one["difference"] for one in feedback) < 1e-6 * feedback[0]["largest"] + 1e-9
    assert [len(one["told"]) for one in feedback] == [1, 0, 0, 0], "rank 0 tells it, once"
    assert "residuals of codec 'int8' of 2 workers are dropped, since no codec runs among 1" in feedback[0]["told"][0]
    sharded = [result.value["sharded feedback"] for result in results]
    assert all(one["same"] for one in sharded)
    assert [len(one["told"]) for one in sharded] == [1, 0, 0, 0]
    assert "residuals of sharded_codec 'top_k' are dropped" in sharded[0]["told"][0]
    assert max(result.value["mean"]["difference"] for result in results) < 1e-7
    assert [len(result.value["mean"]["told"]) for result in results] == [1, 0, 0, 0]
    assert "residuals of the codec of sync 'diloco' are dropped" in results[0].value["mean"]["told"][0]
    assert all(difference == 0.0 < size for difference, size in (result.value["outer"] for result in results))
    changed, difference_of_losses = results[0].value["judged"]
    assert changed == 0
    assert difference_of_losses > 0.001, "averages are others than parameters"
    told = [result.value["divergence"] for result in results]
    assert len(set(told)) == 1, "all ranks say the same"
    assert "at step 1 the 2 ranks (2, 3) differ, first in optimizer state exp_avg of " in told[0]


def test_axes_that_do_not_multiply_show_their_product() -> None:
    with pytest.raises(SettingsError, match=r"data\(2\) \* tensor\(2\) = 4 and num_ranks=8"):
        Layout(data=2, tensor=2).resolve(8)
    with pytest.raises(SettingsError, match=r"multiple of sharded\(3\) = 3, but got 8; start 9"):
        Layout(sharded=3).resolve(8)


def test_threads_cannot_share_a_model() -> None:
    def work(group: LocalGroup) -> None:
        with pytest.raises(SettingsError, match="must be processes"):
            parallelize(make_model(), Layout(tensor=2), group=group, sample=torch.zeros(1, 16, dtype=torch.int64))

    LocalGroup.run(2, work)
    assert GLOBAL_BATCH > 2
