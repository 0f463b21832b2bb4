"""Models for tests of pipelines, and what processes do with them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import Store

from paceline.comm import join
from paceline.data.base import Spec
from paceline.errors import CommunicationError
from paceline.monitor import Event, Record, from_json, to_json
from paceline.monitor.events import PipelineMeasured
from paceline.monitor.pipeline import find_pipeline_steps
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline import ORDERS, Pipeline, PipelineLayer, PipelineSettings
from paceline.recipes.resnet import ResNet
from paceline.recipes.transformer_lm import TransformerLM
from paceline.topology.layout import Layout

VOCABULARY = 11


class TiedModel(nn.Module):
    """Tokens to logits, by one matrix for both; a position of its own, a buffer, and a mask beside the activations."""

    def __init__(self, num_layers: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def pipeline_layers(self) -> Sequence[PipelineLayer]:
        return [
            PipelineLayer("embedding", ("embedding", "position"), self._embed),
            *(PipelineLayer(f"layers.{i}", (f"layers.{i}", "scale"), self._layer(i)) for i in range(len(self.layers))),
            PipelineLayer("head", ("norm", "head"), self._finish),
        ]

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(tokens) + self.position, (tokens > 2).unsqueeze(-1)

    def _layer(self, i: int) -> Any:
        def run(value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, mask = value
            return x + self.scale * self.layers[i](x) * mask, mask

        return run

    def _finish(self, value: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.head(self.norm(value[0]))
        return logits

    def forward(self, tokens: Tensor) -> Any:
        value: Any = tokens
        for layer in self.pipeline_layers():
            value = layer.run(value)
        return value


def awkward() -> nn.Sequential:
    """A model with all that is hard to cut: in-place modules, views, expanded gradients, nothing to learn."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.BatchNorm2d(4).requires_grad_(False).eval(), nn.Identity()),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(2),
        Mean(),
        nn.Linear(4, 3),
    )


class Mean(nn.Module):
    """The mean of the last dim: its gradient is expanded, not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


def sum_of_losses(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")


class Meeting(nn.Module):
    """A stage that multiplies; where told to, it first says that its second micro-batch is there, or waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.store: Store | None = None
        self.is_last = False
        self._num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.store is not None and torch.is_grad_enabled():  # no trial
            self._num_forwards += 1
            if self.is_last:
                self.store.wait(["the second is there"], timedelta(seconds=30))
            elif self._num_forwards == 2:
                self.store.set("the second is there", "")
        return self.weight * x


@contextmanager
def open_mesh() -> Iterator[Mesh]:
    with join() as group:
        mesh = Mesh(group, Layout(pipeline=group.size).resolve(group.size))
        yield mesh
        mesh.close()


def make_pair(make: Any) -> tuple[nn.Module, nn.Module]:
    """Return two models with the same values."""
    torch.manual_seed(0)
    model, whole = make(), make()
    whole.load_state_dict(model.state_dict())
    return model, whole


def compare(
    pipeline: Pipeline, whole: nn.Module, mesh: Mesh, inputs: Tensor, targets: Tensor, tolerance: float
) -> None:
    """Take the same step in a pipeline and in one process, and compare all that comes out of it."""
    random = torch.get_rng_state()
    losses = pipeline.run(inputs, targets, sum_of_losses)
    assert torch.equal(torch.get_rng_state(), random)
    loss = sum_of_losses(whole(inputs), targets)
    loss.backward()
    holds_loss = pipeline.place == pipeline.last_place
    assert len(losses) == (pipeline.settings.count_micro_batches(len(inputs), pipeline.num_ranks) if holds_loss else 0)
    if holds_loss:
        torch.testing.assert_close(sum(losses), loss.detach(), rtol=tolerance, atol=tolerance)
    mine = dict(pipeline.module.named_parameters())
    for name, expected in whole.named_parameters():
        if name in pipeline.shared:
            part = mine[name].grad if name in mine else torch.zeros_like(expected)
            assert part is not None
            gradient = part.clone()
            mesh.group("pipeline").all_reduce(gradient, name=name).wait()
        elif name in mine:
            gradient = mine[name].grad
        else:
            continue
        torch.testing.assert_close(gradient, expected.grad, rtol=tolerance, atol=tolerance)
    output = pipeline.evaluate(inputs)
    assert (output is not None) == holds_loss
    if output is not None:
        torch.testing.assert_close(output, whole(inputs).detach(), rtol=tolerance, atol=tolerance)
    for module in (pipeline.module, whole):
        module.zero_grad()


