"""Virtual workers of a replica: training that is bit for bit the same on any number of workers.

A global batch is cut into a fixed number of parts, one per virtual worker, each with a forward and backward pass and
random numbers of its own (`Loader`). Losses, weights, gradients and changed buffers are summed over virtual workers
along one fixed tree (`SummationTree`), so that it does not matter on which worker each of them is: the idea of
EasyScale (Li et al. 2023, arXiv:2208.14228), with a tree whose blocks workers add up before they send them.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import GradientError, SettingsError
from paceline.parallel.batch_norm import BatchNormScope
from paceline.parallel.model_shard import ModelShard
from paceline.programs.summation_tree import SummationTree, TreeSum
from paceline.registry import check_whole
from paceline.replica.landing import Landing
from paceline.replica.step_buffers import StepBuffers
from paceline.replica.step_scalars import StepTotals
from paceline.sync.every_step import EveryStep
from paceline.sync.reducer import GradientReducer
from paceline.sync.rule import Rule
from paceline.sync.tree_reducer import TreeReducer
from paceline.topology.layout import Layout


def check_virtual_workers(
    num_virtual_workers: int | None, rule: Rule, layout: Layout, landing: Landing, batch_norm: BatchNormScope
) -> None:
    """Raise `SettingsError` for settings whose result would depend on the number of workers."""
    if num_virtual_workers is None:
        return
    check_whole("num_virtual_workers", num_virtual_workers, 1)
    found = ""
    if not isinstance(rule, EveryStep):
        found = f"sync {rule.name}, whose workers train models of their own; take every_step"
    elif rule.codec.name != "none" or rule.codec_of == "step":
        found = f"codec {rule.codec.name}, which rounds what each worker sends; leave it out"
    elif rule.program is not None:
        found = f"program {rule.program.name}, which sums in its own order; leave it out"
    elif not layout.is_plain:
        found = f"{layout}; take a layout of data alone"
    elif landing != "update":
        found = f"landing {landing}; take update"
    elif batch_norm != "local":
        found = f"batch_norm {batch_norm}; take local, which is each virtual worker's own"
    if found:
        raise SettingsError(
            f"num_virtual_workers must come with settings that sum plain gradients of whole models at every step, but "
            f"got {found}, or leave num_virtual_workers out"
        )


def describe_exactness(
    num_virtual_workers: int | None, rule: Rule, shard: ModelShard, landing: Landing, batch_norm: BatchNormScope
) -> dict[str, object]:
    """Return, by name, what must be equal on all ranks for the same bits; empty without virtual workers.

    Raises:
        SettingsError: The result would depend on the number of workers.
    """
    if num_virtual_workers is None:
        return {}
    check_virtual_workers(num_virtual_workers, rule, shard.layout, landing, batch_norm)
    return {"num_virtual_workers": num_virtual_workers, **_describe_arithmetic(shard.group.device)}


def _describe_arithmetic(device: torch.device) -> dict[str, object]:
    """Return what rounding depends on, besides the operations themselves."""
    on_gpu = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    return {"num_threads": torch.get_num_threads(), "torch": torch.__version__, "processor": processor}


class VirtualWorkers:
    """This worker's virtual workers: one `backward` each, in a step.

    Args:
        number: Number of virtual workers of all workers.
        module: The model.
        group: The workers.

    Raises:
        SettingsError: There are fewer virtual workers than workers, or a GPU may compute in changing order.
    """

    def __init__(self, number: int, module: nn.Module, group: Group) -> None:
        self._tree, self._group = SummationTree(number, group.size), group
        self._mine = self._tree.terms_of(group.rank)
        self._scalars: list[tuple[float, Tensor]] = []
        self._changed: list[bool] = []
        self._buffers = StepBuffers(module, self._tree, group)
        if group.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            raise SettingsError(
                "GPUs must compute in a fixed order with num_virtual_workers, but deterministic algorithms are off; "
                "call torch.use_deterministic_algorithms(True), and start with CUBLAS_WORKSPACE_CONFIG=:4096:8"
            )

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return the reducer of their gradients."""
        return TreeReducer(group, self._tree)

    def begin_forward(self) -> None:
        """Note the buffers that all virtual workers of a step begin with, in its first forward."""
        if not self._scalars:
            self._buffers.begin()

    def note(self, weight: float, loss: Tensor, *, last: bool) -> None:
        """Note weight and loss times weight of the next virtual worker.

        Raises:
            GradientError: There are more or fewer calls in this step than virtual workers of this worker.
        """
        self._scalars.append((weight, loss))
        if last != (len(self._scalars) == len(self._mine)):
            number, self._scalars = len(self._scalars), []
            raise GradientError(
                f"backward must be called once for each virtual worker, with last=True for the last, but rank "
                f"{self._group.rank} has {len(self._mine)} of {self._tree.num_terms}, and got last={last} in call "
                f"{number} of a step; iterate over a Loader with num_virtual_workers={self._tree.num_terms}, pass "
                "last=batch.last, and call update only after the last"
            )

    def unit_of(self, weight: float) -> float:
        """Return this worker's part of the first weight unit, given the first `weight` of its own."""
        return weight * self._tree.num_terms if self._group.rank == 0 else 0.0

    def measured(self) -> Tensor:
        """Return weights and losses of all virtual workers, 0 for those of others, and which buffers have changed."""
        values = torch.zeros(2, self._tree.num_terms, dtype=torch.float64, device=self._group.device)
        for number, (weight, loss) in zip(self._mine, self._scalars, strict=True):
            values[0, number], values[1, number] = weight, loss
        return torch.cat([values.flatten(), self._buffers.changed().to(values)])

    def sum_totals(self, totals: StepTotals) -> StepTotals:
        """Return the totals of all workers with weight and loss in the order of the tree."""
        number = self._tree.num_terms
        self._changed = [bool(flag) for flag in totals.measured[2 * number :]]
        weight, loss = (_add_up(totals.measured[begin : begin + number]) for begin in (0, number))
        return replace(totals, weight=weight, weight_since_sync=weight, loss=loss)

    def end_backward(self) -> None:
        """Take the buffers of the virtual worker whose backward has ended; the next begins with those before."""
        self._buffers.take()

    def end_step(self) -> None:
        """Give all workers the step's buffers, which are means over virtual workers."""
        self._buffers.exchange(self._changed)
        self._scalars = []

    def roll_back(self) -> None:
        """Drop a step that has failed."""
        self._buffers.drop()
        self._scalars = []

    def document(self) -> dict[str, object]:
        """Return, as JSON, what a run that goes on must have in common with this one."""
        return {"num_virtual_workers": self._tree.num_terms, **_describe_arithmetic(self._group.device)}

    def check_saved(self, saved: Mapping[str, Any] | None) -> None:
        """Refuse to go on with other arithmetic than that of the run so far.

        Raises:
            SettingsError: Results would differ from those of the uninterrupted run.
        """
        here = self.document()
        if not saved or saved["num_virtual_workers"] != here["num_virtual_workers"]:
            return  # the user's own change of settings
        for name, before in saved.items():
            if before != here[name]:
                raise SettingsError(
                    f"{name} must be that of the checkpoint with num_virtual_workers, or sums are rounded otherwise, "
                    f"but got {here[name]} instead of {before}; go on with the same, or without num_virtual_workers"
                )


def _add_up(values: Sequence[float]) -> float:
    total: TreeSum[float] = TreeSum(operator.add)
    for value in values:
        total.push(value)
    return total.total()
