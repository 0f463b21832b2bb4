"""Trials leave a model as it was, whatever its forward keeps: counters, statistics, lists."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.memory import find_recomputable, recompute
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.parallel.pipeline.traced import find_layers
from paceline.parallel.trial import restored, training
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

WIDTH = 8
TOKENS = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTW: Tensor) -> Tensor:
        query, key, value = self.joint(x_BTW).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTW = x_BTW + self.out(attended.transpose(1, 2).flatten(2))
        output: Tensor = x_BTW + self.down(F.gelu(self.up(x_BTW)))
        return output


class Counting(nn.Module):
    """A model whose temperature falls with the number of its forwards, which it keeps in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12)
        self.number = 0
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("added", torch.zeros(()))
        self.attribute = torch.zeros(())
        self.counts: Counter[str] = Counter()
        self.lengths: list[int] = []
        self.nested = {"tensor": torch.zeros(())}

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of each token."""
        self.number += 1
        self.assigned = self.assigned + 1
        self.added += 1
        self.attribute = self.attribute + 1
        self.counts["forwards"] += 1
        self.lengths.append(self.number)
        self.nested["tensor"] += 1
        self.last = "made in forward"
        if not self.training:
            self.embed.is_evaluated = True
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) / (1 + 0.5 * self.number) / (1 + 0.5 * self.assigned)  # type: ignore[no-any-return]


def describe(model: Any) -> dict[str, Any]:
    counts = dict(model.counts)
    tensors = [float(one) for one in (model.assigned, model.added, model.attribute, model.nested["tensor"])]
    made = [name for part in model.modules() for name in ("last", "is_evaluated") if name in vars(part)]
    return {"number": model.number, "lengths": list(model.lengths), "counts": counts, "of": tensors, "made": made}


def test_whatever_a_forward_keeps_is_what_it_was() -> None:
    model = Counting()
    model(TOKENS)
    before, seed = describe(model), torch.get_rng_state()
    for _ in range(2):
        with restored(model):
            model.eval()
            model(TOKENS)
            torch.rand(1)
            assert model.number == 2
        assert describe(model) == before
        assert model.training
        assert torch.equal(torch.get_rng_state(), seed)
    with pytest.raises(IndexError, match="index out of range"), restored(model):
        model(TOKENS + 12)
    assert describe(model) == before


class Hooking(nn.Module):
    """A model that hooks its parts in its first forward, and once removes the hook that counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_hooked = False
        self.once = self.register_forward_pre_hook(lambda *_: self.once.remove())
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return features; each hook notes what it has seen."""
        if not self.is_hooked:
            self.first.register_forward_pre_hook(lambda *_: self.seen.append("enter"))
            self.first.register_forward_hook(lambda *_: self.seen.append("leave"), with_kwargs=True)
            self.first.register_full_backward_pre_hook(lambda *_: self.seen.append("begin"))
            self.first.register_full_backward_hook(lambda *_: self.seen.append("end"))
            self.first.weight.register_hook(lambda _: self.seen.append("gradient"))
            self.first.weight.register_post_accumulate_grad_hook(lambda _: self.seen.append("sum"))
            self.is_hooked = True
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_hooks_that_a_trial_installs_or_removes_are_installed_and_removed_again() -> None:
    model, x = Hooking(), torch.randn(2, WIDTH, requires_grad=True)
    model.last.weight.register_hook(lambda _: model.seen.append("held"))
    for _ in range(2):
        with restored(model):
            model(x).sum().backward()
        assert model.seen == []
        assert not model.first._forward_hooks
    assert len(model._forward_pre_hooks) == 1
    model(x).sum().backward()
    assert sorted(model.seen) == sorted(["enter", "leave", "begin", "end", "gradient", "sum", "held"])
    assert not model._forward_pre_hooks


class Collecting(Counting):
    """A model whose first forward installs hooks that collect what its blocks return, as those of transformers do."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.is_hooked, self.collected = part, False, []

    def forward(self, tokens: Tensor) -> Any:
        """Return scores, and what the blocks' parts have returned."""
        if not self.is_hooked:
            for block in self.blocks:
                block.get_submodule(self.part).register_forward_hook(lambda *args: self.collected.append(args[-1]))
            self.is_hooked = True
        self.collected.clear()
        return super().forward(tokens), list(self.collected)


def split_counting() -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    with join() as group:
        for axis in ("tensor", "pipeline"):
            torch.manual_seed(0)
            model = parallelize(Counting(), Layout(**{axis: 2}), group=group, sample=TOKENS)
            found[axis] = [model.number, list(model.lengths), dict(model.counts), float(model.nested["tensor"])]
            find_shard(model, group).close()
        for part, axis in (("", "tensor"), ("up", "tensor"), ("", "pipeline")):
            try:
                model = parallelize(Collecting(part), Layout(**{axis: 2}), group=group, sample=TOKENS)
                found[f"{part} {axis}"] = len(model(TOKENS)[1])
                find_shard(model, group).close()
            except SettingsError as error:
                found[f"{part} {axis}"] = str(error)
    return found


def test_layouts_leave_counters_and_hooks_as_they_were_and_compare_from_the_same_ones() -> None:
    results = run_processes(2, split_counting)
    check_exits(results)
    for result in results:
        found = result.value
        assert "returns a tensor of the shape (2, 8, 16), a rank's part of one of (2, 8, 32)" in found.pop("up tensor")
        assert "returns 3 tensors, of which the last stage has " in found.pop(" pipeline")
        assert found == {" tensor": 2} | {axis: [0, [], {}, 0.0] for axis in ("tensor", "pipeline")}


class Dropper(nn.Module):
    """A model whose blocks drop, by a module and by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_backward_computes_again_drop_nothing_in_a_trial() -> None:
    """Torch runs backward without the mode in which nothing is dropped."""
    found = []
    for names in ([], ["blocks.0", "blocks.2"]):
        torch.manual_seed(0)
        module = Dropper()
        recompute(module, dict.fromkeys(names, "full"))
        with training(module):
            module(torch.ones(2, 3, 8)).square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_models_that_drop_are_cut_with_recomputed_blocks() -> None:
    module = Dropper()
    recompute(module, dict.fromkeys(find_recomputable(module), "full"))
    layers = find_layers(module, (), torch.randn(1, 3, 8))
    assert [layer.name for layer in layers] == ["blocks.0", "blocks.1", "blocks.2"]
