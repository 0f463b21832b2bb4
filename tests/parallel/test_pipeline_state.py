"""What forwards keep, or use in some batches only, in a model cut into stages: it is sent, or refused by name."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from models_to_cut import VOCABULARY, WIDTH, Learned
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from paceline.comm import join
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.parallel.parallelize import parallelize
from paceline.parallel.pipeline.layers import find_owned, keep_only
from paceline.parallel.pipeline.traced import find_layers, join_parts
from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

SAMPLE = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
WITH_ZEROS = SAMPLE.index_fill(1, torch.tensor([0, 2]), 0)


class Skipping(Learned):
    """A skip over all blocks, in batches with zeros only."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + 0.3 * first if (input_ids == 0).any() else x)  # type: ignore[no-any-return]


class Flagged(Learned):
    """A skip over all blocks, while a flag of the model says so."""

    skips = False

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + 0.3 * first if self.skips else x)  # type: ignore[no-any-return]


class Deciding(Flagged):
    """A decision by a number of the first output, while a flag of the model says so."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(2 * x if self.skips and first.mean() > 0 else x)  # type: ignore[no-any-return]


class Averaged(Learned):
    """A running size of what comes before the blocks, which the head divides by, and an attribute for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x) / self.size.clone()
        with torch.no_grad():
            self.size.lerp_(first.abs().mean(), 0.5)
        self.penalty = first.square().mean()
        return output


class Late(Learned):
    """A number that rises after the blocks, and is used before them."""

    strength = 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.strength * self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        self.strength += float(self.training)
        return self.head(x)  # type: ignore[no-any-return]


class Relayed(nn.Module):
    """A block that leaves a number for the next one, which uses it in training."""

    LAST: ClassVar[dict[str, float]] = {"size": 0.0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x)) * (1 + self.LAST["size"] * self.training)
        self.LAST["size"] = float(y.detach().abs().mean())
        return y


