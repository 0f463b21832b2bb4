"""Blocks whose parameters others read, or that only some samples use, are gathered with the root."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.local_group import LocalGroup
from paceline.parallel.block_use import agree_on_blocks
from paceline.parallel.mesh import Mesh
from paceline.topology.layout import Layout


class Net(nn.Module):
    """Blocks that run one after the other, and what a subclass does beside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for other in self.others:
            x = other(x) if other.weight.dtype == x.dtype else x
        return x


class Reads(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.blocks[1].weight


class Parts(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.others[0].weight, self.others[2].bias)


class Routes(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.others[int(x.argmax()) % 3](x)


class Chooses(Net):
    """Other blocks by a question, whose answer no sample of ones changes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = x if x.isnan().any() else self.blocks[2](x)
        for other in self.others:
            x = other(x)
        return x


class Repeats(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if (x.sum() > 1e6).item() is True else 1):
            x = self.others[0](x)
        return x


class Masks(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        chosen = x[x.argmax(-1) < 9]
        for other in self.others:
            chosen = other(chosen) if len(chosen) else chosen
        return chosen


class Raises(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("NaN")
        return super().forward(x)


class Fails(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no sample")


class Exits(nn.Linear):
    """Block that says whether to go on, or only asks that for itself."""

    def __init__(self, tells: bool) -> None:
        super().__init__(4, 4)
        self.tells = tells

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        is_done = bool(x.isnan().any())
        return (x, is_done) if self.tells else (x + 1 if is_done else x)


class LeavesEarly(Net):
    """Blocks of which one says whether the others run: none says so on a sample of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Exits(True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x)
        for block in self.blocks:
            x, is_done = block(x)
            if is_done:
                break
        return x


class AsksInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Exits(False) for _ in range(3))


class Counts(Net):
    """The number of bins is the greatest of the numbers, plus 1."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for other in self.others[: len(torch.bincount(x.argmax(-1), minlength=3))]:
            x = other(x)
        return x


class Contains(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for number, other in enumerate(self.others):
            x = x if number + 7 in x.argmax(-1) else other(x)
        return x


class Formats(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for other in self.others:
            x = other(x) if f"{x.sum() > 1e6}" == "False" else x
        return x


BLOCKS, OTHERS = ([f"{name}.{i}" for i in range(3)] for name in ("blocks", "others"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Net, BLOCKS + OTHERS),
        (Reads, ["blocks.0", "blocks.2", *OTHERS]),
        (Parts, [*BLOCKS, "others.1"]),
        (Routes, BLOCKS),
        (Chooses, OTHERS),
        (Repeats, []),
        (Masks, BLOCKS),
        (Raises, BLOCKS + OTHERS),
        (Fails, BLOCKS + OTHERS),
    ],
)
def test_blocks_that_are_gathered_by_themselves(kind: type[Net], found: list[str], device: str) -> None:
    mesh = Mesh(LocalGroup(), Layout().resolve(1))
    module = kind().to(device)
    says = kind is Masks or (kind in (Repeats, Routes) and device == "meta")
    with pytest.warns(UserWarning, match="numbers of its tensors") if says else nullcontext():
        assert agree_on_blocks(module, torch.ones(1, 4, device=device), mesh)[0] == found
    assert agree_on_blocks(module, None, mesh)[0] == BLOCKS + OTHERS
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize(
    ("kind", "found", "says"),
    [
        (LeavesEarly, OTHERS, True),
        (AsksInside, BLOCKS + OTHERS, False),
        (Counts, BLOCKS, True),
        (Contains, BLOCKS, True),
        (Formats, BLOCKS, True),
    ],
)
def test_what_blocks_hand_out_and_other_reads_choose_blocks(kind: type[Net], found: list[str], says: bool) -> None:
    mesh = Mesh(LocalGroup(), Layout().resolve(1))
    with pytest.warns(UserWarning, match="numbers of its tensors") if says else nullcontext():
        assert agree_on_blocks(kind(), torch.ones(1, 4), mesh)[0] == found
