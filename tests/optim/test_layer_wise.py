import math

import pytest
import torch
from optimizing import make, train
from pydantic import ValidationError
from torch import nn

from paceline.errors import GradientError
from paceline.optim import LAMB, LARS, SGD, Adafactor, Adam, AdamW, AdamW8bit, Optimizer
from paceline.optim.torch_rules import updates_by_element
from paceline.optim.trust_ratio import global_norms

FORCED = (1.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (LARS(ratio_bounds=FORCED, weight_decay=0.2, rate_in_momentum=False), SGD(weight_decay=0.2)),
        (LARS(ratio_bounds=FORCED, momentum=0), SGD(momentum=0)),
        (
            LAMB(ratio_bounds=FORCED, weight_decay=0.3, betas=(0.5, 0.6), epsilon=0.01, learning_rate=0.02),
            AdamW(weight_decay=0.3, betas=(0.5, 0.6), epsilon=0.01, learning_rate=0.02),
        ),
        (
            LAMB(ratio_bounds=FORCED, weight_decay=0, epsilon=1e-8),
            AdamW(weight_decay=0, betas=(0.9, 0.999), learning_rate=2e-3),
        ),
    ],
    ids=["lars", "lars without momentum", "lamb", "lamb without decay"],
)  # fmt: skip
def test_a_ratio_of_one_leaves_the_rule_below(settings, known):
    module, reference = make(), make()
    # The rate changes from step to step, as under a schedule: it must stand where torch has it.
    trained = train(module, settings.build(module), rates=lambda step, rate: rate / (step + 1))
    expected = train(reference, known.build(reference), rates=lambda step, rate: rate / (step + 1))
    for name, value in expected.items():
        # The same in another order of rounding: some units of 1e-16 a step.
        torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-14, msg=name)


def one_step(settings, weight, gradient):
    module = nn.Linear(len(weight[0]), len(weight), bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight, dtype=torch.float64))
    module.weight.grad = torch.tensor(gradient, dtype=torch.float64)
    settings.build(module).step()
    return module.weight.detach()


def test_lars_moves_a_matrix_by_its_paper():
    settings = LARS(learning_rate=0.5, momentum=0, trust_coefficient=0.1, weight_decay=0.25)
    weight, gradient = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[0.6, 0.8]]).double()
    ratio = 0.1 * 5 / (1 + 0.25 * 5)
    expected = weight - 0.5 * ratio * (gradient + 0.25 * weight)
    torch.testing.assert_close(one_step(settings, weight.tolist(), gradient.tolist()), expected)


@pytest.mark.parametrize("rate_in_momentum", [True, False])
def test_lars_follows_its_paper_over_a_warm_up(rate_in_momentum):
    """Algorithm 1 of the paper, a matrix at a time, beside the form of torch's SGD."""
    settings = LARS(learning_rate=2.0, weight_decay=0.1, rate_in_momentum=rate_in_momentum)
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    module = nn.Linear(3, 4, bias=False).double()
    module.weight = nn.Parameter(weight.clone())
    optimizer, velocity = settings.build(module), torch.zeros_like(weight)
    for step in range(12):
        rate = settings.learning_rate * (step + 1) / 12
        gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(step + 1)).double()
        optimizer.param_groups[0]["lr"], module.weight.grad = rate, gradient
        optimizer.step()
        ratio = 0.02 * weight.norm() / (gradient.norm() + 0.1 * weight.norm())
        update = ratio * (gradient + 0.1 * weight)
        velocity = 0.9 * velocity + (rate * update if rate_in_momentum else update)
        weight = weight - (velocity if rate_in_momentum else rate * velocity)
        torch.testing.assert_close(module.weight.detach(), weight, rtol=1e-12, atol=1e-14)


def test_lamb_moves_a_matrix_by_its_paper():
    """The first step's moments, corrected, are the gradient and its square: the update is its sign, and decay."""
    settings = LAMB(learning_rate=0.5, weight_decay=0.25, epsilon=1e-12)
    weight, gradient = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[0.6, -8.0]]).double()
    update = torch.tensor([[1.0, -1.0]]).double() + 0.25 * weight
    expected = weight - 0.5 * 5 / update.norm() * update
    torch.testing.assert_close(one_step(settings, weight.tolist(), gradient.tolist()), expected)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("settings", [LARS(), LAMB(epsilon=1e-30)], ids=["lars", "lamb"])
def test_the_scale_of_the_loss_does_not_matter_to_matrices(settings, scale):
    """What large batches need it for: gradients of any size move a matrix as far."""
    weight, gradient = [[3.0, 4.0], [1.0, 2.0]], torch.tensor([[0.6, -8.0], [0.1, 0.2]])
    moved = one_step(settings, weight, gradient.tolist())
    torch.testing.assert_close(one_step(settings, weight, (gradient * scale).tolist()), moved)
    assert not torch.equal(moved, torch.tensor(weight).double())


@pytest.mark.parametrize("settings", [LARS(weight_decay=0.5), LAMB(weight_decay=0.5)], ids=["lars", "lamb"])
def test_vectors_have_no_ratio_and_no_decay(settings):
    plain = settings.model_copy(update={"ratio_bounds": FORCED, "weight_decay": 0.0})
    ours, theirs = make(), make()
    ours, theirs = train(ours, settings.build(ours), 1), train(theirs, plain.build(theirs), 1)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) == (value.dim() < 2 or name == "frozen"), name