class Penalised(nn.Linear):
    """A block that keeps a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


def cut_in_two(kind: type[Learned]) -> tuple[nn.Module, list[nn.Module], list[Any]]:
    """Return a model, and its two stages as ranks hold them."""
    models, functions = [], []
    for place in range(3):
        torch.manual_seed(0)
        models.append(kind().double())
        if place < 2:
            layers = find_layers(models[place], (), SAMPLE)
            mine = layers[2:] if place else layers[:2]
            (run,) = join_parts(mine)
            keep_only(models[place], find_owned(models[place], mine), opened=run.trace.opened)
            functions.append(run)
    return models[2], models[:2], functions


@pytest.mark.parametrize("kind", [Skipping, Averaged])
def test_what_later_stages_use_in_some_batches_only_or_keep_is_sent(kind: type[Learned]) -> None:
    whole, stages, functions = cut_in_two(kind)
    for batch in (SAMPLE, WITH_ZEROS, SAMPLE):
        value: Any = (batch,)
        for run in functions:
            value = run(value)
        torch.testing.assert_close(value, whole(batch), rtol=0, atol=1e-12)
    if kind is Averaged:
        assert torch.equal(stages[1].penalty, whole.penalty)
        assert torch.equal(stages[1].size, whole.size)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Flagged, "but head comes from the output of embedding, which the sample did not use there; give parallelize"),
        (Deciding, "reads numbers that come from the output of embedding, which the sample did not use there"),
    ],
)
def test_a_stage_that_needs_what_it_was_not_sent_is_refused_by_name(kind: type[Learned], match: str) -> None:
    _, stages, functions = cut_in_two(kind)
    sent = functions[0]((SAMPLE,))
    functions[1](sent)
    stages[1].skips = True
    with pytest.raises(SettingsError, match=match):
        functions[1](sent)


def test_what_stages_share_behind_their_arguments_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"differs by .* in training: .* after its first blocks"):
        find_layers(Late(), (), SAMPLE)
    relaying, penalised = Learned(), Learned()
    relaying.layers = nn.ModuleList(Relayed() for _ in range(3))
    with pytest.raises(SettingsError, match=r"differs by .* in training: its blocks share something"):
        find_layers(relaying, (), SAMPLE)
    penalised.layers[0] = Penalised(WIDTH, WIDTH)
    with pytest.raises(SettingsError, match=r"but layers\.0\.penalty is set by a forward; return it, keep it detached"):
        find_layers(penalised, (), SAMPLE)


def train_unfrozen_with_penalty() -> list[str]:
    """Return what is said of a parameter unfrozen late, then of a loss that reads a weight of the first stage."""
    torch.set_num_threads(1)
    with join() as group:
        model = parallelize(Learned(), Layout(pipeline=2), group=group, sample=SAMPLE)

        def loss(output: Tensor, _: Any) -> Loss:
            return Loss(output.square().mean() + model.embedding.weight.norm(), 1.0)

        frozen, said = next(model.parameters()), []
        for requires_grad in (False, True):
            frozen.requires_grad_(requires_grad)
            replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
            frozen.requires_grad_(True)
            try:
                replica.backward_through(Batch({"input_ids": SAMPLE}, 2, Interval(0, 2)), loss)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said


def test_a_late_unfreezing_and_a_loss_that_reads_what_another_stage_has_are_refused_by_name() -> None:
    results = run_processes(2, train_unfrozen_with_penalty)
    check_exits(results)
    unfrozen, said = zip(*(result.value for result in results), strict=True)
    assert all("must stay frozen, but requires_grad was set after the replica was made" in one for one in unfrozen)
    assert any(
        one.startswith("SettingsError: the loss of a pipeline must use what its last stage has") for one in said
    ), said
    assert any("comes from embedding.weight, which only another stage has" in one for one in said)


def change(model: Any) -> None:
    """Change parameters as a loop may, with the same lines on ranks that have them and on others."""
    torch.manual_seed(3)
    for layer in model.layers:
        layer.joint.reset_parameters()
    nn.init.normal_(model.head.weight, std=0.2)
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
        model.head.weight[0] = 0.0
        model.embedding.weight.data[1].fill_(0.1)
        model.head.weight.data.copy_(model.head.weight.data * 0.5)
        model.embedding.weight.normal_(std=0.1)


def clip(model: nn.Module) -> tuple[float, dict[str, float]]:
    """Return the norm of all gradients, and those of them that are clipped, the head's by its own once more."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norm = clip_grad_norm_(model.parameters(), 0.1).item()
    clip_grad_norm_([*model.head.parameters()], 1e-3)
    return norm, {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


def change_stages() -> tuple[dict[str, list[float]], float, dict[str, float]]:
    with join() as group:
        model = parallelize(make_learned(), Layout(pipeline=2), group=group, sample=SAMPLE[:1])
        change(model)
        copied = copy.deepcopy(model)
        found = {name: parameter.flatten().tolist() for name, parameter in copied.named_parameters()}
        clipped = clip(model)
        with pytest.raises(SettingsError, match=r"must be of order 2 and of all parameters.*but got order inf of"):
            clip_grad_norm_(model.parameters(), 0.1, float("inf"))
        return found, *clipped


def make_learned() -> Learned:
    torch.manual_seed(0)
    return Learned()


def test_a_loop_changes_parameters_of_stages_with_the_same_lines_on_all_ranks() -> None:
    whole = make_learned()
    change(whole)
    ranks = run_processes(2, change_stages, timeout_s=50)
    check_exits(ranks)
    expected = {name: parameter.flatten().tolist() for name, parameter in whole.named_parameters()}
    (first, norm, gradients), (last, norm_there, gradients_there) = (rank.value for rank in ranks)
    assert first | last == last | first == expected
    norm_of_whole, gradients_of_whole = clip(whole)
    assert [norm, norm_there] == pytest.approx([norm_of_whole] * 2)  # float32
    assert gradients | gradients_there == pytest.approx(gradients_of_whole)
