"""A server's part of the parameters, and the update that applies pushes to it."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock, copy_all
from paceline.sync.parameter_server.clocks import Clocks
from paceline.sync.used import Ranges, add_range


@dataclass
class Push:
    """A worker's push.

    Args:
        worker: Rank of the worker.
        clock: Number of its steps before.
        version: Version of the parameters that the push was computed from.
        weight: Number of its samples, or tokens; 0 if there were none, and then there are no values.
        unit: Divisor of values, which are a sum over samples divided by it.
        rates: Learning rates, by parameter group.
        used: Whether each block had a gradient.
        values: Gradients or updates, by block.
        known: Parameters that the push was computed from, by block, if the update needs them.
        start: First position of its samples; number of the step, if all workers step together.
        stop: End of them.
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
    start: int = 0
    stop: int = 0


class ServerUpdate(ABC):
    """The update that applies pushes on one server; one thread at a time calls it.

    Attributes:
        clocks: Clocks that decide which workers wait.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    @abstractmethod
    def push(self, shard: "Shard", push: Push) -> bool:
        """Process a push of a worker that takes part, and return whether it counts."""

    def settle(self, shard: "Shard") -> None:
        """Do everything that became due when a worker's clock moved, or it left."""

    def finish(self, shard: "Shard") -> None:
        """Apply what arrived and waits for more, since no more will come."""

    def lose(self, worker: int) -> None:
        """Take note of a worker that is lost, before its clock is removed."""

    def state(self, shard: "Shard") -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return its state: tensors by ``<kind>/<block>``, and numbers."""
        return {}, {}

    def load_state(self, shard: "Shard", tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Load a state; any of it may be missing, and there may be other tensors."""


class Shard:
    """A server's parameters, and an optimizer of them with the settings of the workers' optimizers.

    Args:
        blocks: Blocks of the server.
        parameters: All parameters, by name.
        optimizer: A worker's optimizer; it does not change.
    """

    def __init__(
        self, blocks: Sequence[ParameterBlock], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.blocks = list(blocks)
        self.values = PackedTensors(blocks)
        self.version = 0
        """Number of updates done."""
        self.delays: Counter[int] = Counter()
        """Number of pushes by delay: the number of others' updates between their pull and them."""
        self.num_dropped = 0
        """Number of pushes that came too late for their step."""
        self.used: Ranges = []
        """Work that the parameters have: positions of samples, or numbers of steps if all workers step together."""
        with torch.no_grad():
            copy_all(self.values.tensors, [block.of(parameters[block.parameter]) for block in blocks])
        self.parameters = [nn.Parameter(tensor) for tensor in self.values.tensors]
        by_original: dict[int, list[nn.Parameter]] = {}
        for block, parameter in zip(blocks, self.parameters, strict=True):
            by_original.setdefault(id(parameters[block.parameter]), []).append(parameter)
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        # The copy refers to the same parameters, so that they are not copied with it.
        self.optimizer = copy.deepcopy(optimizer, {id(p): p for p in originals})
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = [mine for p in group["params"] for mine in by_original.get(id(p), [])]
            if "capturable" in group:
                group["capturable"] = False  # for GPUs only; these are in host memory

    def note_used(self, push: Push) -> None:
        """Record that a push has been applied, or is certain to be."""
        self.used = add_range(self.used, push.start, push.stop)

    def step(self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float]) -> None:
        """Take a step of the optimizer."""
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
        """Load a state; the optimizer's state of a block may be missing."""
        self.optimizer.state.clear()
        for block, parameter in zip(self.blocks, self.parameters, strict=True):
            with torch.no_grad():
                parameter.copy_(tensors[f"parameter/{block.name}"])
            prefix = f"optimizer/{block.name}/"
            kept = {name.removeprefix(prefix): t.clone() for name, t in tensors.items() if name.startswith(prefix)}
            if kept or block.name in scalars:
                self.optimizer.state[parameter] = {**kept, **scalars.get(block.name, {})}
