"""What a person may do to a layout that nobody meant: it works as in one process, or says why it cannot."""

import functools
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import join
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.compression.codec import Codec
from paceline.data import Batch, Interval
from paceline.data.batch import call, select
from paceline.errors import DivergenceError, NonFiniteError, SettingsError
from paceline.optim import Optimizer
from paceline.parallel.parallelize import check_sharding, parallelize
from paceline.parallel.pipeline.layers import PipelineLayer
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.replica import Loss
from paceline.replica.replica import Replica
from paceline.replica.state import capture, full_state_dict, restore
from paceline.sync import DiLoCo
from paceline.sync.batch_statistics import pooled_over_workers
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout

NUM_SAMPLES = 8
WIDTH = 8
TOLERANCE = 1e-5
STATES = ("lars", "lamb", "adafactor", "adamw_8bit")
LAYERS = ("embedding", "first", "act", "second", "head")


class Tied(nn.Module):
    """A model whose first and last layer are one matrix."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(not is_frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.act(self.first(self.embedding(tokens))))
        logits: torch.Tensor = self.head(hidden)
        return logits


class Masked(nn.Module):
    """A model of two inputs by name, which its first layer gets in the order of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def pipeline_layers(self) -> list[PipelineLayer]:
        names = ("embedding", "body", "head")
        steps = (self.embed, self.mix, self.finish)
        return [PipelineLayer(name, (name,), run) for name, run in zip(names, steps, strict=True)]

    def embed(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = value
        return self.embedding(ids) * mask[..., None], mask

    def mix(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = value
        return torch.tanh(self.body(x)) * mask[..., None], mask

    def finish(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.head(value[0])
        return logits

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.finish(self.mix(self.embed((ids, mask))))


class Normed(nn.Module):
    """A model that keeps statistics of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.map(x))
        return normed


def make(
    model: nn.Module, group: Group, layout: Layout, *, optimizer: str = "sgd", cuts: Any = "estimated", **settings: Any
) -> Replica:
    sample = torch.zeros(1, dtype=torch.int64)
    pipeline = PipelineSettings(order="gpipe", sequence=LAYERS, cuts=cuts)
    module = parallelize(model, layout, group=group, pipeline=pipeline, sample=sample)
    rule = Optimizer.model_validate({"name": optimizer, "learning_rate": 0.1}).build(module)
    return Replica(module, rule, group=group, **({"clip_norm": 0.5, "hash_interval": 1} | settings))


def seeded(model: type[nn.Module], **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(**arguments)


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    return nn.functional.cross_entropy(output.float(), targets), float(len(targets))


def take_steps(replica: Replica, count: int) -> list[float]:
    """Return losses and norms of steps on the same samples, cut evenly among those that read."""
    tokens = torch.arange(NUM_SAMPLES) % WIDTH
    workers = replica.shard.data_parallel_group
    mine = tokens.chunk(workers.size)[workers.rank]
    numbers = []
    for _ in range(count):
        if replica.shard.pipeline is not None:
            batch = Batch((mine, (mine + 1) % WIDTH), len(mine), Interval(0, NUM_SAMPLES))
            replica.backward_through(batch, lambda output, part: Loss(*loss_of(output, part.targets)))
        else:
            loss, weight = loss_of(replica(mine), (mine + 1) % WIDTH)
            replica.backward(loss, weight=weight)
        result = replica.update()
        numbers += [result.loss, float(result.gradient_norm or 0.0)]
    return numbers


def train_masked(group: Group, layout: Layout) -> list[float]:
    """Return losses and norms of steps on mappings, the last with fewer samples, each cut into micro-batches."""
    lengths = torch.arange(NUM_SAMPLES) % 3 + 1
    mask = (torch.arange(4) < lengths[:, None]).float()
    ids = torch.arange(NUM_SAMPLES * 4).view(-1, 4) % WIDTH
    data = {"ids": ids, "mask": mask, "labels": (ids * 3 + 1) % WIDTH}
    pipeline = PipelineSettings(order="1f1b", num_micro_batches=2)
    sample = Batch(data, NUM_SAMPLES, Interval(0, NUM_SAMPLES)).inputs
    module = parallelize(seeded(Masked), layout, group=group, pipeline=pipeline, sample=sample)
    replica = Replica(module, torch.optim.SGD(module.parameters(), 0.5), group=group, clip_norm=9.0)

    def loss_of_output(output: torch.Tensor, batch: Batch) -> Loss:
        losses = nn.functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="none")
        mask = batch.data["mask"]
        return Loss((losses * mask.flatten()).sum() / mask.sum(), batch.count(mask))

    numbers = []
    for count in (NUM_SAMPLES, NUM_SAMPLES, 3):
        batch = Batch(select(data, slice(count), NUM_SAMPLES), count, Interval(0, count))
        if replica.shard.pipeline is not None:
            replica.backward_through(batch, loss_of_output)
        else:
            replica.backward(loss_of_output(call(replica, batch.inputs), batch), weight=1.0)
        result = replica.update()
        numbers += [result.loss, float(result.gradient_norm or 0.0)]
    return numbers


@functools.cache
def expected(optimizer: str = "sgd", *, is_frozen: bool = False) -> list[float]:
    replica = make(seeded(Tied, is_frozen=is_frozen), LocalGroup(), Layout(), optimizer=optimizer)
    return take_steps(replica, 3)


def distance(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


def refusal(action: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def try_pipelines(group: Group) -> dict[str, Any]:
    two = Layout(pipeline=2)
    frozen = make(seeded(Tied, is_frozen=True), group, two, cuts=("act",))
    half = make(seeded(Tied), group, two, precision="fp16")
    half_numbers = take_steps(half, 3)
    cut_early = make(seeded(Tied), group, two, cuts=("act",))
    cut_late = make(seeded(Tied), group, two, cuts=("second",))
    take_steps(cut_late, 1)
    if group.rank == 1:
        with torch.no_grad():
            dict(cut_late.module.named_parameters())["embedding.weight"][0, 0] += 1.0
    result = {
        "tied": is_whole_and_tied(cut_early),
        "frozen": distance(take_steps(frozen, 3), expected(is_frozen=True)),
        "fp16": [half_numbers, half.loss_scale],
        "cuts": [cut_early.shard.describe(), cut_late.shard.describe()],
        "untrained": refusal(lambda: make(seeded(Tied, is_frozen=True), group, two, cuts=("head",)), SettingsError),
        "diverged": refusal(lambda: take_steps(cut_late, 1), DivergenceError),
    }
    for replica in (frozen, half, cut_early, cut_late):
        replica.close()
    return result


def is_whole_and_tied(replica: Replica) -> bool:
    """Whether rank 0 gets a new replica's model as it was before ranks shared it, under all its names."""
    state, model = full_state_dict(replica), seeded(Tied)
    if replica.shard.world.rank:
        return not state
    assert state["head.weight"] is state["embedding.weight"]
    return state.keys() == model.state_dict().keys() and all(
        torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()
    )


def try_sharded(group: Group, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in STATES:
        replica = make(seeded(Tied), group, Layout(sharded=2, zero_stage=1), optimizer=name)
        result[name] = distance(take_steps(replica, 3), expected(name))
        replica.close()
    replica = make(seeded(Tied), group, Layout(sharded=2))
    result["tied shards"] = is_whole_and_tied(replica)
    tokens = torch.arange(4)

    def fail() -> None:
        loss, weight = loss_of(replica(tokens), tokens)
        replica.backward(loss * (float("nan") if group.rank else 1.0), weight=weight)
        replica.update()

    result["nan"] = refusal(fail, NonFiniteError)
    replica.close()
    replica = make(seeded(Tied), group, Layout(sharded=2), clip_norm=1e9)
    loss, _ = loss_of(replica(tokens), tokens)
    replica.backward(loss * 4, weight=0.0 if group.rank else 4.0, reduction="sum")
    result["weightless"] = float(replica.update().gradient_norm or 0.0)
    replica.close()
    result["left"] = [leave_unused(group, zero_stage) for zero_stage in (2, 3)]
    result["overflow"] = [overflow(group), overflow(group, clip_norm=1.0)]
    return result | {"diloco": resume_diloco(group, folder), "statistics": pool(group, folder)}


class Partly(nn.Module):
    """Layers that nobody uses, or one rank only; blocks and the model return views."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(-1, (2, -1))) for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, uses_all: bool) -> torch.Tensor:
        hidden = self.layers[0](self.embedding(tokens))
        hidden += 1  # in place, on what a block returned
        hidden = self.layers[1](hidden.flatten(1)).flatten(1)
        return self.sometimes(hidden) if uses_all else hidden.view(-1, WIDTH)


def leave_unused(group: Group, zero_stage: Literal[2, 3]) -> dict[str, Any]:
    """Train with weight decay; return what moved, what was warned of, and the distance from one process."""
    moved, ends = {}, []
    for layout in (Layout(sharded=2, zero_stage=zero_stage), Layout()):
        world = group if layout.sharded == 2 else LocalGroup()
        module = parallelize(seeded(Partly), layout, group=world)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
        replica = Replica(module, optimizer, group=world, clip_norm=0.5)
        before = full_state_dict(replica) or {}
        before = {name: tensor.clone() for name, tensor in before.items()}
        tokens = torch.arange(NUM_SAMPLES).reshape(2, -1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                half = (0, 1)[group.rank] if world is group else 0
                for part in [half] if world is group else [0, 1]:
                    last = world is group or part == 1
                    output = replica(tokens[part], part == 1 and step == 0)
                    replica.backward(nn.functional.cross_entropy(output, tokens[part]), weight=4.0, last=last)
                replica.update()
        after = full_state_dict(replica) or {}
        ends.append({name: tensor.clone() for name, tensor in after.items()})
        if world is group:
            moved = {name: not torch.equal(before[name], tensor) for name, tensor in after.items()}
            messages = [str(one.message) for one in caught]
        replica.close()
    return {
        "moved": [name for name, has_moved in moved.items() if has_moved],
        "unused": [message for message in messages if "had no gradient" in message],
        "views": [message for message in messages if "view" in message],
        "distance": max((float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]), default=0.0),
    }


def overflow(group: Group, **settings: Any) -> str:
    """Return what is said where gradients are finite on each rank and their sum is not, and residuals are dropped."""
    module = parallelize(seeded(Tied), Layout(sharded=2), group=group, sharded_codec=Codec.model_validate("top_k"))
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, **settings)
    tokens = torch.arange(4)
    alone = seeded(Tied)
    alone(tokens).sum().backward()
    factor = 2.5e38 / max(float(parameter.grad.abs().max()) for parameter in alone.parameters())  # type: ignore[union-attr]

    def send() -> None:
        output = replica(tokens)
        output.register_hook(lambda gradient: torch.full_like(gradient, factor))
        replica.backward(output.sum(), weight=1.0, reduction="sum")
        replica.update()

    message = refusal(send, NonFiniteError)
    coded = replica.shard.reduce_scatter
    assert coded is not None
    assert coded.residual_bytes == 0
    replica.close()
    return message


def resume_diloco(group: Group, folder: str) -> list[float]:
    """Adafactor's means over rows are no parts of their parameters; they come back all the same."""

    def begin() -> Replica:
        sync = DiLoCo(period=4, synchronous_steps=0)
        return make(seeded(Tied), group, Layout(sharded=2), optimizer="adafactor", sync=sync)

    whole, resumed = begin(), begin()
    take_steps(whole, 2)
    restore(save(whole, f"{folder}/diloco"), resumed)
    numbers = [take_steps(replica, 4) for replica in (whole, resumed)]
    whole.close()
    resumed.close()
    return [distance(*numbers)]


def save(replica: Replica, folder: str) -> Checkpoint | None:
    tensors, document = capture(replica)
    if replica.shard.world.rank:
        return None
    return Checkpoint.open(CheckpointStore(Path(folder)).save(tensors, document, 1).path)


def pool(group: Group, folder: str) -> dict[str, Any]:
    """Statistics of samples that sharded ranks have seen are pooled, as those of replicas are, and travel both ways."""
    sharded = make(seeded(Normed), group, Layout(sharded=2))
    plain = make(seeded(Normed), group, Layout(data=2))
    for replica in (sharded, plain):
        torch.manual_seed(group.rank)
        replica.module(torch.randn(16, WIDTH) + group.rank)
    wanted = []
    with pooled_over_workers(plain.module, group):
        wanted = [buffer.clone() for buffer in (plain.module.norm.running_mean, plain.module.norm.running_var)]  # type: ignore[union-attr, operator]

    def off(replica: Replica) -> float:
        found = (replica.module.norm.running_mean, replica.module.norm.running_var)  # type: ignore[union-attr]
        return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))  # type: ignore[operator]

    with pooled_over_workers(sharded.module, sharded.shard.statistics_group):
        evaluated = off(sharded)
    alone = off(sharded)
    tensors, _ = capture(sharded)
    saved = [float((tensors["model/norm.running_mean"] - wanted[0]).abs().max())] if group.rank == 0 else []
    loaded = make(seeded(Normed), group, Layout(sharded=2))
    restore(save(plain, f"{folder}/plain"), loaded)
    result = {"evaluated": evaluated, "alone": alone, "saved": saved, "loaded": off(loaded)}
    for replica in (sharded, plain, loaded):
        replica.close()
    return result


def norm_of_one() -> float:
    """Return the norm of the gradients of what the first rank alone learns from."""
    model, tokens = seeded(Tied), torch.arange(4)
    loss_of(model(tokens), tokens)[0].backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def try_all(folder: str) -> dict[str, Any]:
    group = join()
    torch.set_num_threads(1)
    result = try_pipelines(group) | try_sharded(group, folder)
    result["masked"] = train_masked(group, Layout(pipeline=2))
    group.close()
    return result


def test_two_ranks_survive_what_nobody_meant(tmp_path: Path) -> None:
    ranks = run_processes(2, try_all, {"folder": str(tmp_path)}, timeout_s=50.0)
    assert [rank.exit_code for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
    masked = train_masked(LocalGroup(), Layout())
    assert masked[-2] < masked[0]
    for found in (rank.value for rank in ranks):
        assert found["frozen"] < TOLERANCE, "a tied parameter that is frozen has no gradients to sum"
        numbers, scale = found["fp16"]
        assert scale > 0
        assert numbers[-2] < numbers[0], "ranks without a loss have its scale too"
        assert found["tied"], "a matrix of two stages has both its names"
        assert found["tied shards"]
        assert found["cuts"][0] != found["cuts"][1], "what a rank kept of one cut does not fit another"
        assert "position 1 of 2 has none in head" in found["untrained"], "said on every rank"
        assert distance(found["masked"], masked) < TOLERANCE, (
            "a mapping of two inputs, and a loss of what its mask holds"
        )
        assert "first in parameter embedding.weight" in found["diverged"], "copies of stages are compared too"
        assert {name: found[name] for name in STATES if found[name] >= TOLERANCE} == {}, "ZeRO-1 of every rule"
        assert "it is not on rank 1 (nan);" in found["nan"], "named by its rank in the world, on every rank"
        for left in found["left"]:
            assert not [name for name in left["moved"] if name.startswith(("never", "layers.2"))], "no decay"
            assert [message[:38] for message in left["unused"]] == [
                "4 parameters had no gradient at step 0",
                "2 parameters had no gradient at step 1",
            ]
            assert left["views"] == []
            assert left["distance"] < TOLERANCE
        assert all("sometimes.weight" in left["moved"] for left in ranks[0].value["left"]), "used on one rank"
        assert "in the sum over ranks only, while the loss is" in found["overflow"][0]
        assert "the gradient norm must be finite" in found["overflow"][1]
        assert found["diloco"] == [0.0]
        assert found["statistics"]["alone"] > 0.01, "each rank has seen others"
        assert found["statistics"]["evaluated"] < TOLERANCE
        assert found["statistics"]["loaded"] < TOLERANCE
        assert max(found["statistics"]["saved"], default=0.0) < TOLERANCE
        assert abs(found["weightless"] - norm_of_one()) < TOLERANCE, "a loss of weight 0 counts for nothing"


def test_shared_axes_that_exclude_each_other_are_refused_before_anything_starts() -> None:
    codec = Codec.model_validate("top_k")
    ordinary, split = PipelineSettings(), PipelineSettings(order="zero_bubble")
    check_sharding(Layout(sharded=2), codec, split)
    check_sharding(Layout(sharded=2, tensor=2, pipeline=2), None, ordinary)
    check_sharding(Layout(sharded=2, zero_stage=1, pipeline=2), None, split)
    for layout, used, message in (
        (
            Layout(sharded=2, pipeline=2),
            codec,
            r"without a pipeline axis, since it weighs gradients .*; leave it out, or give the codec to sync",
        ),
        (Layout(tensor=2), codec, "sharded ranks of zero_stage 2 or 3, whose sum of gradients it encodes"),
        (Layout(sharded=2, zero_stage=1), codec, "give the codec to sync"),
    ):
        with pytest.raises(SettingsError, match=message):
            check_sharding(layout, used, ordinary)
    with pytest.raises(SettingsError, match=r"pipeline\.order must not split backward with zero_stage 2"):
        check_sharding(Layout(sharded=2, zero_stage=2, pipeline=2), None, split)
