"""SCAFFOLD: local SGD whose workers correct their gradients for the difference of their data from the others'."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Size, Tensor

from paceline.registry import register
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.periodic import ErrorFeedback, PeriodicRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext


@register("scaffold")
class Scaffold(PeriodicRule):
    """Stochastic controlled averaging (SCAFFOLD; Karimireddy et al. 2020, arXiv:1910.06378).

    Each worker steps by g_i - c_i + c. At the end of a period c_i becomes the mean of the worker's gradients g_i in it,
    c the mean of all c_i, and parameters their mean, all by the weight of the samples used. If
    workers' data differ, local_sgd with a constant learning rate ends beside the optimum, and this does not. The first
    period is that of local_sgd; so are all if data do not differ. With a period of 1 and SGD it is every_step while
    weights stay the same.

    On the wire are two all-reduces of the parameters' size a period, each with the codec. It holds six copies of the
    parameters. Clipping bounds each worker's own gradient, before the correction, which is not clipped. With plain SGD
    c_i is that of the paper's option II, (x - y_i) / (steps * learning rate) - c + c_i; written as a mean of gradients
    it does not depend on the optimizer or its rate. Weights are those of one period, where the paper samples workers
    that count equally; its outer learning rate is 1 here. If workers are lost, c becomes the mean of those c_i that are
    left, so that corrections still add up to 0.
    """

    @property
    def reads_gradients(self) -> bool:
        """Always true: control variates correct them."""
        return True

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser that corrects and averages; None for a worker alone."""
        return ScaffoldSynchroniser(context, self) if context.group.size > 1 else None

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Two all-reduces a period: parameters and control variates."""
        return super().traffic(shapes, num_workers) * 2


class ScaffoldSynchroniser(Synchroniser):
    """Averages parameters and control variates at sync steps, and corrects gradients in between.

    Args:
        context: The worker's model, optimizer and group.
        rule: The settings.
    """

    def __init__(self, context: WorkerContext, rule: Scaffold) -> None:
        self._context = context
        self._averaging = PeriodicSynchroniser(context, rule, SyncSchedule(rule.period))
        self._reducer = rule.start_difference_reducer(context.group, context.seed + 1)
        self._feedback = ErrorFeedback(self._reducer, rule.codec, context, kind="feedback of variates")
        self._own = {name: torch.zeros_like(parameter) for name, parameter in context.parameters.items()}
        """Control variates of this worker."""
        self._own_weight = 0.0
        """Weight of the samples that they are of; 0 for variates that are not this worker's own."""
        self._sums = {name: torch.zeros_like(parameter) for name, parameter in context.parameters.items()}
        """Sums of the gradients of the period, each times the weight of its samples."""
        self._common = OuterParameters("variates", self._sums, context.group, self._reducer)
        self._sum_weight = 0.0
        self._weight = 0.0
        self._is_exchanging = False
        """Whether the exchange of control variates has begun."""

    def is_sync_step(self, number: int) -> bool:
        """Return whether the step is the last of a period."""
        return self._averaging.is_sync_step(number)

    def before_update(self, step: LocalStep) -> None:
        """Add the gradients to the period's sums, and correct them."""
        self._averaging.before_update(step)
        weight, self._weight = step.weight - self._weight, step.weight
        if not weight:
            return
        gradients = {name: p.grad for name, p in self._context.parameters.items() if p.grad is not None}
        # fp16 overflows now and then; the optimizer skips such a step.
        if all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            self._sum_weight += weight
            for name, gradient in gradients.items():
                self._sums[name].add_(gradient, alpha=weight)
        for name, parameter in self._context.parameters.items():
            correction = self._common.tensors[name].to(parameter.dtype) - self._own[name]
            if parameter.grad is not None:
                parameter.grad.add_(correction)
            elif bool(correction.any()):  # others use it
                parameter.grad = correction

    def after_update(self, step: LocalStep) -> SyncResult:
        """Exchange, and apply the means, at the end of a period."""
        result = self._averaging.after_update(step)
        if not self.is_sync_step(step.number):
            return result
        self._weight = 0.0
        if not step.total_weight:
            return result
        self._renew_own(step.weight)
        self._is_exchanging = True
        for name, total in self._sums.items():
            total.copy_(self._own[name])
        self._common.send(step.weight, step.total_weight, step.number)
        waited_s = self._common.receive()
        self._common.apply()
        self._begin_period()
        return SyncResult(result.waited_s + waited_s, result.wire_bytes + self._common.wire_bytes)

    def abandon(self) -> Abandoned:
        """Drop the exchange; once parameters are exchanged, the common variates come from `repair`."""
        outcome = self._averaging.abandon()
        if self._is_exchanging:
            self._common.abandon()
            outcome = Abandoned.DONE
        elif outcome is Abandoned.DONE:
            self._renew_own(self._weight)
        if outcome is Abandoned.DONE:
            self._weight = 0.0
            self._begin_period()
        return outcome

    def repair(self, *, is_new: bool) -> str:
        """Make the common variates the mean of the workers' own ones, by weight, so that corrections add up to 0.

        A worker without a period of its own, new at this change or at one before, takes the mean for its own: its
        correction is 0.
        """
        if is_new:
            self._own_weight = 0.0
        weight = self._own_weight
        total = torch.tensor([weight], dtype=torch.float64, device=self._context.group.device)
        self._context.group.all_reduce(total, name="weight of variates").wait()
        for name, common in self._common.tensors.items():
            if float(total):
                mean = (self._own[name] * (weight / float(total))).to(common.dtype)
                self._context.group.all_reduce(mean, name=f"variates of {name}").wait()
                common.copy_(mean)
            if not weight:
                self._own[name].copy_(common)
        return "the common control variate is the mean of the workers' own" if float(total) else ""

    def last_exchange(self, number: int) -> int:
        """Return the end of the period before."""
        return self._averaging.last_exchange(number)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the workers' mean, by the samples used since the last sync step."""
        with self._averaging.consensus():
            yield

    def shared_state(self) -> dict[str, Tensor]:
        """Return the common state of the workers: parameters and control variates."""
        return self._averaging.shared_state() | self._common.state()

    def state(self) -> dict[str, Tensor]:
        """Return this worker's control variates, the sums of the period, and the codecs' residuals."""
        return self._averaging.state() | self._feedback.state() | self._variates()

    def detached_state(self) -> dict[str, Tensor]:
        """Return the same; of the residuals those that this worker holds, as a worker and for others."""
        return self._averaging.detached_state() | self._feedback.state(is_detached=True) | self._variates()

    def _variates(self) -> dict[str, Tensor]:
        state = {f"own/{name}": tensor for name, tensor in self._own.items()}
        return state | {f"sum/{name}": tensor for name, tensor in self._sums.items()}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue the period; with another number of workers there is no correction until their first sync step."""
        self._averaging.load_state(saved, shared)
        self._feedback.load_state(saved)
        if any(name.startswith("variates/") for name in shared):
            self._common.load_state(shared)
        rank = self._context.group.rank
        mine = saved[rank] if len(saved) == self._context.group.size else {}
        for name, own in self._own.items():
            own.copy_(mine.get(f"own/{name}", self._common.tensors[name]))
            self._sums[name].copy_(mine.get(f"sum/{name}", torch.zeros_like(own)))

    def document(self) -> dict[str, Any]:
        """Return the weights of this worker's samples in the period."""
        return {
            "averaging": self._averaging.document(),
            "weight": self._weight,
            "sum_weight": self._sum_weight,
            "own_weight": self._own_weight,
        }

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load them."""
        self._averaging.load_document(document["averaging"])
        self._weight, self._sum_weight = document["weight"], document["sum_weight"]
        self._own_weight = document.get("own_weight", 1.0)

    def close(self) -> None:
        """Close connections and threads."""
        self._averaging.close()
        self._reducer.close()

    def _renew_own(self, weight: float) -> None:
        """Make this worker's variates the mean of its gradients in the period, if it had a sample in it."""
        self._own_weight = weight
        for name, total in self._sums.items():
            if self._sum_weight:
                self._own[name].copy_(total / self._sum_weight)

    def _begin_period(self) -> None:
        for total in self._sums.values():
            total.zero_()
        self._sum_weight, self._is_exchanging = 0.0, False
