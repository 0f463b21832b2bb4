"""A codec inside the sharded axis: exact where it loses nothing, and losing nothing for good where it does."""

import math
from typing import Any

import pytest
import torch
from torch import Size, Tensor, nn

from paceline.comm import LocalGroup, join
from paceline.compression import Codec
from paceline.errors import SettingsError
from paceline.parallel.fully_sharded import shard_module
from paceline.parallel.local import local
from paceline.parallel.mesh import Mesh
from paceline.parallel.reduce_scatter import CodedReduceScatter
from paceline.registry import list_variants
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

NUM_STEPS = 3


class Model(nn.Module):
    """Rows that three ranks cannot share evenly, a vector of one element, and parameters after those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(5, 35), nn.Tanh(), nn.Linear(35, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.frozen(x)).square().sum() * self.scale.sum()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def make_codec(name: str, **settings: Any) -> Codec:
    return list_variants(Codec)[name](dense_below=0, **settings)


def inputs_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(module: nn.Module, step: int, rank: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Return the whole gradients of a step, and take them off the module."""
    (module(inputs_of(step, rank)) * factor).backward()
    gradients = {n: p.grad.full_tensor().double() for n, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    return gradients


def exact_gradients(step: int, num_ranks: int) -> dict[str, Tensor]:
    module = make_model().double()
    for rank in range(num_ranks):
        module(inputs_of(step, rank).double()).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def held_back(coded: CodedReduceScatter, module: nn.Module, world: Any) -> dict[str, Tensor]:
    """Return what all ranks have not sent of each gradient."""
    saved = world.gather_documents({k: t.flatten().tolist() for k, t in coded.state().items()}, name="state")
    mine = {n: list(local(p).shape) for n, p in module.named_parameters() if p.requires_grad}
    shapes = world.gather_documents(mine, name="shapes")
    total = {}
    for name in mine:
        parts = []
        for rank, theirs in enumerate(shapes):
            prefix = f"{name}/{rank}/"
            states = [
                {k.removeprefix(prefix): torch.tensor(v) for k, v in state.items() if k.startswith(prefix)}
                for state in saved
            ]
            shape = Size(theirs[name])
            kept = [coded.codec.held_back([state], shape) for state in states if state]
            parts.append(sum((tensor for tensor in kept if tensor is not None), torch.zeros(shape)))
        total[name] = torch.cat(parts).double()
    return total


def lossless_codecs_are_exact(world: Any, mesh: Mesh) -> None:
    for codec in (make_codec("top_k", density=1.0), list_variants(Codec)["int8"](dense_below=10**6)):
        module = shard_module(make_model(), mesh)
        coded = CodedReduceScatter(module, mesh, codec)
        for step in range(2):
            coded.arm(lambda: 3.0, step, 4.0)
            gradients, expected = backward(module, step, world.rank), exact_gradients(step, world.size)
            coded.commit()
            for name, gradient in gradients.items():
                # Sums of float32.
                assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4), (codec.name, name)
        assert not any(tensor.any() for tensor in coded.state().values())
        coded.close()


def feedback_loses_nothing(world: Any, mesh: Mesh) -> None:
    """All that arrived and all that is held back is all that there was, whatever it was divided by."""
    codecs = [make_codec("top_k", density=0.1), make_codec("int8")]
    for codec in [*codecs, make_codec("power_sgd", low_rank=1)]:
        module = shard_module(make_model(), mesh)
        coded = CodedReduceScatter(module, mesh, codec, seed=3)
        arrived = {n: torch.zeros(p.shape).double() for n, p in module.named_parameters() if p.requires_grad}
        given = {name: tensor.clone() for name, tensor in arrived.items()}
        for step in range(NUM_STEPS):
            divisor, loss_scale = 1.0 + step, 2.0**step
            coded.arm(lambda divisor=divisor: divisor, step, loss_scale)
            for number in (step, step + 50):  # two passes that sum, as when accumulating without `set_gradient_sync`
                gradients = backward(module, number, world.rank, loss_scale)
                for name, exact in exact_gradients(number, world.size).items():
                    arrived[name] += gradients[name] / divisor / loss_scale
                    given[name] += exact / divisor
            coded.commit()
        kept = held_back(coded, module, world)
        for name, total in given.items():
            # What is summed is float32.
            assert torch.allclose(arrived[name] + kept[name], total, rtol=1e-4, atol=1e-4), (codec.name, name)
        assert any(not torch.allclose(arrived[n], given[n], rtol=1e-3, atol=1e-3) for n in given), codec.name
        assert coded.residual_bytes == sum(tensor.nbytes for tensor in coded.state().values()) > 0
        if codec.name == "top_k":
            others = sum(p.numel() - local(p).numel() for p in module.parameters() if p.requires_grad)
            assert coded.residual_bytes == 4 * others
        coded.close()


