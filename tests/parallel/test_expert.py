"""Experts that ranks share: trained as in one process, with what is saved in whole tensors, and refusals in words."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layouts import GLOBAL_BATCH, NUM_TOKENS, samples_of
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import join
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.data.base import Spec
from paceline.data.batch import Batch
from paceline.data.order import Interval, apportion
from paceline.errors import DivergenceError, SettingsError
from paceline.memory.recompute import recompute
from paceline.parallel import Experts, MixtureOfExperts, PipelineSettings, balance_loss, register_experts
from paceline.parallel.expert import check_experts
from paceline.parallel.parallelize import check_sharding, parallelize
from paceline.recipes.transformer_lm import TransformerLM
from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.replica.step_result import UnusedParametersWarning
from paceline.sync import EveryStep, LocalSGD, Rule
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

NUM_STEPS = 10
TOLERANCE = 1e-9  # ten steps in float64
VOCABULARY = 32
BALANCED = {"num_experts": 4, "capacity_factor": 1.0, "balance": 0.05}
FREE = {"num_experts": 4, "balance": 0.0}


class Extra(nn.Module):
    """A model with a vector that the samples of some ranks use, and one that none does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sometimes = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.model(tokens_BT)
        is_used = tokens_BT[:, 0] < 6
        if is_used.any():
            logits_BTV = logits_BTV + is_used[:, None, None] * self.sometimes
        return logits_BTV


@register_experts
class Stack(nn.Module):
    """A user's own experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.is_broken = 4, ""
        self.matrix = nn.Parameter(torch.randn(4, 16, 16) * 0.1)
        self.register_buffer("total", torch.zeros(()))

    def forward(
        self, tokens: Tensor, index: Tensor, weight: Tensor, scale: float = 1.0, *, rows: Any = None, gates: Any = None
    ) -> Tensor:
        gates = weight if gates is None else weight * gates
        is_mine = F.one_hot(index, self.num_experts + 1)[..., :-1] * gates[..., None]
        matrix = self.matrix * 1.0
        if self.is_broken == "averages" and matrix.requires_grad:
            matrix.register_hook(lambda gradient: gradient / len(tokens))
        mapped = scale * torch.einsum("nke,eij,nj->ni", is_mine.to(tokens), matrix, tokens)
        if rows is not None:
            is_kept, shift = rows
            mapped = mapped + is_mine.sum((1, 2))[:, None] * is_kept[:, None] * shift
        if self.is_broken == "squares":
            return mapped + 1e-3 * weight.square().sum(1, keepdim=True)
        if self.is_broken == "sums" and self.training:
            self.total += mapped.detach().sum()
        if self.is_broken == "counts" and self.num_experts != 4:
            raise ValueError("four experts are wanted")
        return mapped.cumsum(0) if self.is_broken == "mixes" else mapped


class Further(nn.Module):
    """A caller of experts with arguments after the third: a number, rows of tokens, a number of each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.is_broken = Stack(), False

    def forward(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = tokens[:, 0] > 0, 0.5 * tokens.flip(1)
        scale = float(tokens.mean()) if self.is_broken else 0.25
        mapped: Tensor = self.stack(tokens, index, weight, scale, rows=rows, gates=1.0 + index.to(weight))
        return mapped


def make_model(settings: dict[str, Any] | None = None) -> nn.Module:
    torch.manual_seed(0)
    settings = {"width": 16, "num_layers": 2, "num_heads": 4} | (settings or BALANCED)
    return TransformerLM(**settings).build(Spec(num_classes=VOCABULARY, input_shape=(NUM_TOKENS,))).double()


def make_collapsed() -> nn.Module:
    model = make_model(FREE)
    for layer in model.layers:
        nn.init.zeros_(layer.mlp.router.weight)
        layer.mlp.router.weight.requires_grad_(False)  # all tokens take the first experts, for ever
    return model


def make_extra() -> nn.Module:
    return Extra(make_model())


def make_stacked() -> nn.Module:
    model = make_model(FREE)
    torch.manual_seed(1)
    for layer in model.layers:
        layer.mlp.experts = Stack().double()
    return model


def make_further() -> nn.Module:
    model = make_stacked()
    model.layers[1].mlp.experts = Further().double()
    return model


def make_mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, **sizes)
    config._experts_implementation = "eager"  # torch's grouped product knows no float64
    return MixtralForCausalLM(config).double()


