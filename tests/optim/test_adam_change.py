"""The change that Adam would make equals the one that torch's Adam makes."""

import copy
from types import MethodType

import pytest
import torch

from paceline.optim.adam_change import replace_by_changes

OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.8, 0.95)),
    "adam, decay in the gradient": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.3, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3, eps=1e-2, fused=True),
    "adamw, two groups": lambda ps: torch.optim.AdamW([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:]}]),
}


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 4, 5, 2, generator=generator).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(value) for value in (image, torch.randn(7, generator=generator), torch.tensor(2.0))]


def draw(parameters, step):
    """Return gradients in the parameters' strides."""
    generator = torch.Generator().manual_seed(step)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator)).detach() for p in parameters]


def step_once(optimizer, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_changes_moments_and_counts_are_those_of_torch(name):
    ours, theirs = make_parameters(), make_parameters()
    our_optimizer, optimizer = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    for step in range(6):
        gradients = draw(ours, step)
        step_once(optimizer, theirs, [gradient.clone() for gradient in gradients])
        scaled = [4 * gradient for gradient in gradients]
        held = [parameter.detach().clone() for parameter in ours]
        if not replace_by_changes(our_optimizer, dict(zip(ours, scaled, strict=True)), 0.25, 3.0):
            assert step == 0, "moments do not exist yet"
            step_once(our_optimizer, ours, gradients)
            continue
        assert step > 0
        for parameter, before, change in zip(ours, held, scaled, strict=True):
            assert torch.equal(parameter, before)
            parameter.detach().sub_(change, alpha=1 / 3)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        for key, value in optimizer.state[other].items():
            torch.testing.assert_close(our_optimizer.state[mine][key], value, rtol=1e-5, atol=1e-7)


def test_a_change_too_small_for_its_parameter_is_not_lost():
    """The difference of parameters before and after a step would be 0."""
    parameter = torch.nn.Parameter(torch.tensor([1e6]))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    step_once(optimizer, [parameter], [torch.ones(1)])
    gradient = torch.ones(1)
    assert replace_by_changes(optimizer, {parameter: gradient})
    assert float(gradient) == pytest.approx(1e-3)


def test_a_parameter_that_the_optimizer_does_not_hold_does_not_change():
    held, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([held])
    step_once(optimizer, [held], [torch.ones(3)])
    gradients = {held: torch.ones(3), other: torch.ones(3)}
    assert replace_by_changes(optimizer, gradients)
    assert torch.equal(gradients[other], torch.zeros(3))


def wrap_step(optimizer):
    step = optimizer.step
    optimizer.step = MethodType(lambda self: step(), optimizer)


def wrap_step_and_schedule(optimizer):
    wrap_step(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("make_optimizer", "dtype", "wrap"),
    [
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), torch.float32, None),
        (lambda ps: torch.optim.Adam(ps, maximize=True), torch.float32, None),
        (lambda ps: torch.optim.NAdam(ps), torch.float32, None),
        (lambda ps: torch.optim.Adam(ps), torch.float64, None),
        (lambda ps: torch.optim.Adam(ps), torch.float32, wrap_step),
        (lambda ps: torch.optim.Adam(ps), torch.float32, wrap_step_and_schedule),
    ],
)
def test_other_steps_are_left_to_the_optimizer(make_optimizer, dtype, wrap):
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = make_optimizer([parameter])
    step_once(optimizer, [parameter], [torch.ones(3, dtype=dtype)])
    if wrap is not None:
        wrap(optimizer)
    state, gradient = copy.deepcopy(optimizer.state_dict()), torch.ones(3, dtype=dtype)
    assert not replace_by_changes(optimizer, {parameter: gradient})
    assert torch.equal(gradient, torch.ones(3, dtype=dtype))
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


def test_a_scheduler_of_torch_does_not_count_as_a_wrapper():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    step_once(optimizer, [parameter], [torch.ones(3)])
    assert replace_by_changes(optimizer, {parameter: torch.ones(3)})