def a_step_can_be_taken_back(world: Any, mesh: Mesh) -> None:
    """What was rolled back leaves no trace, and what was saved goes on bit for bit."""
    codec = make_codec("top_k", density=0.2)
    module = shard_module(make_model(), mesh)
    coded = CodedReduceScatter(module, mesh, codec)
    runs = []
    for has_failure in (False, True):
        coded.load_state({})
        steps = []
        for step in range(3):
            if has_failure:
                coded.arm(lambda: 1.0, step)
                backward(module, step + 7, world.rank)
                coded.roll_back()
            coded.arm(lambda: 1.0, step)
            steps.append(backward(module, step, world.rank))
            coded.commit()
        runs.append(steps)
    for step, (first, second) in enumerate(zip(*runs, strict=True)):
        assert all(torch.equal(first[name], second[name]) for name in first), step

    fresh = shard_module(make_model(), mesh)
    other = CodedReduceScatter(fresh, mesh, codec)
    other.load_state({name: tensor.clone() for name, tensor in coded.state().items()})
    for sums in (coded, other):
        sums.arm(lambda: 1.0, 3)
    ours, theirs = backward(module, 3, world.rank), backward(fresh, 3, world.rank)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other.load_state({})
    other.arm(lambda: 1.0, 3)
    assert not all(torch.equal(ours[n], g) for n, g in backward(fresh, 3, world.rank).items())
    coded.close()
    other.close()


def what_is_not_finite_is_seen(world: Any, mesh: Mesh) -> None:
    module = shard_module(make_model(), mesh)
    coded = CodedReduceScatter(module, mesh, make_codec("one_bit"))
    coded.arm(lambda: 1.0, 0)
    gradients = backward(module, 0, world.rank, math.inf if world.rank == 1 else 1.0)
    assert all(tensor.isnan().all() for tensor in gradients.values())
    assert coded.take_flags().tolist() == [float(world.rank == 1), 0.0]
    coded.roll_back()
    coded.arm(lambda: 1.0, 0)
    assert all(tensor.isfinite().all() for tensor in backward(module, 0, world.rank).values())
    coded.close()
    coded = CodedReduceScatter(shard_module(make_model(), mesh), mesh, make_codec("none"))
    coded.arm(lambda: 1.0, 0)
    block = next(iter(coded._blocks.values()))
    rows = torch.full((world.size, sum(block._padded)), torch.finfo(torch.float32).max / 2)
    coded.reduce(block, torch.empty(rows.shape[1]), rows)
    holds_any = any(shape.numel() for shape in block.parts[world.rank].values())
    assert coded.take_flags().tolist() == [0.0, float(holds_any)], "finite gradients whose sum is too large"
    assert coded.take_flags().tolist() == [0.0, 0.0]
    coded.close()


def the_price_is_what_is_sent(world: Any, mesh: Mesh) -> None:
    for codec in (make_codec("int8"), make_codec("top_k", density=0.05)):
        module = shard_module(make_model(), mesh)
        coded = CodedReduceScatter(module, mesh, codec)
        sent = []
        group = coded._group
        original = group.all_to_all

        def record(output: Tensor, rows: Tensor, *, name: str, original: Any = original, sent: Any = sent) -> Any:
            sent.append(rows[0].nbytes * (len(rows) - 1))
            return original(output, rows, name=name)

        group.all_to_all = record
        coded.arm(lambda: 1.0, 0)
        backward(module, 0, world.rank)
        assert sum(sent) == coded.wire_bytes
        dense = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad) * (world.size - 1) / world.size
        assert 0 < coded.wire_bytes < dense / 1.5, codec.name
        coded.close()


def check_on_three_ranks() -> None:
    world = join(timeout_s=58)
    mesh = Mesh(world, Layout(sharded=3).resolve(3))
    lossless_codecs_are_exact(world, mesh)
    feedback_loses_nothing(world, mesh)
    a_step_can_be_taken_back(world, mesh)
    what_is_not_finite_is_seen(world, mesh)
    the_price_is_what_is_sent(world, mesh)
    mesh.close()
    world.close()


def test_codecs_inside_the_sharded_axis() -> None:
    results = run_processes(3, check_on_three_ranks, timeout_s=55)

    check_exits(results)


def test_momentum_in_the_codec_is_refused() -> None:
    mesh = Mesh(LocalGroup(), Layout().resolve(1))
    with pytest.raises(SettingsError, match="must carry no momentum, but got dgc"):
        CodedReduceScatter(make_model(), mesh, list_variants(Codec)["dgc"]())
