"""One worker's copy of the model, kept in step with the others."""

import math
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.comm.group import Group, Work
from paceline.comm.local_group import LocalGroup
from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.sync.rule import Rule
from paceline.training.buckets import Bucket, Layout, Reducer, make_buckets, plan_layout
from paceline.training.hashing import check_equal
from paceline.training.start import broadcast_module, check_same_model

Precision = Literal["fp32", "bf16", "fp16"]

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
    """Parameters that no worker used, and that were not told of before."""


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
        hash_interval: Steps from one comparison of all replicas to the next; 0 for none.

    Raises:
        SettingsError: The optimizer holds a parameter that is not the module's, or the workers' models differ.
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
        bucket_bytes: int | None = None,
        hash_interval: int = 100,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.group = group or LocalGroup(device=next((p.device for p in module.parameters()), None))
        self.sync = Rule.model_validate(sync)
        self.clip_norm = clip_norm
        self.num_updates = 0
        self._precision = precision
        self._bucket_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES[self.group.device.type]
        self._hash_interval = hash_interval
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        self._check_settings()
        self._check_placement()
        self._check_optimizer()
        self._scaler = torch.amp.GradScaler(self.group.device.type, enabled=precision == "fp16")
        # Numerators are counted in units of the last step's mass: a mass that stays the same then divides to
        # exactly 1, and landing needs no pass over the gradients.
        self._mass_unit: float | None = None
        self._stop_requested = False
        self._warned_unused: set[str] = set()
        self._weight = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self._exchanging = False
        self._reducer: Reducer | None = None
        if self.group.size > 1:
            check_same_model(module, self.group)
            broadcast_module(module, self.group)
            self._layout_is_learnt = False
            self._use_layout(plan_layout(self._parameters, reversed(self._parameters), self._bucket_bytes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward in the chosen precision."""
        with self.autocast():
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
                parameter unfrozen after the replica was made; or `update` was not called after the last backward.
        """
        self._check_backward(loss, weight)
        factor = weight if reduction == "mean" else 1.0
        if self._mass_unit is None:
            self._mass_unit = self._agree_first_unit(weight)
        if last:
            self._exchanging = True
            numerator = self._loss + loss.detach().double() * factor if weight else self._loss
            self._start_control(self._weight + weight, numerator)
            if self._reducer is not None:
                self._reducer.arm()
        if weight:  # a loss that counts for nothing may be NaN, and NaN times 0 is NaN
            scale = factor / self._mass_unit
            self._scaler.scale(loss if scale == 1.0 else loss * scale).backward()
            # Only now, so that a backward that failed leaves no mass behind.
            self._weight += weight
            self._loss = self._loss + loss.detach().double() * factor
        if last and self._reducer is not None:
            self._reducer.finish()

    def update(self) -> StepResult:
        """Wait for the exchange, then let the optimizer take its step and drop the gradients.

        Raises:
            NonFiniteError: A loss, or the gradient norm, is NaN or infinite; parameters are as before.
            CommunicationError: A worker died or stopped answering.
            DivergenceError: Replicas are no longer equal.
        """
        if not self._exchanging:
            raise GradientError("backward(last=True) must come before update(), but it did not; call replica.backward")
        began_s = time.perf_counter()
        weight, loss, stop = self._finish_control()
        assert self._mass_unit is not None
        waited_s = time.perf_counter() - began_s + self._land(weight / self._mass_unit)
        newly_unused = self._note_unused()
        gradient_norm, skipped = self._step_optimizer()
        self._drop_gradients()
        self._mass_unit = weight
        self.num_updates += 1
        self._learn_layout()
        if self._is_hash_due():
            check_equal(self._parameters, self.group, self.num_updates)
        self._weight = 0.0
        self._loss = torch.zeros_like(self._loss)
        self._exchanging = False
        return StepResult(loss / weight, weight, gradient_norm, waited_s, skipped, stop, newly_unused)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is neither the module's nor the optimizer's, as JSON."""
        return {
            "num_updates": self.num_updates,
            "mass_unit": self._mass_unit,
            "scaler": self._scaler.state_dict(),
            "layout": [[slot.name for slot in b.slots] for b in self._reducer.buckets] if self._reducer else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on a saved state. A saved bucket layout is kept, since sums of three ranks and more depend on it."""
        self.num_updates = state["num_updates"]
        self._mass_unit = state["mass_unit"]
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        layout = state["layout"]
        if self._reducer is not None and layout and {n for names in layout for n in names} == set(self._parameters):
            self._layout_is_learnt = True
            self._use_layout(layout)

    def _check_settings(self) -> None:
        if self._precision not in get_args(Precision):
            raise SettingsError(f"precision must be one of {get_args(Precision)}, but got {self._precision!r}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise SettingsError(f"clip_norm must be more than 0, but got {self.clip_norm}; None clips nothing")
        if not self._parameters:
            raise SettingsError("the module must have parameters that require gradients, but it has none")

    def _check_placement(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.device.type != self.group.device.type:
                raise SettingsError(
                    f"the module must be on its group's device {self.group.device}, but {name} is on "
                    f"{parameter.device}; call module.to(group.device) before building the optimizer"
                )

    def _check_optimizer(self) -> None:
        known = {id(parameter) for parameter in self.module.parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        strangers = sum(id(parameter) not in known for parameter in held)
        if strangers:
            raise SettingsError(
                f"the optimizer must hold parameters of the module only, but {strangers} of its {len(held)} are not; "
                "build it from module.parameters() after the module is complete"
            )

    def _check_backward(self, loss: Tensor, weight: float) -> None:
        if self._exchanging:
            raise GradientError("update() must be called after backward(last=True), but backward was called again")
        if loss.dim() != 0:
            raise GradientError(f"loss must be 0-dim, but got shape {tuple(loss.shape)}; take its mean or sum first")
        if not 0 <= weight < math.inf:
            raise GradientError(f"weight must be a number of at least 0, but got {weight}")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise GradientError(
                    f"{name} must stay frozen, but requires_grad was set after the replica was made, so that its "
                    "gradient would not be exchanged; unfreeze first, then make a new Replica"
                )

    def _agree_first_unit(self, weight: float) -> float:
        first = torch.tensor([weight], dtype=torch.float64, device=self.group.device)
        self.group.all_reduce(first, name="first mass").wait()
        return float(first) or 1.0

    def _start_control(self, weight: float, loss: Tensor) -> None:
        """Send ahead what all must know of the step: mass, loss, whether it is finite, whether to stop."""
        self._control = torch.zeros(4, dtype=torch.float64, device=self.group.device)
        self._control[0] = weight
        self._control[1] = loss
        self._control[2] = ~torch.isfinite(loss)
        self._control[3] = float(self._stop_requested)
        self._control_work = self.group.all_reduce(self._control, name="control")

    def _finish_control(self) -> tuple[float, float, bool]:
        self._control_work.wait()
        weight, loss, num_bad, num_stops = self._control.tolist()
        if num_bad:
            self._raise_non_finite()
        if weight <= 0:
            raise GradientError(f"the weights of a global batch must add up to more than 0, but got {weight}")
        return weight, loss, num_stops > 0

    def _raise_non_finite(self) -> None:
        mine = float(self._loss)
        losses = self.group.gather_documents(repr(mine), name="non-finite losses")
        bad = [f"rank {rank} ({loss})" for rank, loss in enumerate(losses) if loss in ("nan", "inf", "-inf")]
        raise NonFiniteError(
            f"the loss must be finite, but at step {self.num_updates} it is not on {', '.join(bad)}; lower the "
            "learning rate, clip gradients, or look at the data of that step"
        )

    def _launch(self, bucket: Bucket) -> Work:
        return self.sync.exchange(bucket.buffer, self.group, name=f"bucket {bucket.index}")

    def _land(self, mass: float) -> float:
        """Wait for each bucket, divide it by the mass, and return the seconds waited."""
        if self._reducer is None:
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            if mass != 1.0 and gradients:
                torch._foreach_div_(gradients, mass)
            return 0.0
        waited_s = 0.0
        for bucket in self._reducer.buckets:
            assert bucket.work is not None
            began_s = time.perf_counter()
            bucket.work.wait()
            waited_s += time.perf_counter() - began_s
            self.sync.land(bucket.numerators, mass)
        return waited_s

    def _note_unused(self) -> list[str]:
        if self._reducer is not None:
            unused = self._reducer.find_unused()
        else:
            unused = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        new = [name for name in unused if name not in self._warned_unused]
        if new:
            self._warned_unused.update(new)
            warnings.warn(
                f"{len(new)} parameters had no gradient at step {self.num_updates} on any rank and stay as they are: "
                f"{', '.join(new)}; freeze them with requires_grad=False if that is meant",
                UnusedParametersWarning,
                stacklevel=3,
            )
        return new

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

    def _drop_gradients(self) -> None:
        if self._reducer is not None:
            self._reducer.reset()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _is_hash_due(self) -> bool:
        return (
            self.group.size > 1
            and self._hash_interval > 0
            and self.sync.keeps_replicas_equal
            and self.num_updates % self._hash_interval == 0
        )

    def _learn_layout(self) -> None:
        """After the first step, lay buckets out in the order in which rank 0's gradients became ready."""
        if self._reducer is None or self._layout_is_learnt:
            return
        self._layout_is_learnt = True
        ready = list(dict.fromkeys(self._reducer.ready_order))
        order: list[str] = self.group.gather_documents(ready, name="ready order")[0]
        order += [name for name in reversed(self._parameters) if name not in set(order)]
        self._use_layout(plan_layout(self._parameters, order, self._bucket_bytes))

    def _use_layout(self, layout: Layout) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None  # its buffers go before the new ones come
        self._reducer = Reducer(make_buckets(self._parameters, layout, self.group), self._launch)
        self._reducer.reset()