def test_bounds_hold_the_ratio():
    weight, gradient = [[300.0, 400.0]], [[0.6, 0.8]]
    free = LARS(learning_rate=1, momentum=0, trust_coefficient=1)
    bounded = free.model_copy(update={"ratio_bounds": (0.0, 10.0)})
    assert one_step(free, weight, gradient)[0, 0] == pytest.approx(300 - 500 * 0.6)
    assert one_step(bounded, weight, gradient)[0, 0] == pytest.approx(300 - 10 * 0.6)
    raised = free.model_copy(update={"ratio_bounds": (600.0, 700.0)})
    assert one_step(raised, weight, gradient)[0, 0] == pytest.approx(300 - 600 * 0.6)


@pytest.mark.parametrize("settings", [LARS(momentum=0), LAMB()], ids=["lars", "lamb"])
def test_a_matrix_that_is_zero_can_leave_it_and_one_without_gradient_stays(settings):
    assert one_step(settings, [[0.0, 0.0]], [[1.0, -1.0]]).abs().min() > 0
    still = one_step(settings.model_copy(update={"weight_decay": 0.0}), [[1.0, 2.0]], [[0.0, 0.0]])
    assert still.tolist() == [[1.0, 2.0]]


ALL = [LARS(), LARS(rate_in_momentum=False), LAMB(), Adafactor(), AdamW8bit(smallest=1), AdamW8bit()]
IDS = ["lars", "lars, rate outside", "lamb", "adafactor", "adamw_8bit", "adamw_8bit in 32 bits"]


@pytest.mark.parametrize("settings", ALL, ids=IDS)
def test_parameters_without_gradient_stay_and_have_no_state(settings):
    module = make()
    module.norm.requires_grad_(False)
    optimizer = settings.build(module)
    before = module.second.weight.detach().clone()
    module.first(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()
    assert torch.equal(module.second.weight, before)
    assert {id(p) for p in optimizer.state} == {id(module.first.weight), id(module.first.bias)}
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("settings", ALL, ids=IDS)
def test_sparse_gradients_are_refused(settings):
    module = nn.Embedding(4, 3, sparse=True)
    optimizer = settings.build(module)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match=r"gradients must be dense for .*; build the embedding with sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("settings", ALL, ids=IDS)
def test_a_saved_state_goes_on_bit_for_bit(settings):
    module = make(torch.float32)
    optimizer = settings.build(module)
    train(module, optimizer, 3)
    saved = {"state": optimizer.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    saved = {**saved, "state": {i: {k: v.clone() for k, v in kept.items()} for i, kept in saved["state"].items()}}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    expected = train(module, optimizer, 3)
    other = make(torch.float32)
    other.load_state_dict(values)
    resumed = settings.build(other)
    resumed.load_state_dict(saved)
    for name, value in train(other, resumed, 3).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("settings", ALL, ids=IDS)
def test_tensors_of_any_strides_and_dims_are_updated(settings):
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3)
    strided = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    strided.load_state_dict(plain.state_dict())
    assert not strided.weight.is_contiguous()
    for module in (plain, strided):
        optimizer = settings.build(module)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(1, 4, 5, 5)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(strided.weight, plain.weight, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(plain.weight).all()


@pytest.mark.parametrize("num_elements", [0, 1, 1023, 1024, 5000, 3_000_000])
def test_norms_are_exact(num_elements):
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    found = global_norms([values, values], [values, values.bfloat16()])
    assert found.dtype == torch.float64
    # A row of 1,024 is summed in float32.
    assert found[0].item() == pytest.approx(values.double().norm().item(), rel=1e-6)
    assert found[1].item() == pytest.approx(values.bfloat16().double().norm().item(), rel=1e-6)


def test_rules_of_whole_parameters_are_not_by_element():
    assert not [s for s in ALL if updates_by_element(s.build(make()))]
    assert all(updates_by_element(settings.build(make())) for settings in (SGD(), Adam(), AdamW()))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "lars", "momentum": 1},
        {"name": "lars", "trust_coefficient": 0},
        {"name": "lars", "ratio_bounds": (2.0, 1.0)},
        {"name": "lamb", "ratio_bounds": (-1.0, 1.0)},
        {"name": "lamb", "betas": (0.9, 1.0)},
        {"name": "lamb", "epsilon": 0},
        {"name": "adafactor", "beta2_decay": 0.5},
        {"name": "adafactor", "clip_threshold": 0.5},
        {"name": "adamw_8bit", "smallest": 0},
        {"name": "lamb", "scaling": "cubic"},
        {"name": "lamb", "base_batch": 0},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_when_it_is_made(fields):
    with pytest.raises(ValidationError, match=list(fields)[-1]):
        Optimizer.model_validate(fields)


def test_rates_follow_the_batch():
    rates = [
        0.1 * LAMB(learning_rate=0.1, scaling=scaling, base_batch=64).scale_rate(256)
        for scaling in ("none", "linear", "square_root")
    ]
    assert rates == pytest.approx([0.1, 0.4, 0.2])
    halved = 0.1 * SGD(learning_rate=0.1, scaling="linear", base_batch=256).scale_rate(128)
    assert math.isclose(halved, 0.05), "a smaller batch has a lower rate"
    assert all(
        SGD(scaling=scaling, base_batch=32).scale_rate(32) == 1.0 for scaling in ("none", "linear", "square_root")
    )