def make_recomputed() -> nn.Module:
    model = make_model()
    recompute(model, {"layers.0": "full", "layers.1": "selective"})
    return model


MODELS = {
    "balanced": make_model,
    "free": lambda: make_model(FREE),
    "collapsed": make_collapsed,
    "extra": make_extra,
    "stacked": make_stacked,
    "further": make_further,
    "mixtral": make_mixtral,
    "recomputed": make_recomputed,
}


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def make_replica(group: Group, name: str, layout: Layout, sync: Rule | None = None) -> Replica:
    module = parallelize(
        MODELS[name](),
        layout,
        group=group,
        pipeline=PipelineSettings(num_micro_batches=2),
        sample=samples_of(0, 0, 1)[0],
    )
    if sync is not None:  # one that averages parameters as it does gradients
        return Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=sync)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    return Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1, ema=0.7)


def compute_loss(output: Any, batch: Batch) -> Loss:
    logits = logits_of(output)
    weight = float(batch.num_samples * NUM_TOKENS)
    return Loss(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()), weight)


def take_step(replica: Replica, step: int, num_micro_batches: int) -> Any:
    """One step of uneven shares, cut into micro-batches; in every third the last worker has no sample that counts."""
    shard = replica.shard
    rank, size = shard.data_parallel_group.rank, shard.data_parallel_group.size
    weights = [1.0 + reader * (step % 3 < 2 or reader < size - 1) for reader in range(size)]
    shares = apportion(GLOBAL_BATCH, [*weights[:-1], 0.0] if step % 3 == 2 and size > 1 else weights)
    first = sum(shares[:rank])
    counts = apportion(shares[rank], [1.0] * num_micro_batches)
    for number, count in enumerate(counts):
        last = number == num_micro_batches - 1
        data = samples_of(step, (first + sum(counts[:number])) % GLOBAL_BATCH, max(count, 1))
        batch = shard.split_context(Batch(data, count, Interval(0, GLOBAL_BATCH), last))
        if shard.pipeline is not None:
            replica.backward_through(batch, compute_loss, last=last)
        else:
            loss = compute_loss(replica(batch.inputs), batch)
            replica.backward(loss.mean + balance_loss(replica.module), weight=loss.weight, last=last)
    return replica.update()


def train(
    group: Group, name: str, axes: dict[str, int], num_micro_batches: int, sync: Rule | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    replica = make_replica(group, name, Layout(**axes), sync)
    numbers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            result = take_step(replica, step, num_micro_batches)
            numbers += [result.loss] + ([result.gradient_norm] if sync is None else [])
    unused = [str(each.message) for each in caught if each.category is UnusedParametersWarning]
    assert len(unused) == (name == "extra"), unused
    assert all("1 parameters" in message and "never" in message for message in unused)
    held = {n: p for n, p in replica.module.named_parameters() if "experts." in n}
    assert axes.get("expert", 1) == 1 or all(2 * p.to_local().numel() <= p.numel() for p in held.values())
    assert held
    tensors, _ = capture(replica)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    replica.close()
    return numbers, tensors


def distance(one: Any, other: Any) -> float:
    assert one[1].keys() == other[1].keys()
    tensors = [float((one[1][name] - tensor).abs().max()) for name, tensor in other[1].items()]
    return max(*tensors, *(abs(a - b) for a, b in zip(one[0], other[0], strict=True)))


def only_model(trained: Any) -> Any:
    return trained[0], {name: tensor for name, tensor in trained[1].items() if name.startswith("model/")}


def go_through_checkpoints(group: Group, folder: str, layouts: list[dict[str, int]]) -> float:
    """Return how far steps in one layout after the other are from those of one process."""
    store = CheckpointStore(Path(folder), keep=None)
    checkpoint: Checkpoint | None = None
    losses, tensors = [], {}
    for step, axes in enumerate(layouts):
        replica = make_replica(group, "balanced", Layout(**axes))
        restore(checkpoint if group.rank == 0 else None, replica)
        losses.append(take_step(replica, step, 1).loss)
        tensors, document = capture(replica)
        if group.rank == 0:
            checkpoint = Checkpoint.open(store.save(tensors, document, step + 1).path)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        replica.close()
    if group.rank:
        return 0.0
    alone = make_replica(LocalGroup(), "balanced", Layout())
    expected = [take_step(alone, step, 1).loss for step in range(len(layouts))]
    whole, _ = capture(alone)
    found = distance((losses, tensors), (expected, whole))
    alone.close()
    return found


def count_bytes(group: Group) -> list[int]:
    """Return the bytes of tokens that a step sends where experts are used evenly, and their price."""
    model = make_model(FREE)
    for layer in model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, args: (args[0], torch.arange(args[1].numel()).view_as(args[1]) % 4, args[2])
        )
    module = parallelize(model, Layout(expert=2), group=group)
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group)
    num_samples = 4
    sent = []
    for _ in range(2):
        data = samples_of(0, 0, num_samples)
        batch = Batch(data, num_samples, Interval(0, GLOBAL_BATCH), True)
        loss = compute_loss(replica(batch.inputs), batch)
        replica.backward(loss, last=True)
        sent.append(replica.update().wire_bytes - replica.wire_bytes)
    replica.close()
    num_layers, top_k, width = 2, 2, 16
    tokens = 4 * top_k * num_samples * NUM_TOKENS * width * 8 // 2
    return [*sent, num_layers * (tokens + 4 * 8)]


