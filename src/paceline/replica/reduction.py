"""Reduction of one replica's gradients over its reduce group: all workers, those of a host, or itself alone."""

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.compression import AutoCodec, Codec
from paceline.compression.codec import is_finite
from paceline.errors import GradientError, NonFiniteError, SpikeError
from paceline.optim.torch_rules import is_adaptive, is_known
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard, is_split
from paceline.replica.codec_chooser import CodecChooser, measure_step
from paceline.replica.coded_steps import StepCoding, refuse_steps
from paceline.replica.gradients import Gradients
from paceline.replica.landing import BucketLanding, Landing
from paceline.replica.next_forward import ForwardLanding
from paceline.replica.optimizer_mean import average_states
from paceline.replica.optimizer_step import OptimizerStep
from paceline.replica.step_result import BucketTimes, StepTimes, warn_of_unused
from paceline.replica.step_scalars import StepScalars, StepTotals
from paceline.replica.virtual_workers import VirtualWorkers
from paceline.sync.carrying import CarryingReducer
from paceline.sync.every_step import EveryStep
from paceline.sync.reducer import Divisor, GradientReducer
from paceline.sync.reducers import DenseReducer
from paceline.sync.rule import Rule

GPU_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket on GPUs, which want few launches, and whose exchanges are not timed; on CPUs it is chosen."""


class GradientReduction:
    """The workers with which gradients are summed, and the reducer; `prepare` may change both from step to step.

    Args:
        module: The model.
        parameters: Parameters that require gradients, by name.
        optimizer: Optimizer, which steps by bucket if buckets are applied one by one.
        optimizer_step: Owner of its steps.
        shard: Model shard of this rank; its group is all workers.
        rule: Synchronisation rule, which forms the reduce groups.
        bucket_bytes, landing, seed, num_virtual_workers: See `Replica`.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        optimizer_step: OptimizerStep,
        *,
        shard: ModelShard,
        rule: Rule,
        bucket_bytes: int | None,
        landing: Landing,
        seed: int,
        num_virtual_workers: int | None = None,
    ) -> None:
        self._module, self._parameters = module, parameters
        self._optimizer, self._optimizer_step = optimizer, optimizer_step
        self._shard, self._all, self._rule = shard, shard.group, rule
        self._bucket_bytes, self._landing, self._seed = bucket_bytes, landing, seed
        self.virtual = VirtualWorkers(num_virtual_workers, module, shard.group) if num_virtual_workers else None
        """This worker's virtual workers; None if gradients are summed over workers."""
        self.chooser = self._start_chooser()
        """Chooser of the codec; None if it is fixed."""
        if self.chooser is not None:
            self._rule = self.chooser.rule
        self._carried: tuple[Codec, dict[str, Tensor]] | None = None
        """Codec before, and its state, that the next reducer begins with."""
        self._ranks: list[int] = []
        self._unchanged = range(0)
        """Steps for which the rule wants the present group and reducer."""
        self._phase = 0
        self.judge: Callable[[str, float], None] | None = None
        """Judge of the mean loss before the update; it raises `SpikeError` where that must not be made."""
        self.compare: Callable[[int], None] | None = None
        """Comparison of the summed gradients of a step with those of the other workers."""
        self.failure: type[Exception] | None = None
        """Kind of error of an update after which there can be no other."""
        self._end: weakref.finalize[Any, GradientReduction] | None = None
        self._end_common: weakref.finalize[Any, GradientReduction] | None = None
        self.reduce_group = shard.group
        """Workers over which gradients are summed."""
        self.gradients: Gradients | None = None
        """Gradients in buckets; None if this worker is alone: its gradients stay where autograd puts them."""
        self.landing: BucketLanding | None = None
        self.keeps_step_copies = False
        """Landing of gradients otherwise than at the update; None for the update."""
        self._in_common = self._start_common()
        """Gradients of what ranks that share experts have in common, which they sum before; None without such ranks."""
        self.unused: list[str] = []
        """Parameters that no rank of the reduce group used in the last received step."""
        self._warned_unused: set[str] = set()
        self.prepare(0)

    @property
    def covers_all_workers(self) -> bool:
        """Whether the reduce group is all workers."""
        return self.reduce_group is self._all

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends for a step's gradients."""
        beside = self.landing.wire_bytes if self.landing is not None else 0
        held = [gradients for gradients in (self._in_common, self.gradients) if gradients is not None]
        return beside + sum(gradients.wire_bytes for gradients in held)

    @property
    def rule(self) -> Rule:
        """Rule of the present step, with its codec, if that is chosen while training runs."""
        return self._rule

    def list_buffers(self) -> list[Tensor]:
        """Return the buffers of gradients that last from step to step."""
        held = [gradients for gradients in (self._in_common, self.gradients) if gradients is not None]
        return [bucket.flat.buffer for gradients in held for bucket in gradients.buckets]

    def send_scalars(self, weight: float | Tensor, numerator: Tensor, stop: bool | Tensor) -> StepScalars:
        """Send the scalars of a step to the reduce group, with what this worker measured in the step before."""
        measured: Any = self.chooser.values() if self.chooser is not None else ()
        measured = measured if self.virtual is None else self.virtual.measured()
        return StepScalars(self.reduce_group, weight, numerator, stop, measured=measured)

    def choice(self) -> dict[str, Any] | None:
        """Return the choice of a codec, as JSON; None if it is fixed."""
        if self.chooser is None or self.gradients is None:
            return None
        reducer = self.gradients.reducer
        carried = reducer.carried if isinstance(reducer, CarryingReducer) else None
        return self.chooser.state_dict() | {"carried": carried.model_dump(mode="json") if carried is not None else None}

    def resume(self, step: int, choice: dict[str, Any] | None) -> None:
        """Prepare for `step` as a saved replica would, with the saved `choice` of a codec."""
        if choice is not None:
            self.chooser = self.chooser or self._start_chooser(is_chosen=True)
        if self.chooser is not None and choice is not None:
            self.chooser.load_state_dict(choice)
            carried = Codec.model_validate(choice["carried"]) if choice["carried"] is not None else None
            self._change_rule(self.chooser.rule, (carried, {}) if carried is not None else None)
        self._use_rule(step)

    def prepare(self, step: int) -> None:
        """Reduce over the workers and with the codec that the rule selects for `step`, from now on."""
        if self.chooser is not None and self.gradients is not None:
            self._change_codec(self.chooser, self.gradients.reducer, step)
        self._use_rule(step)

    def _change_codec(self, chooser: CodecChooser, reducer: GradientReducer, step: int) -> None:
        """Take the chosen codec, if it changes, once all that was carried to the present one has been sent."""
        if isinstance(reducer, CarryingReducer) and reducer.carried is not None:
            return
        before = chooser.codec
        if (rule := chooser.take_next(step)) is None:
            return
        if not self._rule.keeps_optimizers_equal and rule.keeps_optimizers_equal:
            average_states(self._optimizer, self._parameters, self._all)
        states = reducer.state()
        self._change_rule(rule, (before, states) if states else None)

    def _change_rule(self, rule: Rule, carried: tuple[Codec, dict[str, Tensor]] | None) -> None:
        self._rule, self._carried = rule, carried
        self._ranks, self._unchanged = [], range(0)

    def _use_rule(self, step: int) -> None:
        PROGRESS.stamp(step, time.monotonic(), BETWEEN)
        PROGRESS.first_step = step if PROGRESS.first_step < 0 else PROGRESS.first_step
        if step in self._unchanged:
            return
        end = self._rule.next_change(step)
        self._unchanged = range(step, sys.maxsize if end is None else end)
        ranks, phase = list(self._rule.reduce_ranks(self._all, step)), self._rule.phase(step)
        if (ranks, phase) == (self._ranks, self._phase):
            return
        self.flush()
        self._close_gradients()
        landed = self.landing.state_dict() if self.landing is not None else {}
        self._end = self.gradients = self.landing = None
        self._ranks, self._phase, self.reduce_group = ranks, phase, self._open_reduce_group(ranks, step)
        if self.reduce_group.size == 1 and self.virtual is None:
            return
        self.landing = self._start_landing(step)
        starting = self.virtual or self.landing or self._rule
        reducer = starting.start_reducer(self.reduce_group, self._seed, step=step)
        if self.landing is not None:
            self.landing.load_state_dict(landed)
            if self.keeps_step_copies:
                self.landing.keep_copies()
        if self.chooser is not None:
            reducer.timed = []
        if self._carried is not None:
            reducer, self._carried = CarryingReducer(reducer, self.reduce_group, *self._carried), None
        fixed = self._bucket_bytes or reducer.bucket_bytes
        if fixed is None and self.reduce_group.device.type != "cpu":
            fixed = GPU_BUCKET_BYTES
        self.gradients = Gradients(self._parameters, self.reduce_group, reducer, fixed)
        if self.landing is not None:
            self.landing.gradients = self.gradients
            self.gradients.is_eager, self.gradients.before_launch = self.landing.is_eager, self.landing.before_launch
        if self._in_common is not None:
            self.gradients.is_eager = False  # sums over these ranks come first
        # Hooks are cycles that Python cannot collect: a replica without references would never release its memory.
        self._end = weakref.finalize(self, _let_go, self.gradients, self.landing)
        self._end.atexit = False

    def sum_first_weights(self, weight: float) -> float:
        """Return the sum of the reduce group's weights in the first step."""
        weight = weight if self.virtual is None else self.virtual.unit_of(weight)
        mine = self._shard.reduce_step_scalars(weight, torch.zeros(()), False)[0]
        first = torch.tensor([float(mine)], dtype=torch.float64, device=self.reduce_group.device)
        self.reduce_group.all_reduce(first, name="first weights").wait()
        return float(first) or 1.0

    def check_totals(self, scalars: StepScalars, loss: Tensor, step: int) -> StepTotals:
        """Return the reduce group's totals of a step.

        Args:
            scalars: Scalars of the reduce group, in transit.
            loss: Loss of this worker.
            step: Number of updates before this step.

        Raises:
            NonFiniteError: A loss is not finite; the message names the rank.
            GradientError: All weights are 0.
        """
        PROGRESS.enter(time.monotonic(), b"reduce")
        totals = scalars.wait() if self.virtual is None else self.virtual.sum_totals(scalars.wait())
        if self.chooser is not None:
            self.chooser.hear(totals.measured)
        if totals.num_non_finite:
            losses = {str(self._shard.world.rank): repr(float(loss))}
            for group in (self._shard.model_parallel_group, self.reduce_group):
                documents = group.gather_documents(losses, name="non-finite losses")
                losses = {rank: value for document in documents for rank, value in document.items()}
            bad = [f"rank {rank} ({value})" for rank, value in losses.items() if value in ("nan", "inf", "-inf")]
            raise NonFiniteError(
                f"the loss must be finite, but at step {step} it is not on {', '.join(bad)}; lower the "
                "learning rate, clip gradients, or look at the data of that step"
            )
        if self.judge is not None and totals.weight > 0:
            self.judge("loss", totals.loss / totals.weight)
        if totals.weight <= 0 and self.covers_all_workers and not self._rule.is_asynchronous:
            raise GradientError(
                f"the weights of a global batch must add up to more than 0, but at step {step} got {totals.weight}; "
                "see that some sample of each batch counts: check the weight given with the loss, such as a number of "
                "unmasked tokens, or drop samples without any"
            )
        return totals

    def arm(self, divisor: Divisor, share: float | Tensor, step: int, loss_scale: float) -> None:
        """Exchange gradients during the next backward pass.

        Args:
            divisor: Function that returns what the sum of all workers' gradients is divided by.
            share: This worker's share of its weight unit.
            step: Number of updates before this step.
            loss_scale: Factor of the loss.
        """
        if self._shard.reduce_scatter is not None:
            self._shard.reduce_scatter.arm(divisor, step, loss_scale)
        if self.landing is not None:
            self.landing.arm(share, step)
        if self._in_common is not None:
            self._in_common.arm(lambda: 1.0, step, loss_scale)
        if self.gradients is not None:
            self.gradients.arm(divisor, step, loss_scale, repeats=self._shard.repeats_blocks)

    def end_backward(self, *, last: bool = True, collect: bool = False) -> None:
        """Launch what the `last` backward of a step has left; keep what another one made for a virtual worker.

        Gradients that were computed without hooks, as in pipeline stages, are to be collected first.
        """
        self._shard.end_backward()
        if self.virtual is not None:
            self.virtual.end_backward()
        if not last:
            if self.virtual is not None and self.gradients is not None:
                self.gradients.keep()
            return
        if self._in_common is not None:
            if collect:
                self._in_common.collect()
            self._in_common.finish()
            self._in_common.receive(self._in_common.buckets, 1.0)
            collect = True  # what has arrived
        if self.gradients is not None:
            if collect:
                self.gradients.collect()
            self.gradients.finish()
            return
        self._shard.complete_gradients(self._parameters)  # a loop may change them before the update, as it would alone

    @property
    def is_refused_alike(self) -> bool:
        """Whether all workers refuse an update alike, and can go on."""
        is_plain = self._shard.is_whole and self._shard.mesh is None and self._rule.keeps_replicas_equal
        return is_plain and self.covers_all_workers and (self.landing is None or isinstance(self.landing, StepCoding))

    def abandon(self, error: Exception) -> bool:
        """Drop a step that has failed on all workers alike; return False if they may be out of step now."""
        self.failure = type(error)
        if self._shard.reduce_scatter is not None:
            self._shard.reduce_scatter.roll_back()
        if not (isinstance(error, NonFiniteError | SpikeError) and self.is_refused_alike):
            return False
        if self.gradients is not None:
            for work in filter(None, [bucket.work for bucket in self.gradients.buckets]):
                work.wait()
            self.gradients.reducer.roll_back()
            self.gradients.reset()
        if self.virtual is not None:
            self.virtual.roll_back()
        self._drop_gradients()
        self.failure = None
        return True

    def drop_step(self) -> bool:
        """Forget a step whose peers are lost, without waiting for them; return whether it is half applied."""
        is_torn = self.landing is not None and self.landing.drop()
        if self.gradients is not None:
            self.gradients.reducer.roll_back()
        if self.virtual is not None:
            self.virtual.roll_back()
        self._drop_gradients()
        return is_torn

    def begin_backward(self, *, is_first: bool) -> None:
        """Apply what forward did not need; before the `is_first` backward of a step, drop gradients of other losses."""
        PROGRESS.enter(time.monotonic(), b"backward")
        if self.landing is not None:
            self.landing.begin_backward()
        if is_first:
            self._drop_gradients()

    def receive(self, divisor: float, step: int, *, may_skip: bool) -> float:
        """Wait for each bucket, divide it by the weight, and return the seconds waited."""
        waited_s = sum(bucket.waited_s for bucket in self._in_common.buckets) if self._in_common is not None else 0.0
        if self.gradients is None:
            self._clear_unused(step, may_skip=may_skip)
            gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
            if divisor != 1.0 and gradients:
                torch._foreach_div_(gradients, divisor)
            is_unseen = not may_skip and self._optimizer_step.clip_norm is None and self._all.device.type == "cpu"
            if is_unseen and not all(map(is_finite, gradients)):
                raise NonFiniteError(
                    f"gradients must be finite, but at step {step} some are not, while the loss is; lower the learning "
                    "rate, or look at that step's data"
                )
            self.unused = [name for name, parameter in self._parameters.items() if parameter.grad is None]
            return waited_s
        buckets = self.gradients.buckets
        unused = self.gradients.receive(buckets, divisor)
        self.unused = list(dict.fromkeys([*unused, *self._clear_unused(step, may_skip=may_skip)]))
        self.gradients.check_finite(buckets, step, may_skip=may_skip)
        if self.compare is not None and self.covers_all_workers:
            self.compare(step)
        return waited_s + sum(bucket.waited_s for bucket in buckets)

    def finish(self, *, skipped: bool) -> list[BucketTimes]:
        """Commit or roll back the codecs' state, drop the step's gradients, and return the times of its buckets."""
        common = [self._in_common.time(bucket) for bucket in self._in_common.buckets] if self._in_common else []
        if self._in_common is not None:
            self._in_common.reset()
        if self.gradients is None:
            self._drop_gradients()
            return common
        reducer = self.gradients.reducer
        reducer.roll_back() if skipped else reducer.commit(self.unused)
        times = [self.gradients.time(bucket) for bucket in self.gradients.buckets]
        self.gradients.reset()
        return times

    def land_by_bucket(self, landing: BucketLanding, divisor: float, step: int) -> list[BucketTimes]:
        """Let the optimizer step with one bucket after another; return the times of the buckets that were applied."""
        times = landing.land(divisor, step)
        self.unused = landing.unused
        return times

    def warn_unused(self, step: int) -> list[str]:
        """Warn once of each parameter that no rank of the reduce group used in `step`; return the new ones."""
        new = [name for name in self.unused if name not in self._warned_unused]
        self._warned_unused.update(new)
        if new:
            warn_of_unused(new, step, "on any rank" if self.covers_all_workers else "here")
        return new

    def flush(self) -> None:
        """Apply the buckets that wait for the next forward."""
        if self.landing is not None:
            self.landing.flush()

    def adapt_layout(self, times: StepTimes) -> None:
        """Adapt layout and bucket size after a step, and measure it for the choice of a codec."""
        if self.chooser is not None and self.gradients is not None:
            timed = self.gradients.reducer.timed or []
            self.chooser.note(measure_step(times, timed, self.chooser.copy_s))
            timed.clear()
        if self.landing is not None:
            self.landing.end_step()
        if self.gradients is not None:
            self.gradients.adapt_layout(times)

    def close(self) -> None:
        """Remove the hooks from the parameters, and close connections and threads."""
        self._close_gradients()
        if self._end_common is not None:
            self._end_common()

    def _close_gradients(self) -> None:
        if self._end is not None:
            self._end()

    def _start_common(self) -> Gradients | None:
        """Return the gradients to sum over the ranks that share experts, in buckets whose layout never changes."""
        group = self._shard.expert_group
        if group is None:
            return None
        common = {name: p for name, p in self._parameters.items() if not is_split(p, "expert")}
        gradients = Gradients(common, group, DenseReducer(group, None), self._bucket_bytes or GPU_BUCKET_BYTES)
        self._end_common = weakref.finalize(self, gradients.close)
        self._end_common.atexit = False
        return gradients

    def _clear_unused(self, step: int, *, may_skip: bool) -> list[str]:
        """Return the parameters that no rank which shares them used; refuse a sum of shards that is not finite."""
        # A codec's sum is NaN where something is not finite: the norm, or the search for overflows, sees that too.
        is_unseen = not may_skip and self._optimizer_step.clip_norm is None
        use = self._shard.clear_unused_gradients(self._parameters, self.reduce_group, checks_finite=is_unseen)
        if use.num_non_finite or use.num_overflown:
            found = f"on {use.num_non_finite} ranks" if use.num_non_finite else "in the sum over ranks only"
            raise NonFiniteError(
                f"gradients must be finite, but at step {step} some are not, {found}, while the loss is; lower the "
                "learning rate, or look at that step's data"
            )
        return use.unused

    def _drop_gradients(self) -> None:
        self._shard.has_whole_gradients = False
        if self._in_common is not None:
            self._in_common.drop()
        if self.gradients is not None:
            self.gradients.drop()
        else:
            for parameter in self._parameters.values():
                parameter.grad = None

    def _start_chooser(self, *, is_chosen: bool = False) -> CodecChooser | None:
        """Return the chooser of codec auto; None on one host, unless it must leave what `is_chosen` already."""
        rule, may_choose = self._rule, len(self._all.host_ranks) < self._all.size  # no codec is faster than memory
        if not isinstance(rule, EveryStep) or not isinstance(rule.codec, AutoCodec):
            return None
        if self._all.size == 1 or not (may_choose or is_chosen):
            return None
        step = self._optimizer_step
        refused = refuse_steps(self._parameters, "fp16" if step.is_scaled else "", self._landing, self._shard.layout)
        if not is_known(self._optimizer):
            refused = refused or f"with {type(self._optimizer).__name__}, which may have a state without a mean"
        return CodecChooser(
            rule,
            [local(parameter).shape for parameter in self._parameters.values()],
            rank=self._all.rank,
            num_workers=self._all.size,
            is_adaptive=is_adaptive(self._optimizer),
            steps_refused=refused,
            steps_overlap=step.clip_norm is None,
            bucket_bytes=self._bucket_bytes,
            device=self._all.device,
            may_choose=may_choose,
        )

    def _start_landing(self, step: int) -> BucketLanding | None:
        if isinstance(self._rule, EveryStep) and self._rule.codes_steps(step):
            return StepCoding(self._optimizer, self._rule, self._parameters, self._optimizer_step)
        if self._landing == "update":
            return None
        if self._landing == "arrival":
            return BucketLanding(self._optimizer, self._rule)
        return ForwardLanding(self._optimizer, self._rule, self._module, self._parameters)

    def _open_reduce_group(self, ranks: list[int], step: int) -> Group:
        if len(ranks) == self._all.size:
            return self._all
        if len(ranks) == 1:
            return LocalGroup(device=self._all.device, epoch=self._all.epoch)
        return self._all.subgroup(ranks, f"reduce group from step {step}")


def _let_go(gradients: Gradients, landing: BucketLanding | None) -> None:
    if landing is not None:
        landing.close()
    gradients.close()
