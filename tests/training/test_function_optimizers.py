"""Optimizers and schedules that functions make, against plain loops of torch's."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import lr_scheduler

import plain_functions as mine
from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.errors import SettingsError
from paceline.monitor.events import StepFinished
from paceline.optim import FunctionOptimizer, Optimizer
from paceline.parallel.local import local
from paceline.schedules import FunctionSchedule, LearningRate
from paceline.training import Run
from plain_functions import losses_of, make_points_run, parameters_of, read, train_here

NUM_STEPS = 9


def make_groups(model, lr=0.02):
    """Return AdamW whose biases learn ten times as fast, and do not decay."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": biases, "lr": 10 * lr, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)


def make_stages(optimizer):
    """Return schedulers in a row, whose states hold others and a Counter."""
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)], milestones=[3]
    )


def make_one_cycle(optimizer, num_steps, largest=0.1):
    return lr_scheduler.OneCycleLR(optimizer, [largest] * len(optimizer.param_groups), total_steps=num_steps)


def make_nothing(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)


def halve(step):
    return 0.5**step


WAYS = {
    "groups and stages": (make_groups, make_stages),
    "class and cycle": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), make_one_cycle),
    "class and class": (
        partial(torch.optim.Adam, lr=0.05),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4, eta_min=0.001),
    ),
    "class and function": (partial(torch.optim.SGD, lr=0.05), partial(lr_scheduler.LambdaLR, lr_lambda=halve)),
}


