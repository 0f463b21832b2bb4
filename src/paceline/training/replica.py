"""One worker's copy of the model, kept in step with the others."""

import time
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.errors import GradientError, NonFiniteError
from paceline.sync.rule import Rule
from paceline.training.checks import (
    Precision,
    check_backward,
    check_deferrable,
    check_momentum,
    check_optimizer,
    check_placement,
    check_settings,
)
from paceline.training.control import Control, Verdict
from paceline.training.deferred import ForwardLanding
from paceline.training.gradients import Gradients
from paceline.training.hashing import check_equal
from paceline.training.start import broadcast_module, check_same_model
from paceline.training.times import StepTimes

# Measured: on CPUs 16 MiB waits least for its last bucket, smaller ones cost more calls; a GPU wants few launches.
DEFAULT_BUCKET_BYTES = {"cpu": 16 * 2**20, "cuda": 25 * 2**20}


@dataclass(frozen=True)
class StepResult:
    """What one update did, the same on every worker but for the times."""

    loss: float
    """Mean over the whole global batch."""
    weight: float
    """Mass of the global batch: samples, or tokens."""
    gradient_norm: float | None
    """Global norm before clipping; None where nothing is clipped."""
    communication_s: float
    """Time this worker waited for the exchange; what backward hid is not in it."""
    skipped: bool
    """Whether fp16 overflowed and parameters stayed as they were."""
    stop: bool
    """Whether some worker has asked to stop here."""
    newly_unused: list[str]
    """Parameters that no worker used, and that were not told of before; found a step later where gradients land in
    the next forward."""
    times: StepTimes = field(default_factory=StepTimes)
    """When its parts happened; buckets that land in the next forward are those of the step before."""


class UnusedParametersWarning(UserWarning):
    """Parameters had no gradient on any rank."""


