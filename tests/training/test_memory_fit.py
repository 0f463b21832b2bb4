"""Runs that do not fit are refused, with what would fit."""

import re

import pytest
import torch
from test_memory_estimate import CPU, TEXT, make_run

from paceline.errors import SettingsError
from paceline.memory import Memory
from paceline.recipes import find_recipe
from paceline.recipes.transformer_lm import TransformerLM
from paceline.topology.layout import Layout
from paceline.training.memory_fit import check_fit, estimate
from paceline.training.model import FunctionModel


def test_what_is_advised_fits():
    run = make_run(global_batch=32)
    needed = estimate(run, TEXT, 2, CPU).peak_bytes
    room = int(0.6 * needed)
    with pytest.raises(SettingsError, match=r"must hold a step, but it needs .* parameters") as refusal:
        check_fit(run, TEXT, 2, CPU, room)
    advice = re.findall(r"--([\w.]+) (\w+)", str(refusal.value).partition("it would with")[2])
    assert ("memory.recompute", "full") in advice
    assert any(setting == "num_micro_batches" for setting, _ in advice)
    for setting, value in advice:
        if setting == "num_micro_batches":
            changed = run.model_copy(update={setting: int(value)})
            assert check_fit(changed, TEXT, 2, CPU, room).peak_bytes <= room
            assert estimate(run.model_copy(update={setting: int(value) // 2}), TEXT, 2, CPU).peak_bytes > room
            break


def test_what_nothing_helps_says_so():
    with pytest.raises(SettingsError, match="take more ranks, or a smaller model"):
        check_fit(make_run(), TEXT, 1, CPU, 1000)


def campaign(value):
    """Return one more kind of what another is an example of."""
    return pytest.param(value, marks=[pytest.mark.slow, pytest.mark.campaign])


@pytest.mark.parametrize("axes", [{}, campaign({"tensor": 2}), {"sharded": 2, "zero_stage": 3}])
def test_moving_averages_are_as_large_as_a_ranks_part_of_the_parameters(axes):
    without = make_run(layout=Layout(**axes), num_micro_batches=4)
    kept = [estimate(run, TEXT, 4, CPU).bytes_of for run in (without, without.model_copy(update={"ema": 0.9}))]
    num_parameters = sum(parameter.numel() for parameter in without.model.build(TEXT.train.spec).parameters())
    num_holders = axes.get("tensor", 1) * axes.get("sharded", 1)
    averages = kept[1]["optimizer"] - kept[0]["optimizer"]
    assert averages == pytest.approx(4 * num_parameters / num_holders, rel=0.02)  # norms are whole on every rank


@pytest.mark.parametrize("ema", [campaign(None), 0.9])
def test_an_expert_axis_divides_what_experts_hold(ema):
    model = TransformerLM(width=16, num_layers=2, num_heads=2, num_experts=8, capacity_factor=1.0)
    whole, half = (
        estimate(make_run(model=model, layout=Layout(expert=size), num_micro_batches=4, ema=ema), TEXT, 2, CPU)
        for size in (1, 2)
    )
    named = model.build(TEXT.train.spec).named_parameters()
    experts = sum(4 * parameter.numel() for name, parameter in named if "experts." in name)
    assert whole.bytes_of["parameters"] - half.bytes_of["parameters"] == pytest.approx(experts / 2, abs=2)
    held = [needed.bytes_of["optimizer"] for needed in (whole, half)]
    assert held[0] - held[1] == pytest.approx(experts * (1 + bool(ema) / 2), rel=0.01)
    assert not half.division
    # Beside what a whole model keeps: what is sent, and what returns.
    assert half.bytes_of["activations"] > 1.05 * whole.bytes_of["activations"]


def test_capacity_bounds_what_uneven_use_of_experts_takes():
    model = TransformerLM(width=16, num_layers=1, num_heads=2, num_experts=8)
    free, tight = (
        make_run(model=model.model_copy(update={"capacity_factor": factor}), layout=Layout(expert=4))
        for factor in (None, 1.0)
    )
    bounded = estimate(tight, TEXT, 4, CPU)
    assert bounded.most_bytes == pytest.approx(bounded.peak_bytes, rel=0.01)
    with pytest.warns(UserWarning, match=r"may not hold a step if experts are used unevenly: .* set the model's capac"):
        needed = check_fit(free, TEXT, 4, CPU, int(1.2 * bounded.peak_bytes))
    assert needed.peak_bytes == pytest.approx(bounded.peak_bytes, rel=0.02)
    assert needed.most_bytes > 1.5 * needed.peak_bytes


def test_it_is_left_out_on_demand_and_where_it_fits_by_far():
    run = make_run()
    assert check_fit(run.model_copy(update={"memory": Memory(check=False)}), TEXT, 2, CPU, 1) is None
    assert check_fit(run, TEXT, 2, CPU, 10**9) is None
    needed = estimate(run, TEXT, 2, CPU)
    assert check_fit(run, TEXT, 2, CPU, 2 * needed.peak_bytes) == needed


class Decoder(torch.nn.Module):
    """A model between whose first and last layer there are 1,024 times as many positions as a sample has."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 16)
        self.enlarge = torch.nn.Sequential(*(torch.nn.ConvTranspose1d(16, 16, 2, stride=2) for _ in range(10)))
        self.head = torch.nn.Linear(16, 64)

    def forward(self, tokens):
        x = self.enlarge(self.embedding(tokens).transpose(1, 2))
        return self.head(torch.nn.functional.adaptive_avg_pool1d(x, tokens.shape[1]).transpose(1, 2))


def test_a_model_that_enlarges_never_fits_by_far():
    run = make_run(model=FunctionModel(path=f"{__file__}:Decoder"))
    needed = estimate(run, TEXT, 1, CPU).peak_bytes
    with pytest.raises(SettingsError, match="a rank's memory must hold a step"):
        check_fit(run, TEXT, 1, CPU, needed // 2)


def test_a_model_that_cannot_be_rehearsed_is_trained_with_a_warning():
    run = make_run(model=FunctionModel(path=f"{__file__}:make_stubborn"))
    with pytest.warns(UserWarning, match=r"memory was not checked: .*nobody can run"):
        assert check_fit(run, TEXT, 2, CPU, 1000) is None
    with pytest.raises(SettingsError, match="without contents"):
        estimate(run, TEXT, 2, CPU)


def make_stubborn():
    class Stubborn(torch.nn.Linear):
        def forward(self, x):
            raise ValueError("nobody can run it")

    return Stubborn(4, 4)


def test_offloading_is_refused_on_cpus_and_budgets_are_sizes():
    run = make_run(memory=Memory(offload="optimizer"))
    with pytest.raises(SettingsError, match=r"memory.offload must be none on CPUs"):
        estimate(run, TEXT, 2, CPU)
    assert Memory(recompute="500MB").recompute == 500_000_000
    with pytest.raises(ValueError, match="none, full, selective or a budget such as 500MB"):
        Memory(recompute="some")
    assert find_recipe("transformer_lm")().memory == Memory()


def test_a_model_without_blocks_cannot_be_recomputed():
    run = make_run(model=FunctionModel(path=f"{__file__}:make_stubborn"), memory=Memory(recompute="full"))
    with pytest.raises(SettingsError, match="model without blocks"):
        estimate(run, TEXT, 2, CPU)


def test_parameters_in_cpu_memory_leave_the_device(monkeypatch):
    run = make_run()
    whole = estimate(run, TEXT, 2, CPU)
    monkeypatch.setattr("paceline.training.memory_fit.check_device", lambda run, device: None)
    away = estimate(run.model_copy(update={"memory": Memory(offload="parameters")}), TEXT, 2, CPU)
    num_bytes = 4 * sum(parameter.numel() for parameter in run.model.build(TEXT.train.spec).parameters())
    assert away.bytes_of["parameters"] == away.bytes_of["gradients"] < num_bytes
    assert away.bytes_of["optimizer"] == 0
    assert away.bytes_of["activations"] == whole.bytes_of["activations"]
    assert away.host_bytes >= 3 * num_bytes


def test_virtual_workers_hold_partial_sums_and_smaller_batches():
    plain = make_run(global_batch=16)
    virtual = make_run(global_batch=16, num_virtual_workers=8, num_threads=1)
    needed = [estimate(run, TEXT, 2, CPU) for run in (plain, virtual)]
    ones = needed[0].bytes_of["parameters"]
    sums = needed[1].bytes_of["gradients"] - needed[0].bytes_of["gradients"]
    assert sums == pytest.approx(2 * ones, rel=0.01), "four of them each: sums of two, and of one"
    assert needed[1].bytes_of["activations"] < needed[0].bytes_of["activations"] / 2


def test_virtual_workers_are_advised_more_of_them():
    run = make_run(global_batch=64, num_virtual_workers=2, num_threads=1)
    room = estimate(run, TEXT, 2, CPU).peak_bytes // 2
    with pytest.raises(SettingsError, match=r"it would with --num_virtual_workers \d+ ") as refused:
        check_fit(run, TEXT, 2, CPU, room)
    assert "micro_batches" not in str(refused.value)
    assert "layout" not in str(refused.value)
