"""Coding optimizer steps instead of gradients: each worker steps alone, and the mean of what all sent is applied.

Adaptive optimizers divide by the size of the gradients that they have seen. Behind a codec with error feedback
gradients come in bursts, so that training ends far worse, whoever implements it. Here each worker's optimizer sees its
own gradients, uncoded, and the codec encodes its steps: x <- x - mean_i decode(encode(step_i + residual_i)). That is
local SGD (Stich 2019, arXiv:1805.09767) with a period of 1, overlapped with backward.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.compression import AutoCodec, Codec
from paceline.compression.codec import is_finite
from paceline.errors import NonFiniteError, SettingsError
from paceline.optim.adam_change import replace_by_changes
from paceline.optim.torch_rules import is_adaptive, updates_by_element
from paceline.optim.update_rule import UpdateRule
from paceline.replica.landing import BucketLanding, Landing
from paceline.replica.optimizer_step import OptimizerStep
from paceline.replica.step_length import StepLength
from paceline.replica.step_result import BucketTimes
from paceline.sync.every_step import EveryStep
from paceline.sync.local_hyperparameters import LocalHyperparameters, may_lengthen
from paceline.sync.reducer import FlatBucket, GradientReducer
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout


def choose_coding(
    rule: Rule,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    precision: str,
    landing: Landing,
    layout: Layout,
) -> Rule:
    """Return the rule with `codec_of` chosen, if it is every_step and leaves that open.

    It is the step where the codec suits steps, the optimizer is adaptive, and no other setting forbids it.

    Raises:
        SettingsError: Steps, or codec auto, are asked for, but another setting forbids it; the message names it.
    """
    if not isinstance(rule, EveryStep):
        return rule
    if isinstance(rule.codec, AutoCodec):
        _check_auto(parameters, landing)
    reason = refuse_steps(parameters, precision, landing, layout)
    if rule.codec_of == "step" and reason:
        raise SettingsError(f"codec_of must be gradient, but got step {reason}")
    if rule.codec_of is not None or not isinstance(rule.codec, Codec):
        return rule
    codes_steps = rule.codec.suits_steps and is_adaptive(optimizer) and not reason
    return rule.model_copy(update={"codec_of": "step" if codes_steps else "gradient"})


def _check_auto(parameters: Mapping[str, Tensor], landing: Landing) -> None:
    if landing != "update":
        raise SettingsError(f"landing must be update with codec auto, but got {landing}; leave it out, or name a codec")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise SettingsError(
                f"parameters must be real for codec auto, but {name} is {parameter.dtype}; leave the codec out"
            )


def refuse_steps(parameters: Mapping[str, Tensor], precision: str, landing: Landing, layout: Layout) -> str:
    """Return why steps cannot be coded, as the end of a sentence; empty if they can."""
    if not layout.is_plain:
        steps_too = "LocalSGD(period=1) (--sync local_sgd --sync.period 1)"
        return f"where ranks share a model; take {steps_too}, which sends steps too"
    if precision == "fp16":
        return "with fp16, which must know of an overflow anywhere first; take bf16 or fp32"
    if landing != "update":
        return f"with landing {landing}; leave landing out"
    if any(torch.finfo(parameter.dtype).bits < 32 for parameter in parameters.values()):
        return "with parameters of less than 32 bits, which small steps do not change"
    return ""


class StepCoding(BucketLanding):
    """Replaces a bucket's gradients by the step that this worker takes with them, and applies the workers' mean step.

    A step is the change that the optimizer makes, which is taken back at once: parameters stay as they were until the
    update. Each bucket's step is made as soon as backward has its gradients; all are made after backward if gradients
    are clipped, each worker's own by its own norm; and by one call of the optimizer if it may need those of all
    parameters together, or has hooks of others, which must run once a step. Steps of adaptive optimizers are made as
    long as synchronous ones (`StepLength`), but for decoupled weight decay, unless such hooks may bound parameters or
    the optimizer's way of decay is unknown. The bound of clipping is larger by the same factor, as a worker's own
    gradient is.

    Args:
        optimizer: Optimizer of this worker. Its state is this worker's own, like its gradients.
        rule: Rule, which makes the reducer and bounds beta1.
        parameters: Parameters to train, by name.
        optimizer_step: Owner of the bound on gradients, and of the check that nothing else steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: EveryStep,
        parameters: Mapping[str, nn.Parameter],
        optimizer_step: OptimizerStep,
    ) -> None:
        super().__init__(optimizer, rule)
        self._parameters, self._optimizer_step, self._largest_beta1 = parameters, optimizer_step, rule.step_beta1
        self._suits_buckets = updates_by_element(optimizer) or isinstance(optimizer, UpdateRule)
        self._steps_by_bucket = False
        self._share = 1.0
        self._is_begun = False
        self._group_of: dict[int, int] = {}
        self._wants_length = rule.step_length == "synchronous"
        self._length: StepLength | None = None
        self._factor = 1.0

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return the reducer of buckets, and begin to measure the length of steps among its workers."""
        is_longer = self._wants_length and may_lengthen(self._optimizer, group.rank)
        self._length = StepLength(group, self._parameters, seed) if is_longer else None
        return super().start_reducer(group, seed, step=step)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in a step to measure its length."""
        return self._length.wire_bytes if self._length is not None else 0

    def state_dict(self) -> dict[str, float]:
        """Return what the length of the next step follows from, as JSON."""
        return self._length.state_dict() if self._length is not None else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state, if it is of a run that measured."""
        if self._length is not None and state:
            self._length.load_state_dict(state)

    def arm(self, share: float | Tensor, step: int) -> None:
        """Prepare for a backward pass that launches buckets."""
        self._share, self._step, self._is_begun = float(share), step, False
        self._steps_by_bucket = self._suits_buckets and not self._optimizer_step.has_foreign_hooks(self._optimizer)
        self.is_eager = self._steps_by_bucket and self._optimizer_step.clip_norm is None
        self.gradients.is_eager = self.is_eager
        if self._length is not None:
            self._length.begin(step)
            # Hooks may bound parameters, which longer steps would leave the bounds of.
            self._factor = 1.0 if self._optimizer_step.has_foreign_hooks(self._optimizer) else self._length.factor

    def before_launch(self, bucket: FlatBucket) -> None:
        """Replace gradients, which are multiplied by this worker's share, by its step, multiplied by it too."""
        if not self._share:  # a worker without samples: all is zero
            return
        if not self._is_begun:
            self._begin()
        if self._steps_by_bucket:
            self._replace([bucket], 1 / self._share if self.is_eager else 1.0)

    def land(self, divisor: float, step: int) -> list[BucketTimes]:
        """Wait for all buckets, apply the mean step, and return the buckets' times."""
        gradients = self.gradients
        if self._length is not None:
            self._length.send(self._share)
        self.unused = gradients.receive(gradients.buckets, divisor)
        if self._length is not None:
            self._length.receive(divisor)
        gradients.check_finite(gradients.buckets, step, may_skip=False)
        steps = [(p.detach(), p.grad) for p in self._parameters.values() if p.grad is not None]
        torch._foreach_sub_([parameter for parameter, _ in steps], [step for _, step in steps])
        gradients.reducer.commit(self.unused)
        if self._length is not None:
            self._length.commit()
        times = [gradients.time(bucket) for bucket in gradients.buckets]
        gradients.reset()
        self.is_torn = False
        if self._copies is not None:
            self._copies.forget()
        return times

    def _begin(self) -> None:
        """Do what a step needs once: before the first launch, which without `is_eager` comes after backward."""
        self._is_begun = self.is_torn = True  # the optimizer's state takes the step before parameters do
        if self._copies is not None:
            self._copies.note(self._parameters.values(), with_values=False)  # they change at the end, all at once
        groups = self._optimizer.param_groups
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        if self.is_eager:
            return
        buckets = [bucket.flat for bucket in self.gradients.buckets]
        _multiply(buckets, 1 / self._share)
        if self._optimizer_step.clip_norm is not None:
            self._clip()
        if not self._steps_by_bucket:
            self._replace(buckets)

    def _clip(self) -> None:
        """Clip this worker's gradients; a norm that is not finite leaves NaN, which is told on all when it arrives."""
        try:
            self.gradient_norm = self._optimizer_step.clip(self._optimizer, self._step, factor=self._factor)
        except NonFiniteError:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)

    @torch.no_grad()
    def _replace(self, buckets: list[FlatBucket], scale: float = 1.0) -> None:
        """Replace gradients by the negative changes that the optimizer makes to parameters, which stay as they are.

        Gradients are first multiplied by `scale`. Those that are not finite never reach the optimizer, since its state
        would stay so: the changes are NaN, which is told when they arrive.
        """
        if self._length is not None:
            for bucket in buckets:
                self._length.read(bucket, scale)
        blocks = {
            self._parameters[name]: view
            for bucket in buckets
            for name, view in bucket.blocks.items()
            if self._parameters[name].grad is not None
        }
        if not all(is_finite(bucket.numerators) for bucket in buckets):
            for view in blocks.values():
                view.fill_(torch.nan)
            return
        factor = self._share * self._factor
        with self._only(list(blocks)):
            is_done = self._steps_by_bucket and replace_by_changes(self._optimizer, blocks, scale, factor)
            if blocks and not is_done:
                _multiply(buckets, scale)
                self._step_and_take_back(blocks, factor)

    def _step_and_take_back(self, blocks: dict[nn.Parameter, Tensor], factor: float) -> None:
        held = [parameter.detach() for parameter in blocks]
        before = [parameter.clone() for parameter in held]
        # Backward may still need these parameters' values, which come back: what has changed is no mistake.
        with torch.autograd._unsafe_preserve_version_counter(tuple(blocks)):
            self._optimizer.step()
            for view, old, new in zip(blocks.values(), before, held, strict=True):
                torch.sub(old, new, out=view)
            torch._foreach_copy_(held, before)
        torch._foreach_mul_(list(blocks.values()), factor)

    @contextmanager
    def _only(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """While active, the optimizer holds no other parameters, and its beta1 is bounded."""
        groups = self._optimizer.param_groups
        if self._steps_by_bucket:
            held: dict[int, list[nn.Parameter]] = {}
            for parameter in parameters:
                if (number := self._group_of.get(id(parameter))) is not None:
                    held.setdefault(number, []).append(parameter)
            self._optimizer.param_groups = [{**groups[number], "params": params} for number, params in held.items()]
        try:
            changed = LocalHyperparameters(self._optimizer, self._largest_beta1, step_factor=self._factor)
            with self._optimizer_step.stepping(), changed.applied():
                yield
        finally:
            self._optimizer.param_groups = groups


def _multiply(buckets: list[FlatBucket], factor: float) -> None:
    if factor != 1.0:
        for bucket in buckets:
            bucket.numerators.mul_(factor)
