"""An optimizer that ranks share does what the user's own does: its attributes, its hooks, its class's step."""

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from paceline.comm import LocalGroup, join
from paceline.errors import SettingsError
from paceline.parallel.local import local, wrap
from paceline.parallel.mesh import Mesh
from paceline.parallel.zero_redundancy import DividedOptimizer, local_optimizer, shard_optimizer
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Axes, Layout

SHAPES = [(5, 3), (4,), (2, 6)]
NUM_STEPS = 3


class Momentum(torch.optim.Optimizer):
    """SGD with momentum in an attribute, not in groups."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = self.state[parameter].setdefault("sums", torch.zeros_like(parameter))
                sums.mul_(self.rho).add_(parameter.grad)
                parameter.add_(sums, alpha=-group["lr"])


class Fading(Momentum):
    """Momentum that a step changes, which then calls its base class's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        self.rho *= 0.5
        super().step()


def train(kind: type[Momentum], mesh: Mesh | None, *, are_dtensors: bool) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    if mesh is not None and are_dtensors:
        wholes = [distribute_tensor(one.detach(), mesh.device_mesh["sharded"], [Replicate()]) for one in parameters]
        parameters = [nn.Parameter(whole) for whole in wholes]
    Momentum([nn.Parameter(torch.zeros(1))])  # torch lets the steps of a class run hooks once one has been made
    given = kind(parameters, rho=0.2)
    given.rho += 0.1
    torch.optim.lr_scheduler.ConstantLR(given)  # it counts steps by one that it puts in the place of the class's
    stepped = given if mesh is None else shard_optimizer(given, mesh)
    assert mesh is None or isinstance(stepped, DividedOptimizer) == are_dtensors
    seen: list[Any] = []

    def clip(optimizer: Any, *_: Any) -> None:
        seen.append(optimizer)
        gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        for one in gradients:
            one.mul_(0.5 / norm)

    def bound(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local(parameter.detach()).clamp_(-1, 1)

    given.register_step_pre_hook(clip)
    given.register_step_post_hook(bound)
    for number in range(NUM_STEPS):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = wrap(parameter, gradient) if isinstance(parameter, DTensor) else gradient
        if number == 2:
            given.rho += 0.4
            given.state.clear()
        stepped.step()
    assert {*map(id, seen)} == {id(given)}  # several times a step, where torch does that
    held = sum(len(group["params"]) for group in local_optimizer(stepped).param_groups)
    assert held == len(SHAPES) or mesh is not None
    return [number for parameter in parameters for number in local(parameter).flatten().tolist()] + [given.rho]


def compare_on_ranks() -> list[float]:
    world = join()
    mesh = Mesh(world, Layout(sharded=2, zero_stage=1).resolve(2))
    gaps = []
    for kind in (Momentum, Fading):
        alone = train(kind, None, are_dtensors=False)
        for are_dtensors in (False, True):
            pairs = zip(train(kind, mesh, are_dtensors=are_dtensors), alone, strict=True)
            gaps.append(max(abs(one - other) for one, other in pairs))
    mesh.close()
    world.close()
    return gaps


def test_attributes_and_hooks_are_those_of_the_optimizer_that_was_given() -> None:
    results = run_processes(2, compare_on_ranks, timeout_s=50)
    check_exits(results)
    for result in results:
        assert max(result.value) < 1e-14  # norms are summed in another order


def test_a_step_that_is_not_its_classs_is_refused() -> None:
    mesh = Mesh(LocalGroup(), Axes((1, 1, 2, 1, 1, 1)))
    optimizer = Momentum([nn.Parameter(torch.zeros(1))])
    optimizer.step = types.MethodType(lambda self: None, optimizer)  # type: ignore[method-assign]
    with pytest.raises(SettingsError, match="must be its class's, but this Momentum has one of its own"):
        shard_optimizer(optimizer, mesh)
