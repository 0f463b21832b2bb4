"""What can be chosen of a pipeline, what is refused, and what each order must cost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_on_ranks import TiedModel
from pydantic import ValidationError
from torch import nn
from torch.distributed.pipelining.schedules import _Action

from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline import ORDERS, Pipeline, PipelineSettings, list_layers
from paceline.parallel.pipeline.absent import find_missing
from paceline.parallel.pipeline.costs import FLOPS, cut, estimate, measure
from paceline.parallel.pipeline.layers import AbsentModule, PipelineLayer, find_owned, keep_only
from paceline.registry import explain
from paceline.topology.layout import Layout

UNITS = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as info:
        PipelineSettings(**fields)
    return explain(info.value)


def test_settings_that_cannot_work_are_refused_when_they_are_made() -> None:
    assert "num_micro_batches must be 1 with order layer_wise, but got 4" in refusal(
        order="layer_wise", num_micro_batches=4
    )
    several = refusal(order="1f1b", stages_per_rank=2)
    assert "stages_per_rank must be 1 with order 1f1b, but got 2" in several
    assert "an order that can: interleaved, zero_bubble, zbv" in several
    assert "stages_per_rank must be at least 2 with order interleaved, but got 1" in refusal(
        order="interleaved", stages_per_rank=1
    )
    assert "stages_per_rank must be 2 with order zbv, but got 3" in refusal(order="zbv", stages_per_rank=3)
    assert "order must be 'layer_wise', 'gpipe', '1f1b'" in refusal(order="chimera")


def test_defaults_follow_the_order_and_the_ranks() -> None:
    assert [PipelineSettings(order=order).num_local_stages for order in ORDERS] == [1, 1, 1, 2, 1, 2]
    assert [PipelineSettings(order=order).most_micro_batches(4) for order in ("layer_wise", "1f1b")] == [1, 8]


@pytest.mark.parametrize(
    ("order", "most", "num_samples", "expected"),
    [
        ("gpipe", 4, 8, 4),
        ("gpipe", 4, 6, 3),
        ("gpipe", 4, 7, 1),
        ("gpipe", 4, 3, 3),
        ("1f1b", 6, 1, 1),
        ("interleaved", 5, 10, 2),  # 5 are 2 rounds of 2, and one too many
        ("layer_wise", None, 8, 1),
    ],
)
def test_micro_batches_are_equal_and_as_many_as_may_be(
    order: Any, most: int | None, num_samples: int, expected: int
) -> None:
    assert PipelineSettings(order=order, num_micro_batches=most).count_micro_batches(num_samples, 2) == expected


def test_a_model_with_too_few_layers_is_refused_with_the_arithmetic() -> None:
    settings = PipelineSettings(order="interleaved")
    with pytest.raises(SettingsError, match=r"pipeline\(4\) \* stages_per_rank\(2\) = 8 stages and the model has 6"):
        settings.count_stages(4, 6)
    with pytest.raises(SettingsError, match=r"= 4 stages need 3 names and got 1: layers.1"):
        PipelineSettings(order="interleaved", cuts=("layers.1",)).count_stages(2, 6)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "1f1b"])
def test_the_formula_is_what_torchs_order_of_work_takes(order: Any) -> None:
    """On stages of equal cost; torch has no such table of 1f1b, which is measured on sleeping stages."""
    for num_ranks in (2, 3, 4):
        for stages_per_rank in (1, 2, 3):
            if not ORDERS[order].takes(stages_per_rank):
                continue
            for num_micro_batches in (1,) if order == "layer_wise" else (1, 2, 3, 4, 6, 8, 12):
                if not ORDERS[order].can_run(num_micro_batches, num_ranks):
                    continue
                formula = ORDERS[order].bubble(num_ranks, stages_per_rank, num_micro_batches)
                walked = walk(order, num_ranks, stages_per_rank, num_micro_batches)
                assert formula is None or formula == pytest.approx(walked)
                enough = 2 * num_ranks - 1 if order == "zbv" else num_ranks
                assert (formula is None) == (ORDERS[order].splits_backward and num_micro_batches < enough)


def walk(order: Any, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> float:
    """Return the bubble of torch's table of work, each piece of it begun as soon as what it needs is done."""
    num_stages = num_ranks * stages_per_rank
    stages: Any = [
        SimpleNamespace(num_stages=num_stages, group_size=num_ranks, group_rank=0, stage_index=i, submod=nn.Identity())
        for i in range(stages_per_rank)
    ]
    made = ORDERS[order].make(stages, num_micro_batches, lambda output, _: output)
    assert made.pipeline_order is not None
    table = {
        rank: [action for action in actions if action is not None and action.computation_type.name in UNITS]
        for rank, actions in made.pipeline_order.items()
    }
    done: dict[tuple[int, str, int | None], int] = {}
    free = dict.fromkeys(table, 0)
    work = sum(UNITS[action.computation_type.name] for action in table[0])
    while any(table.values()):
        rank = next(rank for rank, todo in table.items() if todo and needs(todo[0], num_stages) <= done.keys())
        action = table[rank].pop(0)
        ready = max([free[rank], *(done[need] for need in needs(action, num_stages))])
        free[rank] = ready + UNITS[action.computation_type.name]
        done[action.stage_index, passes(action), action.microbatch_index] = free[rank]
    return 1 - work / max(free.values())