def run_of(way, **changes):
    optimizer, schedule = WAYS[way]
    settings = {"optimizer": optimizer, "schedule": schedule, "num_steps": NUM_STEPS, "clip_norm": None}
    return make_points_run(**(settings | changes))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_does_what_a_plain_loop_does(tmp_path, way):
    run = run_of(way)
    train_here(run, tmp_path)
    torch.manual_seed(run.seed)
    module = mine.build_linear()
    make_optimizer, make_schedule = WAYS[way]
    is_class = isinstance(make_optimizer, partial)
    optimizer = make_optimizer(module.parameters() if is_class else module)
    schedule = make_schedule(optimizer, NUM_STEPS) if make_schedule is make_one_cycle else make_schedule(optimizer)
    losses, rates = [], []
    dataset = run.open_data().train
    for batch in Loader(dataset, run.global_batch, group=LocalGroup(), num_steps=NUM_STEPS):
        loss = nn.functional.mse_loss(module(batch.inputs), batch.targets)
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-14), "it is told as a sum by its weight"
    assert [record.event.learning_rate for record in read(tmp_path, StepFinished)] == rates
    assert len(set(rates)) > 2, "or the schedule is none"
    saved = parameters_of(tmp_path)
    for name, parameter in module.named_parameters():  # a short batch's gradient is scaled, in float64
        torch.testing.assert_close(saved[f"model/{name}"], parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_bit_for_bit_and_workers_equal_one(tmp_path, way, num_workers):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train_here(run_of(way), straight, num_workers)
    # As if it had been killed after step 4: what was saved, and nothing else, is there.
    train_here(run_of(way, checkpoint_interval=4, keep_checkpoints=None), resumed, num_workers)
    for later in resumed.glob("checkpoints/step-*"):
        if not later.name.endswith("00004"):
            (later / "COMMITTED").unlink()
    (resumed / "events.jsonl").unlink()
    train_here(Run.model_validate(run_of(way).model_dump(mode="json")), resumed, num_workers)
    assert losses_of(resumed) == losses_of(straight)[4:]
    for name, tensor in parameters_of(straight).items():
        assert torch.equal(parameters_of(resumed)[name], tensor)
    alone = tmp_path / "alone"
    train_here(run_of(way), alone)
    assert losses_of(straight) == pytest.approx(losses_of(alone), rel=1e-9)


def test_another_schedule_goes_on_at_the_step_that_it_would_be_at(tmp_path):
    train_here(run_of("groups and stages", num_steps=4), tmp_path)
    train_here(run_of("groups and stages", schedule=make_one_cycle), tmp_path)
    straight = tmp_path / "straight"
    train_here(run_of("groups and stages", schedule=make_one_cycle), straight)
    rates = [record.event.learning_rate for record in read(tmp_path, StepFinished)]
    assert rates[4:] == [record.event.learning_rate for record in read(straight, StepFinished)][4:]


@pytest.mark.parametrize("sync", ["every_step", "asgd", "local_sgd"])
def test_rates_of_a_schedule_are_those_that_are_stepped_with(tmp_path, sync):
    """Also where a server steps: its optimizer is a copy of a worker's, and the scheduler knows neither."""
    run = make_points_run(optimizer=make_groups, schedule=make_nothing, sync=sync, checkpoint_interval=0)
    train_here(run, tmp_path, 2)
    torch.manual_seed(run.seed)
    first = dict(mine.build_linear().named_parameters())
    saved = parameters_of(tmp_path)
    for name, parameter in first.items():
        assert torch.equal(saved[f"model/{name}"], parameter), name
    train_here(run.model_copy(update={"schedule": FunctionSchedule(path=make_stages)}), tmp_path / "moves", 2)
    moved = parameters_of(tmp_path / "moves")
    assert not torch.equal(moved["model/0.weight"], first["0.weight"])


def test_rates_are_scaled_with_the_batch(tmp_path):
    changes = {"optimizer": FunctionOptimizer(path=make_groups, scaling="linear", base_batch=4)}
    train_here(run_of("groups and stages", **changes), tmp_path / "scaled")
    train_here(run_of("groups and stages"), tmp_path / "plain")
    scaled, plain = ([r.event.learning_rate for r in read(tmp_path / n, StepFinished)] for n in ("scaled", "plain"))
    assert scaled == pytest.approx([2 * rate for rate in plain])


def return_model(model):
    return model


def return_lbfgs(params):
    return torch.optim.LBFGS(params)


@pytest.mark.parametrize(
    ("function", "got"), [(return_model, "Sequential"), (return_lbfgs, "LBFGS"), (torch.optim.SparseAdam, "SparseAdam")]
)
def test_what_is_no_optimizer_is_refused(function, got):
    with pytest.raises(SettingsError, match=f"must return an optimizer of torch's .* but got {got}"):
        Optimizer.model_validate(function).build(mine.build_linear())


def take_ps(ps):
    return torch.optim.AdamW(ps, lr=3e-3)


def take_parameters(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def take_module(module):
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def test_the_first_parameters_name_says_what_is_given_and_an_unknown_one_is_refused():
    problem = r"take_ps must be called params, .* or model, .* but got 'ps'; rename it"
    with pytest.raises(ValidationError, match=problem):
        Optimizer.model_validate(take_ps)
    for function in (take_parameters, take_module):
        made = Optimizer.model_validate(function).build(mine.build_linear())
        assert type(made) is torch.optim.AdamW


def decay(step):
    return 0.99**step


def return_rate(step):
    return 0.1


def fail_otherwise(optimizer):
    raise TypeError("of its own")


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (partial(lr_scheduler.ReduceLROnPlateau, patience=3), "is stepped without a loss, but got ReduceLROnPlateau"),
        (decay, r"decay must take an optimizer and return .*, but takes a number .*; for a factor of each step give"),
        (return_rate, "return_rate must take an optimizer and return .*, but got float; take one .*lr_lambda="),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path, schedule, problem):
    with pytest.raises(SettingsError, match=problem):
        train_here(make_points_run(schedule=schedule), tmp_path)


def make_sgd(params, lr):
    return torch.optim.SGD(params, lr=lr)


@pytest.mark.parametrize("way", [partial(torch.optim.SGD, lr=-1.0), partial(make_sgd, lr=-1.0)])
def test_arguments_that_an_optimizer_refuses_are_refused(way):
    with pytest.raises(SettingsError, match=r"^arguments of .* got lr=-1.0: Invalid learning rate: -1.0; change them$"):
        Optimizer.model_validate(way).build(mine.build_linear())


def test_arguments_that_a_schedule_refuses_are_refused(tmp_path):
    schedule = partial(lr_scheduler.OneCycleLR, max_lr=0.1, pct_start=2.0)
    with pytest.raises(SettingsError, match=r"^arguments of .*OneCycleLR must be .*pct_start=2.0: Expected float"):
        train_here(make_points_run(schedule=schedule), tmp_path)


def fail_without_arguments(model):
    raise ValueError("of its own")


def test_an_error_of_an_optimizer_without_arguments_is_its_own():
    with pytest.raises(ValueError, match=r"^of its own$") as caught:
        Optimizer.model_validate(fail_without_arguments).build(mine.build_linear())
    assert not isinstance(caught.value, SettingsError)


def test_an_error_of_a_schedule_is_its_own(tmp_path):
    with pytest.raises(TypeError, match="of its own"):
        train_here(make_points_run(schedule=fail_otherwise), tmp_path)


def make_two_stages(optimizer):
    short = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    return lr_scheduler.SequentialLR(optimizer, [short, lr_scheduler.ConstantLR(optimizer)], milestones=[7])


def test_a_schedule_that_ends_before_the_training_is_told(tmp_path):
    """Before the first step, where the schedule says how long it is."""
    run = run_of("class and cycle", schedule=partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=NUM_STEPS - 2))
    with pytest.raises(SettingsError, match=f"must be at least the run's {NUM_STEPS} steps, but got {NUM_STEPS - 2}"):
        train_here(run, tmp_path / "one")
    assert not read(tmp_path / "one", StepFinished)
    with pytest.raises(ValueError, match="Tried to step 3 times") as caught:
        train_here(run_of("class and cycle", schedule=make_two_stages), tmp_path / "other")
    assert f"each of the run's {NUM_STEPS} steps, at step 3" in caught.value.__notes__[0]


def test_arguments_of_torchs_classes_are_known_before_they_are_called():
    optimizer = Optimizer.model_validate("torch.optim:AdamW")
    assert "lr" in optimizer.list_arguments()
    assert "params" not in optimizer.list_arguments()
    schedule = LearningRate.model_validate("torch.optim.lr_scheduler:OneCycleLR")
    with pytest.raises(SettingsError, match=r"'max_lr' is missing; give --schedule\.arguments\.max_lr"):
        schedule.check_complete("schedule")


def test_only_parameters_that_are_trained_are_given():
    module = mine.build_linear()
    module[0].requires_grad_(False)
    optimizer = Optimizer.model_validate(partial(torch.optim.AdamW, lr=0.1)).build(module)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [local(parameter) is parameter for parameter in held] == [True, True]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in module[2].parameters()}