TOLERANCE = 1e-5
"""Sums over samples are made in another order: some roundings of float32."""


def check_orders() -> list[str]:
    """Compare each order with one process, on as many ranks as there are: shares that divide and that do not."""
    with open_mesh() as mesh:
        torch.manual_seed(1)
        tokens = torch.randint(VOCABULARY, (8, 5))
        for order in ORDERS:
            model, whole = make_pair(TiedModel)
            pipeline = Pipeline(model, mesh, PipelineSettings(order=order), tokens[:1])
            for num_samples in (8, 8, 5, 1, 6):
                compare(pipeline, whole, mesh, tokens[:num_samples], tokens[-num_samples:], TOLERANCE)
            check_names(pipeline, whole, mesh)
        check_accumulation(mesh, tokens)
        pipeline.close()
    return list(ORDERS)


def check_names(pipeline: Pipeline, whole: nn.Module, mesh: Mesh) -> None:
    names = [name for name, _ in [*pipeline.module.named_parameters(), *pipeline.module.named_buffers()]]
    everybody = mesh.world.gather_documents(names, name="names")
    for name, _ in [*whole.named_parameters(), *whole.named_buffers()]:
        holders = [place for place, theirs in enumerate(everybody) if name in theirs]
        assert holders == pipeline.shared.get(name, holders[:1])
    assert {name for theirs in everybody for name in theirs} == {
        name for name, _ in [*whole.named_parameters(), *whole.named_buffers()]
    }
    assert ("embedding.weight" in pipeline.shared) == (pipeline.last_place > 0)
    state = pipeline.module.state_dict()
    assert state.keys() <= whole.state_dict().keys()
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in state.items())


def check_accumulation(mesh: Mesh, tokens: Tensor) -> None:
    model, whole = make_pair(TiedModel)
    pipeline = Pipeline(model, mesh, PipelineSettings(order="zero_bubble"), tokens[:1])
    pipeline.run(tokens[:2], tokens[:2], sum_of_losses)
    sum_of_losses(whole(tokens[:2]), tokens[:2]).backward()
    compare(pipeline, whole, mesh, tokens, tokens, TOLERANCE)


def check_models() -> list[list[str]]:
    """Compare models that are hard to cut, those of the recipes, cuts of all kinds, and bfloat16."""
    with open_mesh() as mesh:
        torch.manual_seed(2)
        images, classes = torch.randn(4, 1, 6, 6), torch.randint(3, (4,))
        for order in ("1f1b", "interleaved", "zero_bubble", "zbv"):
            model, whole = make_pair(awkward)
            settings = PipelineSettings(order=order, num_micro_batches=4)
            compare(Pipeline(model, mesh, settings, images), whole, mesh, images, classes, TOLERANCE)
        for cuts in ("measured", ("stages.2.0",)):
            spec = Spec(num_classes=3, input_shape=(1, 6, 6))
            model, whole = make_pair(lambda spec=spec: ResNet(width=4, norm="group").build(spec).double())
            pipeline = Pipeline(model, mesh, PipelineSettings(cuts=cuts), images.double())
            # In float64: groups of two values at its end make small differences large.
            compare(pipeline, whole, mesh, images.double(), classes, TOLERANCE)
        first_layers = [stage[0].name for stage in pipeline.layers_of_stages]
        check_language_model(mesh)
        check_autocast(mesh)
    return [first_layers]


def check_language_model(mesh: Mesh) -> None:
    spec = Spec(num_classes=VOCABULARY, input_shape=(6,))
    tokens = torch.randint(VOCABULARY, (4, 6))
    for settings in (PipelineSettings(), PipelineSettings(order="interleaved", num_micro_batches=2)):
        model, whole = make_pair(lambda: TransformerLM(width=16, num_layers=4, num_heads=2).build(spec))
        pipeline = Pipeline(model, mesh, settings, tokens[:1])
        compare(pipeline, whole, mesh, tokens, tokens, TOLERANCE)


