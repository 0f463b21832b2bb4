"""Models that nobody wrote for a layout train in pipelines and on parts of sequences as in one process."""

from typing import Any

import pytest
import torch
from models_to_cut import VOCABULARY, Averaging, Learned, Plain, make, make_data
from torch import Tensor, nn

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.parallel.parallelize import parallelize
from paceline.parallel.pipeline import PipelineSettings
from paceline.parallel.pipeline.forward_part import Part
from paceline.parallel.pipeline.layers import find_owned, keep_only
from paceline.parallel.pipeline.traced import find_layers, join_parts
from paceline.replica.replica import Replica
from paceline.replica.state import capture
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout
from paceline.training.objective import Classification, MaskedLM, NextToken

NUM_STEPS = 10
NUM_SAMPLES = 6
# In float64; Llama makes its angles and norms in float32.
TOLERANCE = 1e-6

PIPELINES = [{"pipeline": 2}, {"pipeline": 2, "order": "interleaved"}, {"pipeline": 2, "order": "zero_bubble"}]
CASES: dict[str, tuple[int, list[tuple[str, dict[str, Any]]]]] = {
    "pipeline": (
        2,
        [
            *((name, PIPELINES[0]) for name in ("gpt2", "llama", "bert", "vit")),
            *((name, PIPELINES[2]) for name in ("gpt2", "vit")),
        ],
    ),
    "pipeline in another order": (2, [(name, PIPELINES[2]) for name in ("llama", "bert")]),
    "pipeline of a user's": (2, [(name, layout) for name in ("plain", "learned") for layout in PIPELINES[:2]]),
    "context": (2, [(name, {"context": 2}) for name in ("gpt2", "llama", "encoder")]),
    "context of others": (2, [(name, {"context": 2}) for name in ("bert", "learned")]),
    "mixed": (
        4,
        [
            ("gpt2", {"pipeline": 2, "sharded": 2, "zero_stage": 3}),
            ("bert", {"pipeline": 2, "sharded": 2, "zero_stage": 2}),
            ("plain", {"pipeline": 2, "sharded": 2, "zero_stage": 3}),
            ("gpt2", {"pipeline": 2, "context": 2}),
            ("llama", {"sharded": 2, "context": 2}),
            ("gpt2", {"tensor": 2, "pipeline": 2}),
            ("llama", {"tensor": 2, "pipeline": 2, "order": "interleaved"}),
        ],
    ),
}
"""Number of ranks, and models with their layouts."""


def make_replica(name: str, group: Any, layout: dict[str, Any]) -> Replica:
    step = 2 if "context" in layout else 0  # of the longest sequences, or of shorter ones
    inputs = make_data(name, step, 2, padded="context" not in layout)
    del inputs["labels"]
    axes = Layout(**{axis: size for axis, size in layout.items() if axis != "order"})
    pipeline = PipelineSettings(order=layout.get("order", "1f1b"))
    module = parallelize(make(name), axes, group=group, pipeline=pipeline, sample=inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    return Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1)


def take_step(replica: Replica, name: str, step: int) -> Any:
    shard, objective = replica.shard, {"vit": Classification(), "bert": MaskedLM()}.get(name, NextToken())
    data, size = make_data(name, step, NUM_SAMPLES), NUM_SAMPLES // shard.data_parallel_group.size
    mine = slice(shard.data_parallel_group.rank * size, (shard.data_parallel_group.rank + 1) * size)
    batch = Batch({key: value[mine] for key, value in data.items()}, size, Interval(0, NUM_SAMPLES))
    batch = shard.split_context(batch)
    if shard.pipeline is not None:
        replica.backward_through(batch, objective.loss_of_output)
    else:
        loss = objective.loss(replica, batch)
        replica.backward(loss.mean, weight=loss.weight)
    return replica.update()


def train(name: str, group: Any, layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    replica = make_replica(name, group, layout)
    results = [take_step(replica, name, step) for step in range(NUM_STEPS)]
    tensors, _ = capture(replica)
    replica.close()
    tensors = {key: tensor.clone() for key, tensor in tensors.items() if key.startswith("model/")}
    return [number for result in results for number in (result.loss, result.gradient_norm)], tensors


def compare(cases: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    """Return how far losses and parameters are from one process's, and how far one process's have come."""
    group = join()
    torch.set_num_threads(1)
    differences, alone = [], {}
    for name, layout in cases:
        if name not in alone and group.rank == 0:
            alone[name] = train(name, LocalGroup(), {})
        numbers, tensors = train(name, group, layout)
        if group.rank == 0:
            expected_numbers, expected = alone[name]
            assert tensors.keys() == expected.keys()
            begin = {f"model/{key}": value for key, value in make(name).state_dict().items()}
            loss = max(abs(a - b) for a, b in zip(numbers, expected_numbers, strict=True))
            parameter = max(float((tensors[key] - expected[key]).abs().max()) for key in tensors)
            moved = max(float((expected[key] - begin[key]).abs().max()) for key in tensors if key in begin)
            differences.append([loss, parameter, moved])
    group.close()
    return differences


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "case",
    [
        "pipeline",
        "context",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("pipeline of a user's", "mixed")),
        *(
            pytest.param(case, marks=[pytest.mark.slow, pytest.mark.campaign])
            for case in ("pipeline in another order", "context of others")
        ),
    ],
)
def test_foreign_models_train_as_in_one_process(case: str) -> None:
    num_ranks, layouts = CASES[case]
    results = run_processes(num_ranks, compare, {"cases": layouts}, timeout_s=120)
    check_exits(results)
    for layout, (loss, parameter, moved) in zip(layouts, results[0].value, strict=True):
        assert loss < TOLERANCE, layout
        assert parameter < TOLERANCE, layout
        assert moved > 0.01, layout


