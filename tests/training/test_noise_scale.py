"""The measured gradient noise scale against gradients whose noise is known."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.errors import SettingsError
from paceline.replica.replica import Replica
from paceline.replica.step_result import StepResult
from paceline.training.noise_scale import MEMORY, NO_CLIPPING, NoiseMeter

NUM_DIMS = 40
TRUE_GRADIENT = 0.4  # in each dim: |G|^2 = 40 * 0.16 = 6.4
STDS = torch.linspace(0.5, 1.5, NUM_DIMS, dtype=torch.float64)


class Quadratic(nn.Module):
    """Half the squared distance to a sample: its gradient is the parameter less the sample."""

    def __init__(self):
        super().__init__()
        self.reduce_group = nn.Parameter(torch.full((NUM_DIMS // 2,), TRUE_GRADIENT, dtype=torch.float64))
        self.far = nn.Parameter(torch.full((NUM_DIMS // 2,), TRUE_GRADIENT, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, noise):
        return (torch.cat([self.reduce_group, self.far]) - noise).square().sum(-1) / 2


def make_noise(num_samples=5000):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_samples, NUM_DIMS, generator=generator, dtype=torch.float64) * STDS
    return noise - noise.mean(0)


def measure(
    group, *, num_steps, interval, shares=None, num_micro_batches=1, global_batch=12, resume_at=None, **options
):
    """Return what a training that all but stands still measures, and the gradients of each of this worker's parts."""
    noise = make_noise()
    loader = Loader(
        TensorDataset(noise, torch.zeros(len(noise))),
        global_batch,
        group=group,
        shares=shares,
        num_micro_batches=num_micro_batches,
    )
    module = Quadratic()
    optimizer = torch.optim.SGD([module.reduce_group, module.far], lr=1e-12)
    replica = Replica(module, optimizer, group=group, clip_norm=NO_CLIPPING, hash_interval=0, **options)
    meter = NoiseMeter(module, group, interval=interval, num_parts=num_micro_batches)
    events, parts, step = [], [], 0
    for batch in loader:
        mean = replica(batch.inputs).mean()
        meter.watch(mean, batch.num_samples)
        if batch.num_samples:
            parts.append((step, batch.num_samples, TRUE_GRADIENT - batch.inputs.mean(0)))
        replica.backward(mean, weight=batch.num_samples, last=batch.last)
        if not batch.last:
            continue
        result, step = replica.update(), step + 1
        events.append(meter.end_step(step, result, batch.interval.num_samples))
        if step == resume_at:
            state = meter.state()
            meter.close()
            meter = NoiseMeter(module, group, interval=interval, num_parts=num_micro_batches)
            meter.load(state)
        if step == num_steps:
            break
    replica.close()
    return events, parts


LAYOUTS = [
    pytest.param(1, {"num_micro_batches": 3}, id="one worker, micro-batches"),
    pytest.param(3, {"shares": [3, 1, 2]}, id="uneven workers"),
    pytest.param(3, {"shares": [1, 0, 1], "num_micro_batches": 2}, id="a worker without samples"),
]


@pytest.mark.parametrize(("num_workers", "options"), LAYOUTS)
def test_known_noise_is_measured(num_workers, options):
    """At 200 steps the squared norm's own noise is about 2%, the trace's 1%: 10% is beyond four of their standards."""
    (events, _), *others = LocalGroup.run(
        num_workers, lambda group: measure(group, num_steps=200, interval=200, **options)
    )
    assert events[:-1] == [None] * 199
    trace, squared_norm = float(STDS.square().sum()), NUM_DIMS * TRUE_GRADIENT**2
    assert events[-1].trace == pytest.approx(trace, rel=0.1)
    assert events[-1].squared_norm == pytest.approx(squared_norm, rel=0.1)
    assert events[-1].noise_scale == pytest.approx(trace / squared_norm, rel=0.1)
    assert events[-1].num_steps == 200
    assert all(other == events for other, _ in others)