def check_autocast(mesh: Mesh) -> None:
    """In bfloat16 all weights get gradients, in the first step too, whose trial makes casts without a graph."""
    tokens = torch.randint(VOCABULARY, (4, 6))
    for order in ("1f1b", "zero_bubble"):
        model, whole = make_pair(TiedModel)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline = Pipeline(model, mesh, PipelineSettings(order=order, num_micro_batches=2), tokens[:1])
            output = pipeline.evaluate(tokens)
            losses = pipeline.run(tokens, tokens, sum_of_losses)
            loss = sum_of_losses(whole(tokens), tokens)
        loss.backward()
        assert output is None or output.dtype == torch.bfloat16
        if losses:
            torch.testing.assert_close(sum(losses), loss.detach(), rtol=0.01, atol=0)
        for name, parameter in pipeline.module.named_parameters():
            expected = whole.get_parameter(name).grad
            if name not in pipeline.shared:  # micro-batches are rounded to 8 bits each, and then added
                torch.testing.assert_close(parameter.grad, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def lose_a_rank() -> str:
    """Return what a rank says whose neighbour has died between two steps."""
    with join() as group:
        mesh = Mesh(group, Layout(pipeline=group.size).resolve(group.size))
        tokens = torch.randint(VOCABULARY, (4, 5))
        pipeline = Pipeline(TiedModel(), mesh, PipelineSettings(), tokens)
        pipeline.run(tokens, tokens, sum_of_losses)
        if group.rank == 1:
            os._exit(9)
        try:
            pipeline.run(tokens, tokens, sum_of_losses)
        except CommunicationError as error:
            os.write(1, str(error).encode())
        os._exit(0)


def replay_orders() -> dict[str, list[float]]:
    """Return the bubble of each order as it was carried out, were all work of the same length, and its formula's."""
    bubbles = {}
    with open_mesh() as mesh:
        # That have a formula; of other orders as many as ranks.
        fewest = {"layer_wise": 1, "zbv": 2 * mesh.world.size - 1}
        for order in ORDERS:
            num_micro_batches = fewest.get(order, mesh.world.size)
            settings = PipelineSettings(order=order, num_micro_batches=num_micro_batches)
            model = nn.Sequential(*(Meeting() for _ in range(settings.num_local_stages * mesh.world.size)))
            samples = torch.ones(num_micro_batches, 2)
            pipeline = Pipeline(model, mesh, settings, samples[:1])
            pipeline.run(samples, samples, lambda output, targets: (output - targets).square().sum(), timed=True)
            assert pipeline.times is not None
            events = mesh.world.gather_documents(to_json(as_record(pipeline.times.to_event(), mesh)), name="events")
            (step,) = find_pipeline_steps([from_json(line) for line in events])
            assert step.formula is not None
            bubbles[order] = [replay(step.events), step.formula]
    return bubbles


def replay(events: Sequence[PipelineMeasured]) -> float:
    """Return the idle part of a step in which each rank does its work in the order that it was done in.

    Forward, with the loss that the last stage adds to it, takes as long as backward to inputs and as backward to
    weights; backward to both takes twice that.
    """
    queues = [list(zip(event.works, event.stages, event.micro_batches, strict=True)) for event in events]
    last = max(stage for event in events for stage in event.stages)
    ended: dict[tuple[str, int, int], int] = {}
    now, busy = [0] * len(queues), 0
    while any(queues):
        place, (work, stage, batch) = next(
            (place, queue[0]) for place, queue in enumerate(queues) if queue and needs(*queue[0], last) <= ended.keys()
        )
        queues[place].pop(0)
        is_loss = (work, stage, batch) in ended
        length = 0 if is_loss else {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}[work]
        began = max([now[place], *(ended[need] for need in needs(work, stage, batch, last))])
        now[place] = ended["backward" if work == "inputs" else work, stage, batch] = began + length
        busy += length
    return 1 - busy / (len(events) * max(now))


def needs(work: str, stage: int, batch: int, last: int) -> set[tuple[str, int, int]]:
    """Return what must be done before a layer of work."""
    if work == "forward":
        return {("forward", stage - 1, batch)} if stage else set()
    if work == "weights":
        return {("backward", stage, batch)}
    return {("forward", stage, batch)} | ({("backward", stage + 1, batch)} if stage < last else set())


def compute_at_the_same_time() -> bool:
    """Let the last stage begin its first micro-batch only when the first has begun its second."""
    with open_mesh() as mesh:
        model = nn.Sequential(Meeting(), Meeting())
        samples = torch.ones(2, 2)
        pipeline = Pipeline(model, mesh, PipelineSettings(order="1f1b", num_micro_batches=2), samples[:1])
        for stage in model:
            stage.store, stage.is_last = mesh.world.store, mesh.world.rank == 1
        pipeline.run(samples, samples, lambda output, targets: (output - targets).square().sum())
    return True


def as_record(event: Event, mesh: Mesh) -> Record:
    return Record(run="r", rank=mesh.world.rank, epoch=0, step=0, time_s=0.0, unix_s=0.0, event=event)