class Replica:
    """A module and its optimizer, trained together with those of the other workers.

    Call it to run the module forward, then `backward` (as often as the step has micro-batches) and `update`.
    Gradients are exchanged while the last backward runs. Each worker's gradient counts by the weight it gives, so
    uneven shares are right. In a world of one it does what a plain loop does, with no buffers or hooks.

    Args:
        module: Any module, the same on every worker; parameters and buffers are taken from rank 0.
        optimizer: Over parameters of `module`.
        group: The workers; alone without it.
        sync: The synchronisation rule, or its name.
        precision: ``bf16`` and ``fp16`` run forward under autocast, fp16 with loss scaling; parameters, gradients and
            their sums stay in the parameters' dtype.
        clip_norm: Largest global gradient norm, after averaging.
        bucket_bytes: Gradients are exchanged in buckets of about this size; by default 16 MiB on CPUs, 25 MiB on GPUs.
            ``"tuned"`` tries several sizes in the first steps.
        landing: ``"next_forward"`` lets the next forward begin before the last bucket has come: each is landed just
            before its parameters are used, and those that forward uses first are sent first. Call `flush` before
            anything but forward and backward reads the parameters.
        hash_interval: Steps from one comparison of all replicas to the next; 0 for none.
        seed: Of what codecs draw.

    Raises:
        SettingsError: The optimizer holds a parameter that is not the module's, the workers' models differ, or landing
            in the next forward cannot be right with the optimizer, precision or clipping chosen.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Group | None = None,
        sync: Rule | str = "every_step",
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        bucket_bytes: int | Literal["tuned"] | None = None,
        landing: Literal["update", "next_forward"] = "update",
        hash_interval: int = 100,
        seed: int = 0,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.group = group or LocalGroup(device=next((p.device for p in module.parameters()), None))
        self.sync = Rule.model_validate(sync)
        self.clip_norm = clip_norm
        self.num_updates = 0
        self._precision = precision
        self._hash_interval = hash_interval
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        check_settings(precision, clip_norm, self._parameters)
        check_placement(self._parameters, self.group)
        check_optimizer(optimizer, module)
        if self.sync.carries_momentum:
            check_momentum(optimizer)
        if landing == "next_forward":
            check_deferrable(optimizer, precision, clip_norm)
        self._scaler = torch.amp.GradScaler(self.group.device.type, enabled=precision == "fp16")
        # Numerators are counted in units of the last step's mass: a mass that stays the same then divides to
        # exactly 1, and landing needs no pass over the gradients.
        self._mass_unit: float | None = None
        self._stop_requested = False
        self._warned_unused: set[str] = set()
        self._unused: list[str] = []
        self._weight = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self._control: Control | None = None
        self._times = StepTimes()
        self._gradients: Gradients | None = None
        self._deferred: ForwardLanding | None = None
        if self.group.size > 1:
            check_same_model(module, self.group)
            broadcast_module(module, self.group)
            in_order = landing == "next_forward"
            exchanger = self.sync.start(self.group, seed, in_order=in_order)
            suits = exchanger.bucket_bytes or DEFAULT_BUCKET_BYTES[self.group.device.type]
            chosen = None if bucket_bytes == "tuned" else bucket_bytes or suits
            self._gradients = Gradients(self._parameters, self.group, exchanger, chosen)
            if in_order:
                self._deferred = ForwardLanding(module, self._parameters, optimizer, self._gradients)
            # Hooks are rings that Python cannot collect: a replica that was forgotten would keep its memory for ever.
            self._end = weakref.finalize(self, _let_go, self._gradients, self._deferred)
            self._end.atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward in the chosen precision."""
        if torch.is_grad_enabled():  # evaluation is no part of a step
            self._times.began_s = self._times.began_s or time.perf_counter()
        with self.autocast():
            if self._deferred is not None:
                return self._deferred.run(lambda: self.module(*args, **kwargs))
            return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forward runs in."""
        if self._precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float16
        return torch.autocast(self.group.device.type, dtype=dtype)

    @property
    def loss_scale(self) -> float | None:
        """The factor that fp16 gradients are scaled by; None in other precisions."""
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in a step, by the price of the exchange."""
        return self._gradients.wire_bytes if self._gradients is not None else 0

    def request_stop(self) -> None:
        """Ask all workers to stop after their next update; each learns it from `StepResult.stop`."""
        self._stop_requested = True

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
        last: bool = True,
    ) -> None:
        """Add the gradients of `loss` to those of the step, and exchange them if it is the `last` of the step.

        Args:
            loss: 0-dim; a mean or a sum over what `weight` counts, as `reduction` says.
            weight: Its mass: samples or tokens. 0 counts for nothing.
            reduction: What `loss` is.
            last: False while accumulating, on every worker alike; nothing is exchanged then (but at the very first
                call, which agrees on the unit that mass is counted in).

        Raises:
            GradientError: `loss` is not 0-dim, `weight` negative or not finite, a gradient sparse or made twice, a
                parameter unfrozen after the replica was made, or used before it had landed; or `update` was not
                called after the last backward.
        """
        check_backward(loss, weight, self._control is not None, self._frozen)
        if self._deferred is not None:
            self._deferred.begin_backward()
        self._times.backward_began_s = time.perf_counter()
        self._times.began_s = self._times.began_s or self._times.backward_began_s
        factor = weight if reduction == "mean" else 1.0
        if self._mass_unit is None:
            self._mass_unit = self._agree_first_unit(weight)
        if last:
            numerator = self._loss + loss.detach().double() * factor if weight else self._loss
            self._control = Control(self.group, self._weight + weight, numerator, self._stop_requested)
            if self._gradients is not None:
                divisor = partial(_divisor, self._control, self._mass_unit)
                self._gradients.arm(divisor, self.num_updates, self.loss_scale or 1.0)
        if weight:  # a loss that counts for nothing may be NaN, and NaN times 0 is NaN
            scale = factor / self._mass_unit
            self._scaler.scale(loss if scale == 1.0 else loss * scale).backward()
            # Only now, so that a backward that failed leaves no mass behind.
            self._weight += weight
            self._loss = self._loss + loss.detach().double() * factor
        if self._deferred is not None:
            self._deferred.check_backward()
        if last and self._gradients is not None:
            self._gradients.finish()
        self._times.backward_ended_s = time.perf_counter()

    def update(self) -> StepResult:
        """Wait for the exchange, then let the optimizer take its step and drop the gradients.

        Raises:
            NonFiniteError: A loss, a gradient or the gradient norm is NaN or infinite; parameters are as before (but
                for those of earlier buckets where gradients land in the next forward).
            CommunicationError: A worker died or stopped answering.
            DivergenceError: Replicas are no longer equal.
        """
        if self._control is None:
            raise GradientError("backward(last=True) must come before update(), but it did not; call replica.backward")
        began_s = time.perf_counter()
        verdict = self._judge(self._control)
        assert self._mass_unit is not None
        waited_s = time.perf_counter() - began_s
        gradient_norm, skipped, landed_step = None, False, self.num_updates
        if self._deferred is not None and self._deferred.is_possible:
            self._times.buckets = self._deferred.defer(verdict.weight / self._mass_unit, self.num_updates)
            waited_s += sum(bucket.waited_s for bucket in self._times.buckets)
            self._unused = self._deferred.unused
            landed_step -= 1
        else:
            waited_s += self._land(verdict.weight / self._mass_unit)
            self._times.optimizer_began_s = time.perf_counter()
            gradient_norm, skipped = self._step_optimizer()
            self._times.optimizer_ended_s = time.perf_counter()
            self._finish_landing(skipped)
        newly_unused = self._note_unused(landed_step)
        self._mass_unit = verdict.weight
        self.num_updates += 1
        self._learn()
        if self._is_hash_due():
            self.flush()
            check_equal(self._parameters, self.group, self.num_updates)
        self._weight = 0.0
        self._loss = torch.zeros_like(self._loss)
        self._control = None
        times, self._times = self._times, StepTimes()
        loss = verdict.loss / verdict.weight
        return StepResult(loss, verdict.weight, gradient_norm, waited_s, skipped, verdict.stop, newly_unused, times)

    def flush(self) -> None:
        """Land what was left for the next forward, so that parameters are those after the last update."""
        if self._deferred is not None:
            self._deferred.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is neither the module's nor the optimizer's, as JSON; `feedback` has its tensors."""
        self.flush()
        return {
            "num_updates": self.num_updates,
            "mass_unit": self._mass_unit,
            "scaler": self._scaler.state_dict(),
            "codec": self.codec,
            "gradients": self._gradients.state_dict() if self._gradients is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on a saved state. A saved bucket layout is kept, since sums of three ranks and more depend on it."""
        self.num_updates = state["num_updates"]
        self._mass_unit = state["mass_unit"]
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if self._gradients is not None and state["gradients"]:
            self._gradients.load_state_dict(state["gradients"])

    @property
    def codec(self) -> str:
        """Name of the codec that `feedback` is of; empty where nothing is kept, as in a world of one."""
        return self._gradients.exchanger.state_of if self._gradients is not None else ""

    def feedback(self) -> dict[str, Tensor]:
        """Return what this worker's codec keeps from step to step, by parameter and site."""
        self.flush()
        return self._gradients.exchanger.state() if self._gradients is not None else {}

    def load_feedback(self, saved: list[dict[str, Tensor]]) -> None:
        """Take on what the codecs of all saved workers kept; another number of them shares it out anew."""
        if self._gradients is not None:
            shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
            self._gradients.exchanger.load_state(saved, shapes)

    def close(self) -> None:
        """Land what was left, take hooks off the module, and let the exchange's connections and threads go."""
        if self._gradients is not None:
            try:
                self.flush()
            finally:
                self._end()

    def _agree_first_unit(self, weight: float) -> float:
        first = torch.tensor([weight], dtype=torch.float64, device=self.group.device)
        self.group.all_reduce(first, name="first mass").wait()
        return float(first) or 1.0

    def _judge(self, control: Control) -> Verdict:
        verdict = control.wait()
        if verdict.num_non_finite:
            mine = float(self._loss)
            losses = self.group.gather_documents(repr(mine), name="non-finite losses")
            bad = [f"rank {rank} ({loss})" for rank, loss in enumerate(losses) if loss in ("nan", "inf", "-inf")]
            raise NonFiniteError(
                f"the loss must be finite, but at step {self.num_updates} it is not on {', '.join(bad)}; lower the "
                "learning rate, clip gradients, or look at the data of that step"
            )
        if verdict.weight <= 0:
            raise GradientError(f"the weights of a global batch must add up to more than 0, but got {verdict.weight}")
        return verdict

    def _land(self, divisor: float) -> float:
        """Wait for each bucket, divide it by the mass, and return the seconds waited."""
        if self._gradients is None:
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            if divisor != 1.0 and gradients:
                torch._foreach_div_(gradients, divisor)
            self._unused = [name for name, parameter in self._parameters.items() if parameter.grad is None]
            return 0.0
        buckets = self._gradients.buckets
        self._unused = [name for bucket in buckets for name in self._gradients.land(bucket, divisor)]
        self._gradients.check_finite(buckets, self.num_updates, may_skip=self._scaler.is_enabled())
        return sum(bucket.waited_s for bucket in buckets)

    def _step_optimizer(self) -> tuple[float | None, bool]:
        gradient_norm = None
        self._scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(held, self.clip_norm)
            gradient_norm = float(norm)
            if not torch.isfinite(norm) and not self._scaler.is_enabled():
                raise NonFiniteError(
                    f"the gradient norm must be finite, but at step {self.num_updates} it is {gradient_norm} "
                    "while the loss is finite; look at that step's data or lower the learning rate"
                )
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return gradient_norm, self._scaler.get_scale() < scale

    def _finish_landing(self, skipped: bool) -> None:
        """Keep or drop what codecs made of the step, and drop its gradients."""
        if self._gradients is None:
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        if skipped:
            self._gradients.exchanger.roll_back()
        else:
            self._gradients.exchanger.commit(self._unused)
        self._times.buckets = [self._gradients.time(bucket) for bucket in self._gradients.buckets]
        self._gradients.reset()

    def _learn(self) -> None:
        self._times.ended_s = time.perf_counter()
        if self._gradients is not None and (self._deferred is None or not self._deferred.is_possible):
            # A worker that has run no forward yet must learn at the same steps as the others.
            needed = self._deferred.needed or {} if self._deferred is not None else None
            self._gradients.learn(self._times, needed)

    def _note_unused(self, step: int) -> list[str]:
        new = [name for name in self._unused if name not in self._warned_unused]
        if new:
            self._warned_unused.update(new)
            warnings.warn(
                f"{len(new)} parameters had no gradient at step {step} on any rank and stay as they are: "
                f"{', '.join(new)}; freeze them with requires_grad=False if that is meant",
                UnusedParametersWarning,
                stacklevel=3,
            )
        return new

    def _is_hash_due(self) -> bool:
        return (
            self.group.size > 1
            and self._hash_interval > 0
            and self.sync.keeps_replicas_equal
            and self.num_updates % self._hash_interval == 0
        )


def _let_go(gradients: Gradients, deferred: ForwardLanding | None) -> None:
    if deferred is not None:
        deferred.close()
    gradients.close()


def _divisor(control: Control, mass_unit: float) -> float:
    """Return what a step's numerators are divided by; waits until all workers have said their weights."""
    return (control.wait().weight or mass_unit) / mass_unit
