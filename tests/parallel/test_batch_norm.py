"""BatchNorm over the samples of all workers equals BatchNorm in one process."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Loader, Spec
from paceline.memory import find_recomputable, recompute
from paceline.parallel.batch_norm import start_batch_norm
from paceline.recipes.resnet.model import ResNet
from paceline.replica import Replica

NUM_SAMPLES, CLASSES = 21, 3


class Perceptron(nn.Module):
    """BatchNorm1d of every kind over vectors and sequences, the first on inputs that need no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(6, affine=False)
        self.wide = nn.Linear(6, 8)
        self.cumulative = nn.BatchNorm1d(8, momentum=None)
        self.sequence = nn.BatchNorm1d(4, track_running_stats=False)
        self.last = nn.BatchNorm3d(2, eps=1e-3)
        self.frozen = nn.BatchNorm1d(8).requires_grad_(False).eval()
        self.head = nn.Linear(8, CLASSES)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = torch.tanh(self.cumulative(self.wide(self.first(x))))
        x = self.sequence(x.view(-1, 4, 2)).flatten(1)
        x = self.last(x.view(-1, 2, 2, 2, 1)).flatten(1)
        return self.head(self.frozen(x))


@functools.cache
def build_once(kind):
    torch.manual_seed(0)
    if kind == "perceptron":
        return Perceptron().double()
    settings = ResNet(depth=18, width=2, zero_init_residual=False)
    return settings.build(Spec(num_classes=CLASSES, input_shape=(1, 8, 8))).double()


def build(kind):
    """Return a new model, always of the same weights: threads share the generator that would draw them."""
    return copy.deepcopy(build_once(kind))


def make_data(kind):
    generator = torch.Generator().manual_seed(1)
    shape = (6,) if kind == "perceptron" else (1, 8, 8)
    inputs = torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64)
    if kind == "perceptron":  # shifted by far more than it varies: squares of means would lose most digits
        inputs += 1000
    inputs += 0.1 * torch.arange(NUM_SAMPLES).view(-1, *[1] * len(shape))
    return TensorDataset(inputs, torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator))


def make_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9)


def train(group, kind, *, num_steps=6, global_batch=8, num_micro_batches=1, shares=None, make=build, **settings):
    """Return losses and the state after some steps, the epoch's short last batch among them."""
    module = make(kind)
    dtype = next(module.parameters()).dtype
    replica = Replica(module, make_sgd(module), group=group, batch_norm="global", **settings)
    loader = Loader(
        make_data(kind),
        global_batch,
        group=group,
        num_steps=num_steps,
        shares=shares,
        num_micro_batches=num_micro_batches,
    )
    losses = []
    for batch in loader:
        loss = F.cross_entropy(replica(batch.inputs.to(dtype)), batch.targets)
        replica.backward(loss, weight=batch.count(), last=batch.last)
        if batch.last:
            losses.append(replica.update().loss)
    replica.close()
    return losses, module.state_dict()


def train_alone(kind, parts_of_step):
    """Return what a plain loop of torch's does, with each step's micro-batches as lists of samples."""
    module, data = build(kind), make_data(kind)
    optimizer, losses = make_sgd(module), []
    for parts in parts_of_step:
        total = sum(map(len, parts))
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for part in filter(len, parts):
            inputs, targets = data[torch.tensor(part)]
            partial = F.cross_entropy(module(inputs), targets) * (len(part) / total)
            partial.backward()
            loss += partial.detach()
        optimizer.step()
        losses.append(float(loss))
    return losses, module.state_dict()


def list_steps(num_steps=6, global_batch=8):
    """Return the samples of each step, one micro-batch each."""
    loader = Loader(TensorDataset(torch.arange(NUM_SAMPLES)), global_batch, group=LocalGroup(), num_steps=num_steps)
    return [[batch.data[0].tolist()] for batch in loader]


