"""Elastic averaging SGD: workers and a centre pull at each other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.compression import NoCodec
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.elastic_centre import AsynchronousElastic
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.periodic import ErrorFeedback, PeriodicRule
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext


@register("easgd")
class EASGD(PeriodicRule):
    """Elastic averaging SGD (Zhang, Choromanska and LeCun 2015, arXiv:1412.6651).

    Once in a period x_i <- x_i - lr * g_i - a * (x_i - c) and c <- c + a * sum_i (x_i - c), with a the `elasticity`:
    the gradient and both differences are those before the step. Workers stay apart, and so explore; the centre c is
    evaluated and saved. With num_workers * a = 1 the centre becomes the workers' mean, with a = 0 they
    run independently. Any optimizer works: with SGD and Nesterov momentum it is the paper's EAMSGD.

    With `asynchronous` each worker swaps with the centre alone, in its own steps, one after another: x_i <- x_i - d,
    c <- c + d, d = a * (x_i - c). The centre runs in the first worker's process, and a dispatcher hands out samples.

    On the wire is one all-reduce of the parameters a period, or a message of them each way with `asynchronous`, which
    the optimizer's step hides in part; each worker keeps the centre beside its parameters, and in a step with an
    exchange its difference, with which the exchange is made again if workers are lost in it. Workers count equally,
    whatever their samples. Clipping bounds each worker's own gradient, not the pull. A codec encodes x_i - c; its
    residual reaches the centre later.
    """

    period: int = Field(default=8, ge=1)
    """Steps from one pull to the next."""
    elasticity: float | None = Field(default=None, ge=0, le=1)
    """Share of the difference that a worker moves to the centre, and the centre to each worker; by default
    0.9 / num_workers."""

    asynchronous: bool = False
    """Whether each worker swaps with the centre at its own pace."""

    @model_validator(mode="after")
    def _check_asynchronous(self) -> Self:
        if self.asynchronous and (not isinstance(self.codec, NoCodec) or self.program is not None):
            raise SettingsError(
                f"codec and program must be left out with asynchronous, but got {self.codec.name} and {self.program}; "
                "a worker and the centre swap parameters uncompressed"
            )
        return self

    @property
    def copies_first_parameters(self) -> bool:
        """Always true: the centre begins with them."""
        return True

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers swap at their own pace."""
        return self.asynchronous

    @property
    def survives_loss(self) -> bool:
        """Always true: each worker keeps its own parameters, and knows the centre."""
        return True

    @property
    def weighs_samples(self) -> bool:
        """Always false: the centre pulls at all workers alike."""
        return False

    def fit_workers(self, num_workers: int) -> Self:
        """Return the rule with the largest elasticity that so many workers can have, if its own is larger."""
        if self.elasticity is None or self.elasticity * num_workers <= 1:
            return self
        return self.model_copy(update={"elasticity": 1 / num_workers})

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a period; with `asynchronous` a message each way."""
        if not self.asynchronous:
            return super().traffic(shapes, num_workers)
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        return tuple(Traffic(way, num_bytes, num_bytes, self.period, "servers") for way in ("push", "pull"))

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that pulls.

        Raises:
            SettingsError: The centre would move beyond the workers' mean.
        """
        num_workers = context.group.size
        elasticity = 0.9 / num_workers if self.elasticity is None else self.elasticity
        if num_workers * elasticity > 1 + 1e-9:
            raise SettingsError(
                f"elasticity times workers must be at most 1, but got {elasticity} * {num_workers} = "
                f"{elasticity * num_workers:g}; give at most {1 / num_workers:.3g}"
            )
        if self.asynchronous:
            return AsynchronousElastic(context, self.period, elasticity)
        return _Elastic(context, self, elasticity)


class _Elastic(Synchroniser):
    def __init__(self, context: WorkerContext, rule: EASGD, elasticity: float) -> None:
        self._context, self._rule = context, rule
        self._elasticity = self._pull_elasticity = elasticity
        self._reducer = rule.start_difference_reducer(context.group, context.seed)
        self._feedback = ErrorFeedback(self._reducer, rule.codec, context)
        self._centre = self._make_centre()
        self._differences: dict[str, Tensor] = {}
        """Centre less this worker's parameters in the exchange under way; empty for one that has no part in it."""
        self._is_pulled = False
        """Whether this worker has been pulled, and the centre has not."""

    def is_sync_step(self, number: int) -> bool:
        """Return whether the step is the last of a period."""
        return (number + 1) % self._rule.period == 0

    def before_update(self, step: LocalStep) -> None:
        """Send the difference, and pull this worker."""
        if not self.is_sync_step(step.number):
            return
        parameters = self._context.parameters
        self._differences = {name: self._centre.tensors[name] - p.detach() for name, p in parameters.items()}
        # Numerators alone: the centre takes their sum, not their mean.
        self._centre.send(1.0, 1.0, step.number, self._differences)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.lerp_(self._centre.tensors[name].to(parameter.dtype), self._elasticity)
        self._is_pulled, self._pull_elasticity = True, self._elasticity

    def after_update(self, step: LocalStep) -> SyncResult:
        """Pull the centre."""
        if not self.is_sync_step(step.number):
            return SyncResult()
        if not self._centre.is_sent:  # it is made again, among other workers
            self._centre.send(float(bool(self._differences)), 1.0, step.number, self._differences or None)
        waited_s = self._centre.receive()
        self._centre.update(self._pull)
        self._differences, self._is_pulled = {}, False
        return SyncResult(waited_s, self._centre.wire_bytes)

    def abandon(self) -> Abandoned:
        """Drop the exchange; a worker that has been pulled keeps by how much, so that the centre can be pulled too."""
        self._centre.abandon()
        if self._is_pulled:
            return Abandoned.DUE
        self._differences = {}
        return Abandoned.DONE

    def last_exchange(self, number: int) -> int:
        """Return the end of the period before."""
        return number - number % self._rule.period

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the centre."""
        parameters = self._context.parameters
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _assign(parameters, self._centre.tensors)
        try:
            yield
        finally:
            _assign(parameters, own)

    def shared_state(self) -> dict[str, Tensor]:
        """Return the centre, and the share by which it is still to be pulled."""
        pull = {"pull": torch.tensor(self._pull_elasticity, dtype=torch.float64)} if self._is_pulled else {}
        return self._centre.state() | pull

    def state(self) -> dict[str, Tensor]:
        """Return the codec's residuals."""
        return self._feedback.state()

    def detached_state(self) -> dict[str, Tensor]:
        """Return the residuals, and the difference by which the centre is still to be pulled."""
        differences = {f"difference/{name}": tensor for name, tensor in self._differences.items()}
        return self._feedback.state(is_detached=True) | differences

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue from the saved centre; without one, from these parameters."""
        self._centre = self._make_centre()
        if shared:
            self._centre.load_state(shared)
        self._feedback.load_state(saved)
        self._is_pulled = "pull" in shared
        if self._is_pulled:
            self._pull_elasticity = float(shared["pull"])
            mine = saved[self._context.group.rank] if len(saved) == self._context.group.size else {}
            self._differences = {
                name.removeprefix("difference/"): t for name, t in mine.items() if name.startswith("difference/")
            }

    def close(self) -> None:
        """Close connections and threads."""
        self._reducer.close()

    def _pull(self, _: str, centre: Tensor, total: Tensor) -> None:
        centre.sub_(total, alpha=self._pull_elasticity)

    def _make_centre(self) -> OuterParameters:
        values = {name: parameter.detach() for name, parameter in self._context.parameters.items()}
        return OuterParameters("centre", values, self._context.group, self._reducer)


def _assign(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