def refuse_strange_experts(group: Group) -> list[str]:
    """Return the refusals of experts that see several tokens, and of experts without a sample to prove them by."""
    refusals = []
    some = samples_of(0, 0, 1)[0]
    model = make_further()
    model.layers[1].mlp.experts.is_broken = True
    with pytest.raises(SettingsError) as caught:
        parallelize(model, Layout(expert=2), group=group, sample=some)
    refusals.append(str(caught.value))
    for broken, sample in (*((kind, some) for kind in ("sums", "mixes", "squares", "averages", "counts")), ("", None)):
        model = make_stacked()
        model.layers[1].mlp.experts.is_broken = broken
        with pytest.raises(SettingsError) as caught:
            parallelize(model, Layout(expert=2), group=group, sample=sample)
        refusals.append(str(caught.value))
    return refusals


def find_divergence(group: Group) -> str:
    """Return the refusal of ranks that have not in common what they should."""
    replica = make_replica(group, "free", Layout(expert=2))
    take_step(replica, 0, 1)
    if group.rank == 1:
        with torch.no_grad():
            replica.module.norm.weight.add_(0.5)
    with pytest.raises(DivergenceError) as caught:
        replica.compare()
    replica.close()
    return str(caught.value)


def compare(cases: list[Any], folder: str, chain: list[dict[str, int]]) -> dict[str, Any]:
    group = join()
    torch.set_num_threads(1)
    alone: dict[Any, Any] = {}
    found = {}
    for name, axes, num_micro_batches, *rest in cases:
        sync = LocalSGD(period=1) if rest else None
        split = train(group, name, axes, num_micro_batches, sync)
        if group.rank == 0:
            key = name, bool(rest)
            alone[key] = alone.get(key) or train(LocalGroup(), name, {}, 1, EveryStep() if rest else None)
            if rest:  # the rule has a state beside
                split, alone[key] = only_model(split), only_model(alone[key])
            found[f"{name} {axes}"] = [distance(split, alone[key]), alone[key][0][0] - alone[key][0][-1 - (not rest)]]
    found["chain"] = [go_through_checkpoints(group, folder, chain), 1.0]
    if group.size == 2:
        found["bytes"] = count_bytes(group)
        found["refusals"] = [*refuse_strange_experts(group), find_divergence(group)]
    group.close()
    return found