def refuse() -> list[str]:
    """Return what is said of models that cannot have parts of their sequences."""
    said = []
    with join() as group:
        for name in ("mixing", "plain", "vit"):
            try:
                make_replica(name, group, {"context": 2})
            except SettingsError as error:
                said.append(str(error))
    return said


def test_what_looks_at_other_tokens_in_its_own_way_is_refused_by_name() -> None:
    for result in run_processes(2, refuse):
        mixing, plain, vit = result.value
        assert "context(2), but layers.2 has another output with split sequences" in mixing
        assert "must call F.scaled_dot_product_attention" in plain
        assert "must be sequences of tokens for context(2)" in vit
        assert all("--layout.context 1" in text for text in result.value)


TOKENS = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))


def test_a_layer_owns_what_the_forward_around_it_uses_for_it() -> None:
    layers = find_layers(Plain(), (), {"input_ids": TOKENS})
    assert [layer.name for layer in layers] == ["embedding", "down.0", "down.1", "up.0", "up.1", "norm"]
    owns = {layer.name: layer.owns for layer in layers}
    assert owns["embedding"] == ("embedding",)
    assert owns["down.0"] == ("down.0", "start")
    assert owns["up.1"] == ("up.1", "scale", "slope", "start")
    assert owns["norm"] == ("norm", "embedding.weight", "scale", "start")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "plain"])
def test_parts_that_lack_all_else_make_the_output_for_other_batches(name: str) -> None:
    sample, batch = (make_data(name, step, 2 + step) for step in (0, 3))
    del sample["labels"], batch["labels"]
    whole = make(name).eval()
    wanted = whole(**batch)
    value: Any = tuple(batch.values())
    for begin in (0, 2):
        model = make(name).eval()
        layers = find_layers(model, (), sample)
        mine = layers[begin : begin + 2 if begin == 0 else None]
        (run,) = join_parts(mine)
        assert isinstance(run, Part)
        keep_only(model, find_owned(model, mine), opened=run.trace.opened)
        value = run(value)
    assert type(value) is type(wanted)
    found, expected = (one if isinstance(one, Tensor) else one.logits for one in (value, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Hiding(Learned):
    """A model that keeps a block's result in an attribute."""

    def forward(self, input_ids: Tensor) -> Tensor:
        output = super().forward(input_ids)
        return output + self.layers[0].seen.sum()


class Seen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return x


class Sharing(nn.Module):
    """A model whose blocks share what a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.layers = nn.ModuleList([Putting(), Putting()])

    def forward(self, input_ids: Tensor) -> Tensor:
        memory, x = Memory(), self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Memory:
    def __init__(self) -> None:
        self.held: list[Tensor] = []


class Putting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        memory.held.append(x * self.weight)
        return sum(memory.held, x)


def test_what_cannot_be_cut_is_refused_with_the_line_that_would_do() -> None:
    hiding = Hiding()
    hiding.layers[0] = Seen(16, 16)
    line = r"--pipeline\.sequence '\[\"embedding\", \"layers\.\*\", \"head\"\]'"
    with pytest.raises(SettingsError, match=rf"from elsewhere, such as an attribute .*{line}"):
        find_layers(hiding, (), TOKENS)
    with pytest.raises(SettingsError, match=rf"Sharing, cut at layers.0, layers.1, differs by .* share .*{line}"):
        find_layers(Sharing(), (), TOKENS)
    with pytest.raises(SettingsError, match=rf"must run on a sample .* Averaging says on .*IndexError.*{line}"):
        find_layers(Averaging(), (), TOKENS[0].double())


class Skipping(Learned):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers if len(input_ids) > 1 else self.layers[1:]:
            x = layer(x)
        return self.head(x)


def test_a_forward_that_calls_other_parts_than_on_the_sample_is_an_error() -> None:
    layers = find_layers(Skipping(), (), TOKENS)
    (run,) = join_parts(layers)
    with pytest.raises(SettingsError, match=r"call 2 is layers.1, where it was layers.0"):
        run((TOKENS[:1],))