@pytest.mark.parametrize(("num_workers", "options"), LAYOUTS)
def test_it_is_the_formula_of_all_parts(num_workers, options):
    results = LocalGroup.run(num_workers, lambda group: measure(group, num_steps=10, interval=5, **options))
    expected = [0.0, 0.0]
    for interval in range(2):
        traces, weights, squares = [], [], []
        for step in range(5 * interval, 5 * interval + 5):
            parts = [(num, grad) for _, parts in results for at, num, grad in parts if at == step]
            total = sum(num * grad for num, grad in parts) / 12
            traces.append(sum(num * float(grad @ grad) for num, grad in parts) - 12 * float(total @ total))
            weights.append(len(parts) - 1)
            squares.append(float(total @ total))
        trace = sum(traces) / sum(weights)
        measured = (trace, sum(squares) / 5 - trace / 12)
        expected = [MEMORY * old + (1 - MEMORY) * new for old, new in zip(expected, measured, strict=True)]
    event = results[0][0][-1]
    weight = 1 - MEMORY**2
    assert (event.trace, event.squared_norm) == pytest.approx([value / weight for value in expected], rel=1e-9)


def test_with_equal_parts_it_is_the_estimate_of_two_batch_sizes():
    """McCandlish et al. 2018, appendix A.1."""
    results = LocalGroup.run(4, lambda group: measure(group, num_steps=1, interval=1))
    grads = [parts[0][2] for _, parts in results]
    small, big = sum(float(grad @ grad) for grad in grads) / 4, float((sum(grads) / 4).square().sum())
    trace = (small - big) / (1 / 3 - 1 / 12)
    squared_norm = (12 * big - 3 * small) / (12 - 3)
    event = results[0][0][0]
    assert (event.trace, event.squared_norm) == pytest.approx((trace, squared_norm), rel=1e-9)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_saved_state_goes_on_bit_for_bit(num_workers):
    def both(group):
        options = {"num_steps": 12, "interval": 4, "num_micro_batches": 2}
        return measure(group, **options)[0], measure(group, resume_at=6, **options)[0]

    for straight, resumed in LocalGroup.run(num_workers, both):
        assert straight == resumed
        assert sum(event is not None for event in straight) == 3


def test_another_number_of_workers_goes_on_with_all_that_was_summed():
    def sums(group, state):
        meter = NoiseMeter(Quadratic(), group, interval=5, num_parts=2)
        meter.load(state)
        return meter.state()

    noise, common = {"trace": 1.0, "squared_norm": 2.0, "weight": 0.5}, {"num_steps": 3, "squares": 1.5}
    rest = {"own_squares": 4.0, "num_own_parts": 2, "weighted_squares": 2.0, "inverse_samples": 0.25}
    state = {"noise": noise, "sums": common | rest, "own": [[4.0, 2], [3.0, 1], [2.0, 1]]}
    for saved in LocalGroup.run(2, lambda group: sums(group, state)):
        assert saved["own"] == [[9.0, 4], [0.0, 0]]
        assert saved["noise"] == noise


def test_noise_that_hides_the_gradient_has_no_finite_scale():
    group = LocalGroup()
    module = nn.Linear(1, 1, bias=False).double()
    meter = NoiseMeter(module, group, interval=1, num_parts=2)
    for sign in (1.0, -1.0):
        loss = (module(torch.full((1, 1), sign, dtype=torch.float64))).mean()
        meter.watch(loss, 1)
        (loss * 8.0).backward()  # scaled, as fp16 and the weight scale it
    result = StepResult(0.0, 2.0, 0.0, 0.0, skipped=False, stop=False, newly_unused=[])
    event = meter.end_step(1, result, 2)
    assert (event.noise_scale, event.trace, event.squared_norm) == (None, 2.0, -1.0)


def test_a_step_that_was_skipped_is_left_out():
    module = nn.Linear(1, 1, bias=False)
    meter = NoiseMeter(module, LocalGroup(), interval=2, num_parts=2)

    def step(number, value, *, skipped):
        for sign in (2.0, 1.0):
            loss = module(torch.full((1, 1), value * sign)).mean()
            meter.watch(loss, 1)
            loss.backward()
        norm = 1.5 * value
        return meter.end_step(number, StepResult(0.0, 2.0, norm, 0.0, skipped, False, []), 2)

    assert step(1, math.inf, skipped=True) is None
    event = step(2, 1.0, skipped=False)
    assert (event.trace, event.squared_norm, event.num_steps) == (0.5, 2.0, 1)


def test_a_single_part_has_nothing_to_be_compared_with():
    with pytest.raises(SettingsError, match="2 parts or more, but got 1 worker and 1 micro-batch"):
        NoiseMeter(Quadratic(), LocalGroup(), interval=5, num_parts=1)