def passes(action: _Action) -> str:
    """Return what others may wait for: a forward, or a backward to the inputs."""
    return {"FORWARD": "forward", "BACKWARD_WEIGHT": "weights"}.get(action.computation_type.name, "backward")


def needs(action: _Action, num_stages: int) -> set[tuple[int, str, int | None]]:
    stage, micro_batch = action.stage_index, action.microbatch_index
    if passes(action) == "forward":
        return {(stage - 1, "forward", micro_batch)} if stage > 0 else set()
    if passes(action) == "weights":
        return {(stage, "backward", micro_batch)}
    after = {(stage + 1, "backward", micro_batch)} if stage < num_stages - 1 else set()
    return {(stage, "forward", micro_batch)} | after


def test_layers_of_models_that_are_sequences_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2))), nn.Identity())
    assert [layer.name for layer in list_layers(model)] == ["0", "1.0", "1.1.0", "2"]
    x = torch.randn(3, 2)
    y = x
    for layer in list_layers(model):
        y = layer.run(y)
    assert torch.equal(y, model(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.norm(x))


def test_layers_of_other_models_are_named_in_the_settings() -> None:
    assert [layer.name for layer in list_layers(Encoder(), ("blocks.*", "norm"))] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm",
    ]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ((), "must be a sequence of layers.*has: norm, blocks"),
        (("blocks.*", "head"), "'head'; it has: norm, blocks"),
        (("blocks.*",), "must own all its parameters and buffers, but not norm.weight, norm.bias"),
        (("blocks.*", "norm", "norm"), "different names, but norm repeat"),
    ],
)
def test_models_whose_layers_cannot_be_seen_are_refused(sequence: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        list_layers(Encoder(), sequence)


def test_what_a_rank_does_not_hold_leaves_the_model_and_the_rest_keeps_its_names() -> None:
    model = TiedModel(num_layers=2)
    layers = list_layers(model)
    whole = dict(model.named_parameters())
    keep_only(model, find_owned(model, layers[2:]))
    assert [name for name, _ in model.named_parameters()] == [
        "embedding.weight",
        "layers.1.0.weight",
        "layers.1.0.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert all(parameter is whole[name] for name, parameter in model.named_parameters())
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.layers[0], AbsentModule)
    with pytest.raises(SettingsError, match="must be run by its pipeline"):
        model.layers[0](torch.zeros(1))


def test_an_absent_list_has_items_without_values_or_says_that_it_is_elsewhere() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    absent = AbsentModule(layers, "layers")
    assert len(absent) == 3
    assert [one is layers[i] for i, one in enumerate(absent)] == [True] * 3
    assert absent[1].weight.isnan().all()
    assert find_missing([absent[1].weight]) == "layers.1.weight, which only another stage has"
    for ask in (len, iter, lambda one: one[0], lambda one: 0 in one):
        with pytest.raises(SettingsError, match="asks for items of layers, which is on another rank; name what"):
            ask(AbsentModule(None, "layers"))
    assert AbsentModule(None, "layers")


def test_costs_put_the_cut_where_the_work_is() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    layers, x = list_layers(model), torch.randn(256, 64)
    moved = [4 * (256 * a + b + a * b + 256 * b) for a, b in ((64, 512), (512, 8), (8, 8), (8, 8))]
    flops = [2 * 256 * a * b for a, b in ((64, 512), (512, 8), (8, 8), (8, 8))]
    first, *others = [flop + 4 * num_bytes for flop, num_bytes in zip(flops, moved, strict=True)]
    assert estimate(model, layers, (x,)) == [first, 4 * 2 * 4 * 256 * 512, *others]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert max(measure(model, layers, (x,))[:3]) > max(measure(model, layers, (x,))[3:])
    with Mesh(LocalGroup(), Layout().resolve(1)).world as world:
        mesh = SimpleNamespace(size=lambda axis: 2, world=world)
        assert cut(model, layers, PipelineSettings(), mesh, x) == [range(1), range(1, 5)]  # type: ignore[arg-type]
        named = PipelineSettings(cuts=("3",))
        assert cut(model, layers, named, mesh, ()) == [range(3), range(3, 5)]  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match=r"sample must be inputs .* unless its cuts are named, but got none"):
            cut(model, layers, PipelineSettings(), mesh, ())  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="can begin, but got '9'; they are: 1, 2, 3, 4"):
            cut(model, layers, PipelineSettings(cuts=("9",)), mesh, x)  # type: ignore[arg-type]
        backwards = PipelineSettings(order="zbv", cuts=("3", "2", "1"))
        with pytest.raises(SettingsError, match="in the order of the layers"):
            cut(model, layers, backwards, mesh, x)  # type: ignore[arg-type]


