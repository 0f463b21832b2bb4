"""What is refused inside a pipeline's step reaches the user as Paceline's own error, not as one of torch's schedule."""

import re
from typing import Any

import pytest
import torch
from pipeline_on_ranks import open_mesh, sum_of_losses
from torch import nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.parallel.parallelize import check_tokens, find_shard, parallelize
from paceline.parallel.pipeline import Pipeline, PipelineSettings
from paceline.parallel.pipeline.layers import AbsentModule
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout


class Refusing(nn.Module):
    """A stage that refuses what it is given in training, with or without a cause, and no trial."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise SettingsError("width must be even, but got 3; give 4") from KeyError("width")
        return self.weight * x


def refuse() -> list[str]:
    with open_mesh() as mesh:
        module = nn.Sequential(nn.Linear(3, 3), Refusing())
        pipeline = Pipeline(module, mesh, PipelineSettings(cuts=("1",)), torch.ones(1, 3))
        try:
            pipeline.run(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), sum_of_losses)
        except Exception as error:
            return [type(error).__name__, str(error), repr(error.__cause__), str(error.__suppress_context__)]
    return []


class Breaking(nn.Module):
    """A model whose second half changes in place what needs a gradient, and says so in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.is_broken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.is_broken and not isinstance(self.layers[1], AbsentModule) and isinstance(self.layers[0], AbsentModule):
            raise KeyError("no such block")
        made: torch.Tensor = self.layers[1](x)
        return made


def break_in_trial() -> list[str]:
    """Return what each rank says of a model that only a part of fails, before it trains and in a step."""
    said = []
    with join() as group:
        for is_broken in (True, False):
            model = Breaking()
            model.is_broken = is_broken
            try:
                part: Any = parallelize(model, Layout(pipeline=2), group=group, sample=torch.ones(1, 3))
                pipeline = find_shard(part, group).pipeline
                assert pipeline is not None
                assert all(parameter.grad is None for parameter in part.parameters())
                part.is_broken = True
                pipeline.run(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), sum_of_losses)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def refuse_hooks_and_take_two() -> list[str]:
    """Return what is said of a hook over a tensor axis, and of a norm over samples for a sample of one."""
    said = []
    with join() as group:
        hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        hooked[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
        normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        for model, layout in ((hooked, Layout(tensor=2)), (Around(normed), Layout(pipeline=2))):
            try:
                parallelize(model, layout, group=group, sample=torch.ones(1, 4))
                said.append("")
            except SettingsError as error:
                said.append(str(error))
    return said


class Around(nn.Module):
    """A model that is no sequence itself."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made


def test_a_hook_is_named_and_a_sample_of_one_is_enough_for_a_norm_over_samples() -> None:
    for rank in run_processes(2, refuse_hooks_and_take_two, timeout_s=50):
        of_hook, of_norm = rank.value
        assert of_hook.startswith("a parameter must have no hooks on its gradient for tensor(2)")
        assert "but 0.weight has; do it in a pre-hook of the optimizer (register_step_pre_hook)" in of_hook
        assert of_norm == ""


def test_inputs_that_are_no_sequences_are_told_as_such() -> None:
    of_two_lengths = {"x": torch.ones(1, 8, 4), "ids": torch.ones(1, 4, dtype=torch.int64)}
    with pytest.raises(SettingsError, match=r"context\(2\) must have sequences to divide, .* no such sequences; set"):
        check_tokens(of_two_lengths, Layout(context=2))
    with pytest.raises(SettingsError, match=r"must be a multiple of 4 tokens, but got 6 .* is of features and no seq"):
        check_tokens({"x": torch.ones(1, 6)}, Layout(context=2))
    with pytest.raises(SettingsError, match=r"must be a multiple of 4 tokens, but got 6 = 4 .* choose 4 or 8$"):
        check_tokens({"x": torch.ones(1, 6, 3)}, Layout(context=2))


def test_what_one_rank_cannot_run_is_said_on_all() -> None:
    ranks = run_processes(2, break_in_trial, timeout_s=50)
    (first, first_step), (second, second_step) = (rank.value for rank in ranks)
    assert first == second
    assert "must run forward on the sample, but its stage of layers.1 says KeyError: 'no such block'" in first
    assert "rank 1 failed with KeyError: 'no such block'" in first_step
    assert "no such block" in second_step


def test_a_refusal_inside_a_step_is_the_error_that_the_user_sees() -> None:
    _, last = run_processes(2, refuse, timeout_s=50)
    said = ["SettingsError", "width must be even, but got 3; give 4", "KeyError('width')", "True"]
    assert last.value == said, last.output


def take_other_shapes() -> str:
    """Return what each rank says where the last one gets fewer samples than before."""
    with join() as group:
        part: Any = parallelize(make_layers(), Layout(pipeline=2), group=group, sample=torch.ones(1, 3))
        pipeline = find_shard(part, group).pipeline
        assert pipeline is not None
        try:
            for num_samples in (4, 4 - 2 * group.rank):
                targets = torch.zeros(num_samples, dtype=torch.int64)
                pipeline.run(torch.ones(num_samples, 3), targets, sum_of_losses)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def make_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def test_other_shapes_on_one_rank_are_told_as_such_on_all() -> None:
    first, last = (rank.value for rank in run_processes(2, take_other_shapes, timeout_s=50))
    assert last.startswith("MismatchError: every rank of a pipeline must get inputs of the same shapes and dtypes")
    assert first == f"{last} (said by rank 1)"


HOOKED = {"kept": "2", "former": "", "of others": "012", "detached": "012"}
"""Layers of four whose outputs a user's hooks keep; all but the last are on the first rank for the last two."""


def use_what_was_kept(kind: str) -> str:
    """Return what each rank says of a loss of parameters from before the layout, or of what hooks on layers keep."""
    with join() as group:
        model, kept = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), {}
        former = list(model.parameters())

        def keep(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
            kept[layer] = output.detach() if kind == "detached" else output

        for name in HOOKED[kind]:
            model[int(name)].register_forward_hook(keep)
        used = former if kind == "former" else kept.values()

        def measure(output: torch.Tensor, data: Any) -> torch.Tensor:
            return output.sum() + sum(one.square().sum() for one in used)

        settings = PipelineSettings(cuts=("2",) if kind in ("kept", "former") else ("3",))
        try:
            part = parallelize(model, Layout(pipeline=2), group=group, sample=torch.ones(1, 3), pipeline=settings)
            pipeline = find_shard(part, group).pipeline
            assert pipeline is not None
            pipeline.run(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), measure)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("kept", "it misses what other stages keep, but it uses values that were made with 2."),
        ("of others", "hooks of a model run as a pipeline must keep no activations .* but one on 0 keeps its output"),
        pytest.param("detached", "", marks=pytest.mark.slow),
        pytest.param("former", ".bias as it was before, which pipeline.2. has", marks=pytest.mark.slow),
    ],
)
def test_a_loss_of_what_stages_keep_is_refused_by_name(kind: str, said: str) -> None:
    first, last = (rank.value for rank in run_processes(2, use_what_was_kept, {"kind": kind}, timeout_s=50))
    assert last.startswith("SettingsError: " if said else "")
    assert re.search(said, last)
    assert first == (last if kind in ("of others", "detached") else f"{last} (said by rank 1)")
    assert said or not last