def assert_same(result, expected, atol=1e-10):
    losses, state = result
    assert losses == pytest.approx(expected[0], abs=atol)
    assert state.keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(state[name], tensor, atol=atol, rtol=atol, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("kind", ["perceptron", "resnet"])
@pytest.mark.parametrize(("size", "shares"), [(1, None), (2, None), (3, None), (3, [3, 1, 2]), (3, [1, 0, 1])], ids=str)
def test_workers_equal_one_process(kind, size, shares):
    expected = train_alone(kind, list_steps())
    results = LocalGroup.run(size, lambda group: train(group, kind, shares=shares), timeout_s=20)
    for result in results:
        assert_same(result, expected)
        assert all(torch.equal(result[1][name], tensor) for name, tensor in results[0][1].items()), "bit for bit"


def read_alike(size, global_batch, num_micro_batches, num_steps):
    """Return the samples of each step, by micro-batch, of which each has those of all workers."""
    workers = [
        Loader(
            TensorDataset(torch.arange(NUM_SAMPLES)),
            global_batch,
            group=group,
            num_steps=num_steps,
            num_micro_batches=num_micro_batches,
        )
        for group in LocalGroup.create(size)
    ]
    steps, parts = [], []
    for batches in zip(*workers, strict=True):
        parts.append([sample for batch in batches if batch.num_samples for sample in batch.data[0].tolist()])
        if batches[0].last:
            steps.append(parts)
            parts = []
    return steps


@pytest.mark.parametrize(("size", "global_batch"), [(2, 8), (3, 7), (3, 3)])
def test_statistics_are_those_of_a_micro_batch_over_all_workers(size, global_batch):
    """Of 3 workers with 3 samples the second micro-batch is empty on all; it changes nothing."""
    settings = {"global_batch": global_batch, "num_micro_batches": 2, "num_steps": 4}
    expected = train_alone("resnet", read_alike(size, **settings))
    for result in LocalGroup.run(size, lambda group: train(group, "resnet", **settings), timeout_s=20):
        assert_same(result, expected)


@pytest.mark.parametrize(
    "settings", [{"landing": "arrival"}, {"landing": "next_forward", "bucket_bytes": 500}], ids=str
)
def test_gradients_may_land_as_they_do_otherwise(settings):
    expected = train_alone("resnet", list_steps())
    for result in LocalGroup.run(2, lambda group: train(group, "resnet", **settings), timeout_s=20):
        assert_same(result, expected)


def run_layer(layer, inputs, weights):
    """Return what a layer makes of inputs, and the gradients of a sum that `weights` weigh."""
    inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(inputs)
    (output * weights).sum().backward()
    return output.detach(), inputs.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
def test_a_layer_of_any_dtype(dtype, options):
    """16-bit inputs with parameters in 32 bits, as under autocast; what a worker makes is of its own samples."""
    generator = torch.Generator().manual_seed(0)
    inputs, weights = (torch.randn(7, 5, 3, 2, generator=generator).to(dtype) for _ in range(2))
    inputs = (3 * inputs + 4).contiguous(memory_format=torch.channels_last)
    wide = torch.promote_types(dtype, torch.float32)
    start = nn.BatchNorm2d(5, **options).to(wide)
    for parameter in start.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    alone = copy.deepcopy(start)
    output, of_inputs, of_parameters = run_layer(alone, inputs, weights)

    def work(group):
        layer = copy.deepcopy(start)
        own = slice(0, 2) if group.rank == 0 else slice(2, 7)
        start_batch_norm("global", layer, group)
        return *run_layer(layer, inputs[own], weights[own]), layer

    results = LocalGroup.run(2, work, timeout_s=20)
    # A few units in the last place of what is of order 10.
    exact = {"atol": 40 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    assert all(result[0].dtype == result[1].dtype == dtype for result in results)
    torch.testing.assert_close(torch.cat([result[0] for result in results]), output, **exact)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), of_inputs, **exact)
    for name, gradient in of_parameters.items():
        torch.testing.assert_close(sum(result[2][name] for result in results), gradient, **exact)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(results[1][3].get_buffer(name), buffer, **exact)


def test_what_a_loss_that_counts_for_nothing_leaves_to_others():
    """Its samples are in the statistics, and so gradients of the others' losses go through them; NaN goes nowhere."""
    data = make_data("perceptron")
    inputs, targets = data[:8]
    expected = build("perceptron")
    F.cross_entropy(expected(inputs)[:5], targets[:5]).backward()

    def work(group, nothing):
        module = build("perceptron")
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=1.0), group=group, batch_norm="global")
        own = slice(0, 5) if group.rank == 0 else slice(5, 8)
        loss = F.cross_entropy(replica(inputs[own]), targets[own])
        replica.backward(loss * 0, weight=3.0, last=False)  # a graph that is done with
        loss = F.cross_entropy(replica(inputs[own]), targets[own])
        replica.backward(loss if group.rank == 0 else loss * nothing, weight=5.0 if group.rank == 0 else 0.0)
        replica.update()
        return module

    for nothing in (1.0, math.nan):
        for module in LocalGroup.run(2, lambda group, nothing=nothing: work(group, nothing), timeout_s=20):
            for (name, parameter), start in zip(
                module.named_parameters(), build("perceptron").parameters(), strict=True
            ):
                gradient = expected.get_parameter(name).grad
                step = (start - parameter) * (11 / 5) if parameter.requires_grad else None
                torch.testing.assert_close(step, gradient, atol=1e-12, rtol=1e-10)


def test_a_loss_that_counts_for_nothing_reaches_the_layers_of_another_replica():
    """As those of a discriminator that judges what a generator makes."""

    def work(group):
        torch.manual_seed(0)
        makers = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
        generator, discriminator = (Replica(one, make_sgd(one), group=group, batch_norm="global") for one in makers)
        loss = discriminator(generator(torch.randn(2, 3))).square().mean()
        generator.backward(loss, weight=1.0 - group.rank)
        generator.update()

    LocalGroup.run(2, work, timeout_s=5)


@pytest.mark.parametrize("choice", ["full", "selective"])
def test_blocks_may_be_computed_again(choice):
    expected = train_alone("resnet", list_steps())

    def make(kind):
        module = build(kind)
        recompute(module, dict.fromkeys(find_recomputable(module), choice))
        return module

    for result in LocalGroup.run(3, lambda group: train(group, "resnet", shares=[2, 1, 0], make=make), timeout_s=20):
        assert_same(result, expected)