class Shifted(nn.Module):
    """A layer that gives another module a view of its parameter, as DeBERTa does with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 8))
        self.project = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(self.table[:2])


def test_a_view_of_a_parameter_given_to_a_module_is_estimated() -> None:
    model, x = nn.Sequential(Shifted(), Shifted()), torch.zeros(2, 8)
    num_bytes = 4 * (16 + 64 + 16 + 3 * 16)  # of the product, with a matrix that is read as it lies; of the sum
    assert estimate(model, list_layers(model), (x,)) == [2 * 2 * 8 * 8 + 4 * num_bytes] * 2


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(64, 64, num_layers=2, batch_first=True)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.rnn(x)[0]
        return output


@pytest.mark.parametrize(("kind", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrence_costs_its_matrices_and_no_norm_is_free(kind: type[nn.RNNBase], num_gates: int) -> None:
    """CPUs run an LSTM in one kernel, which torch's counter of flops does not know."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), Recurrent(kind), nn.Linear(64, 64))
    linear, norm, recurrent, _ = estimate(model, list_layers(model), (torch.randn(32, 16, 64),))
    assert 2 * 2 * num_gates * 0.8 < recurrent / linear < 2 * 2 * num_gates * 2
    assert norm > 0.1 * linear


def test_the_flops_of_a_recurrence_on_a_gpu_are_those_on_a_cpu() -> None:
    (on_cpu,), (on_gpu,) = (
        [count for kernel, count in FLOPS.items() if kernel.__name__ == name]
        for name in ("mkldnn_rnn_layer", "_cudnn_rnn")
    )
    weights = [torch.Size((256, 32)), torch.Size((256, 64)), torch.Size((256,)), torch.Size((256,))]
    assert on_cpu(torch.Size((16, 8, 32)), *weights) == on_gpu(torch.Size((16, 8, 32)), weights, 4)
    packed = torch.Size((100, 32))
    assert on_gpu(packed, weights, 4) == 2 * 100 * 256 * (32 + 64)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_on_cpus_costs_its_products() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Attention()), torch.randn(2, 4, 128, 8)
    _, attention = estimate(model, list_layers(model), (x,))
    assert attention > 2 * 2 * 2 * 4 * 128 * 128 * 8


def test_costs_are_those_of_a_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    mesh: Any = SimpleNamespace(size=lambda axis: 2, world=LocalGroup())
    sample = (torch.randn(3, 8),)
    cut(model, list_layers(model), PipelineSettings(), mesh, sample, 64)
    cut(model, list_layers(model), PipelineSettings(), mesh, sample, 2)
    assert seen == [(64, 8), (3, 8)]


def test_costs_of_a_trial_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    mesh: Any = SimpleNamespace(size=lambda axis: 2, world=LocalGroup())
    cut(
        model,
        list_layers(model),
        PipelineSettings(cuts="measured"),
        mesh,
        torch.randn(4, 2, generator=torch.Generator()),
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_values_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))
        sample = torch.randn(3, 2)
    moved = [4 * (6 + 2 + 4 + 6), 4 * (6 + 4 + 8 + 12)]
    assert estimate(model, list_layers(model), (sample,)) == [24 + 4 * moved[0], 48 + 4 * moved[1]]
    with pytest.raises(SettingsError, match="take cuts estimated"):
        measure(model, list_layers(model), (sample,))


def test_a_layer_finds_its_submodule_also_when_that_was_wrapped() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    (layer,) = list_layers(model)
    model[0] = nn.Sequential(model[0], nn.ReLU())
    assert bool((layer.run(torch.randn(9, 2)) >= 0).all())
    assert PipelineLayer.child(model, "0.0").owns == ("0.0",)


def test_a_pipeline_of_one_rank_is_the_model() -> None:
    mesh = Mesh(LocalGroup(), Layout().resolve(1))
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(4, 2)
    pipeline = Pipeline(model, mesh, PipelineSettings(), x)
    losses = pipeline.run(x, x, lambda output, targets: (output - targets).square().sum())
    torch.testing.assert_close(sum(losses), (model(x) - x).square().sum().detach())
    mesh.close()


def test_what_gathers_stages_must_find_each_parameter_in_one_stage_of_a_rank() -> None:
    mesh = Mesh(LocalGroup(), Layout().resolve(1))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    two_stages = PipelineSettings(order="interleaved")

    def check(model: nn.Module, settings: PipelineSettings, sample: torch.Tensor) -> None:
        Pipeline(model, mesh, settings, sample, peers=mesh.group("sharded"))

    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    check(layers, two_stages, torch.randn(3, 2))
    check(nn.Sequential(nn.ReLU(), *layers), two_stages, torch.randn(3, 2))
    check(TiedModel(), PipelineSettings(), tokens)  # a parameter lies in the model itself
    layers[3].weight = layers[0].weight
    check(layers, PipelineSettings(), torch.randn(3, 2))
    with pytest.raises(SettingsError, match=r"0\.weight is of two; take an order with one stage"):
        check(layers, two_stages, torch.randn(3, 2))
    mesh.close()
