"""A server's part of the parameters, and what becomes of pushes to it."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock, copy_all
from paceline.sync.parameter_server.clocks import Clocks


@dataclass
class Push:
    """What a worker pushed.

    Args:
        worker: Who.
        clock: Its steps before.
        version: Of the parameters that it was made from.
        weight: Number of its samples, or tokens; 0 if there were none, and then there are no values.
        unit: What values are counted in: they are a sum over samples, divided by it.
        rates: Learning rates, by parameter group.
        used: Whether each block had a gradient.
        values: By block.
        known: The parameters that it was made from, by block, where the update needs them.
    """

    worker: int
    clock: int
    version: int
    weight: float
    unit: float
    rates: Sequence[float]
    used: Sequence[bool]
    values: Sequence[Tensor]
    known: Sequence[Tensor] = ()


class ServerUpdate(ABC):
    """What becomes of pushes on one server; called by one thread at a time.

    Attributes:
        clocks: Who waits for whom.
        needs_known: Whether pushes must tell the parameters that they were made from.
    """

    needs_known: bool = False

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    @abstractmethod
    def push(self, shard: "Shard", push: Push) -> bool:
        """Take in a push of a worker that takes part, and return whether it counts."""

    def settle(self, shard: "Shard") -> None:
        """Do what has become due since a worker's clock moved, or it left."""

    def state(self, shard: "Shard") -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return what it keeps: tensors by ``<kind>/<block>``, and numbers."""
        return {}, {}

    def load_state(self, shard: "Shard", tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Take on what was kept; any of it may be missing, and there may be other tensors."""


class Shard:
    """A server's parameters, and an optimizer of them with the settings of the workers' own.

    Args:
        blocks: What of the parameters it holds.
        parameters: All of them, by name.
        optimizer: A worker's; it is left as it is.
    """

    def __init__(
        self, blocks: Sequence[ParameterBlock], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.blocks = list(blocks)
        self.values = PackedTensors(blocks)
        self.version = 0
        """Updates that were made."""
        self.delays: Counter[int] = Counter()
        """Pushes by how many updates of others came between their pull and them."""
        self.num_dropped = 0
        """Pushes that came too late for their step."""
        with torch.no_grad():
            copy_all(self.values.tensors, [block.of(parameters[block.parameter]) for block in blocks])
        self.parameters = [nn.Parameter(tensor) for tensor in self.values.tensors]
        by_original: dict[int, list[nn.Parameter]] = {}
        for block, parameter in zip(blocks, self.parameters, strict=True):
            by_original.setdefault(id(parameters[block.parameter]), []).append(parameter)
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        # The parameters stand for themselves in the copy, so that they are not copied with it.
        self.optimizer = copy.deepcopy(optimizer, {id(p): p for p in originals})
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = [mine for p in group["params"] for mine in by_original.get(id(p), [])]
            if "capturable" in group:
                group["capturable"] = False  # that is for GPUs; these lie in host memory

    def step(self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float]) -> None:
        """Let the optimizer take a step."""
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.version += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
        """Return the tensors by ``parameter/<block>`` and ``optimizer/<block>/<key>``; and other state by block."""
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, dict[str, object]] = {}
        for block, parameter in zip(self.blocks, self.parameters, strict=True):
            tensors[f"parameter/{block.name}"] = parameter.detach()
            for key, kept in self.optimizer.state.get(parameter, {}).items():
                if isinstance(kept, Tensor):
                    tensors[f"optimizer/{block.name}/{key}"] = kept
                else:
                    scalars.setdefault(block.name, {})[key] = kept
        return tensors, scalars

    def load_state(self, tensors: dict[str, Tensor], scalars: dict[str, dict[str, object]]) -> None:
        """Take on a state: that of a block may be missing from the optimizer's."""
        self.optimizer.state.clear()
        for block, parameter in zip(self.blocks, self.parameters, strict=True):
            with torch.no_grad():
                parameter.copy_(tensors[f"parameter/{block.name}"])
            prefix = f"optimizer/{block.name}/"
            kept = {name.removeprefix(prefix): t.clone() for name, t in tensors.items() if name.startswith(prefix)}
            if kept or block.name in scalars:
                self.optimizer.state[parameter] = {**kept, **scalars.get(block.name, {})}