CASES: list[Any] = [
    (
        2,
        [
            ("extra", {"expert": 2}, 1),
            ("free", {"expert": 2}, 2),
            ("stacked", {"expert": 2}, 1),
            ("further", {"expert": 2}, 2),
            ("collapsed", {"expert": 2}, 1),
            ("mixtral", {"expert": 2}, 2),
            ("recomputed", {"expert": 2}, 1),
            ("balanced", {"sharded": 2}, 2),
        ],
        [{"expert": 2}, {"data": 2}, {"expert": 2}],
    ),
    pytest.param(
        4,
        [
            ("balanced", {"expert": 4}, 1),
            ("extra", {"expert": 2, "data": 2}, 2),
            ("balanced", {"expert": 2, "sharded": 2, "zero_stage": 1}, 1),
            ("free", {"expert": 2, "context": 2}, 2),
            ("free", {"expert": 2, "pipeline": 2}, 1),
            ("free", {"expert": 2, "data": 2}, 1, "local"),
            ("mixtral", {"expert": 2, "context": 2}, 1),
        ],
        [{"expert": 4}, {"expert": 2, "data": 2}, {"sharded": 4}, {"expert": 2, "sharded": 2, "zero_stage": 1}],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("num_ranks", "cases", "chain"), CASES, ids=["2", "4"])
def test_experts_that_are_shared_train_as_in_one_process(
    tmp_path: Path, num_ranks: int, cases: list[Any], chain: list[dict[str, int]]
) -> None:
    given = {"cases": cases, "folder": str(tmp_path), "chain": chain}
    results = run_processes(num_ranks, compare, given, timeout_s=120)

    check_exits(results)
    found = results[0].value
    if num_ranks == 2:
        first, second, price = found.pop("bytes")
        assert first == second == price > 0
        varying, summing, mixing, squaring, averaging, counting, unproved, diverged = found.pop("refusals")
        assert "differ, first in parameter norm.weight" in diverged
        assert "but 'scale' of layers.1.mlp.experts.stack (Stack) depends on the sample" in varying
        assert (
            "in forward, since each rank sees the tokens of its own experts, but layers.1.mlp.experts.total" in summing
        )
        assert "but layers.1.mlp.experts (Stack) has another output, by" in mixing
        assert "but layers.1.mlp.experts (Stack) has another output, by" in squaring
        assert "but layers.1.mlp.experts (Stack) has another gradient of matrix, by" in averaging
        assert "(Stack) fails on a rank's part with ValueError: four experts are wanted" in counting
        assert "sample must be inputs of at least one sample for a tensor or expert axis" in unproved
    assert len(found) == len(cases) + 1
    for name, (difference, progress) in found.items():
        assert difference < TOLERANCE, name
        assert progress > 1e-3, name


def refuse(model: nn.Module, **axes: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check_experts(model, Layout(**axes))
    return str(caught.value)


def test_models_whose_experts_do_not_fit_are_refused() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    assert "name the class of its experts with one line, paceline.parallel.register_experts" in refuse(plain, expert=2)
    assert "but layers.0.mlp.experts has 4 = 3 * 1 + 1" in refuse(make_model(), expert=3)
    assert "over tensor(2); take the expert axis instead" in refuse(make_model(), tensor=2)
    assert "while capacity and balance are of whole samples" in refuse(make_model(), context=2)
    assert "a balance of 0.05, whose loss a stage of pipeline(2)" in refuse(make_model(), pipeline=2)
    stack = Stack()
    stack.num_experts = None
    assert "num_experts, but 0, a Stack, has none" in refuse(nn.Sequential(stack), expert=2)
    stack = Stack()
    stack.bias = nn.Parameter(torch.zeros(16))
    assert "but 0.bias has the shape (16,)" in refuse(nn.Sequential(stack), expert=2)
    stack = Stack()
    stack.register_buffer("seen", torch.zeros(4))
    assert "divides parameters only, but 0.seen has the 4 experts in its first dim" in refuse(
        nn.Sequential(stack), expert=2
    )
    assert "but layers.0.mlp.experts is a Stack" in refuse(make_stacked(), expert=2, pipeline=2)
    check_experts(make_model(FREE), Layout(expert=2, context=2, pipeline=2))
    check_experts(MixtureOfExperts(4, 2, experts=Experts(4, 2, 8)), Layout(expert=2))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 2}, r"but got tensor\(2\); put these ranks on the expert axis"),
        ({"sharded": 2}, "but got zero_stage 3; set zero_stage to 1"),
    ],
)
def test_other_divisions_of_the_same_parameters_are_refused(axes: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_sharding(Layout(expert=2, **axes), None, PipelineSettings())
