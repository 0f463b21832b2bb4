"""One worker's copy of the model, synchronised with the others."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.join import find_group
from paceline.comm.membership import Membership
from paceline.comm.progress import PROGRESS
from paceline.data.batch import Batch, is_borrowed, list_tensors
from paceline.errors import GradientError, SettingsError
from paceline.parallel.batch_norm import BatchNormScope, start_batch_norm
from paceline.parallel.local import local
from paceline.parallel.parallelize import find_shard
from paceline.parallel.zero_redundancy import local_optimizer, shard_optimizer
from paceline.replica.attributes import find_attribute
from paceline.replica.beginning import Beginning, start_alike
from paceline.replica.checks import Precision, check_numbers, check_replica, find_original, read_rule, refuse_backward
from paceline.replica.coded_steps import choose_coding
from paceline.replica.hashing import ReplicaComparison
from paceline.replica.landing import Landing
from paceline.replica.loss import Loss
from paceline.replica.optimizer_step import OptimizerStep, OptimizerStepResult, autocast
from paceline.replica.reduction import GradientReduction
from paceline.replica.step_result import StepResult, StepTimes
from paceline.replica.step_scalars import StepScalars, StepTotals, StopVotes, read_loss
from paceline.replica.virtual_workers import describe_exactness
from paceline.replica.worker_state import WorkerState
from paceline.sync.rule import Rule
from paceline.sync.synchroniser import LocalStep, SampleDispatcher, SyncResult, WorkerContext

LossOfOutput = Callable[[Any, Batch], Loss]
"""The loss of a micro-batch, from a model's output for it and the micro-batch."""


class Replica:
    """A module and its optimizer, trained together with those of the other workers.

    Call it to run the module forward, then `backward` (once per micro-batch) and `update`. Gradients are exchanged
    while the last backward runs; each worker's counts by its weight. In a world of one it does what a plain loop does.
    Attributes that it has not are those of the module: ``replica.config``, or a method, which runs as forward does.

    Args:
        module: Any module, whose parameters and buffers are taken from rank 0, or the one that `paceline.parallelize`
            returned; either may be compiled by `torch.compile`.
        optimizer: Optimizer over parameters of `module`.
        group: The workers; by default those that `paceline.join` has joined.
        sync: Synchronisation rule, or its name.
        precision: Precision of forward: ``bf16`` and ``fp16`` run it under autocast, fp16 with loss scaling.
        clip_norm: Largest global gradient norm, after averaging.
        bucket_bytes: Size of the buckets of gradients, the first of 1 MiB at most; by default the codec's own, else
            25 MiB on GPUs, and on CPUs what suits the network in the first steps (`StepTimes.bucket_choice`).
        landing: Moment at which the optimizer applies gradients. ``"arrival"``: with each bucket, while others are in
            transit. ``"next_forward"``: just before forward uses a bucket's parameters; call `flush` before anything
            but forward and backward reads them.
        ema: Decay of an exponential moving average of the parameters, such as 0.999; None for none. See `averaged`.
        batch_norm: Samples of BatchNorm's statistics in training: this worker's own, or ``"global"``: all workers',
            which must then run forward equally often.
        hash_interval: Steps from one comparison of all replicas to the next, beside that before each checkpoint.
        seed: Random seed of the codecs.
        num_virtual_workers: The number that `Loader` has: weights are then the same bits on any number of workers.
        world: All processes, the workers of `group` first, if some only serve (`Rule.num_server_processes`).

    Raises:
        SettingsError: The optimizer holds other parameters than the module's, models differ, or settings do not fit.
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
        landing: Landing = "update",
        ema: float | None = None,
        batch_norm: BatchNormScope = "local",
        hash_interval: int = 100,
        seed: int = 0,
        num_virtual_workers: int | None = None,
        world: Group | None = None,
    ) -> None:
        self._compiled, module = module, find_original(module)
        self.module, self.optimizer = module, optimizer
        device = next((parameter.device for parameter in module.parameters()), None)
        self.shard = find_shard(module, group or find_group(device))
        if self.shard.mesh is not None and self.shard.layout.shards_optimizer:
            self.optimizer = shard_optimizer(optimizer, self.shard.mesh)
        self._given_optimizer = optimizer
        self.group = self.shard.group
        self.sync = read_rule(sync)
        self._runs_optimizer = self.sync.runs_optimizer
        self._precision, self._is_late = precision, landing == "next_forward"
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        check_numbers(clip_norm, bucket_bytes, hash_interval, seed)
        check_replica(self._compiled, optimizer, self.shard, self.sync, precision, landing, clip_norm, ema, batch_norm)
        self.sync = choose_coding(self.sync, optimizer, self._parameters, precision, landing, self.shard.layout)
        guarded = optimizer if landing == "update" else None
        self._optimizer_step = OptimizerStep(guarded, precision, clip_norm, self.shard, self._parameters)
        self._weight = self._last_loss = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self._scalars: StepScalars | None = None
        self._times = StepTimes()
        chosen: dict[str, object] = {"precision": precision, "landing": landing, "batch_norm": batch_norm, "ema": ema}
        chosen |= {"clip_norm": clip_norm, "bucket_bytes": bucket_bytes, "hash_interval": hash_interval, "seed": seed}
        chosen |= describe_exactness(num_virtual_workers, self.sync, self.shard, landing, batch_norm)
        start_alike(module, local_optimizer(self.optimizer), self.shard, self.sync, chosen)
        self._batch_norm = start_batch_norm(batch_norm, module, self.shard.statistics_group)
        watched = self._batch_norm if self._compiled is module else None  # a hook would compile it again
        self._beginning = Beginning(module, local_optimizer(self.optimizer), self.shard, self.sync, watched)
        self.comparison = ReplicaComparison(module, self.optimizer, self.shard, self.sync, hash_interval)
        self._reduction = GradientReduction(
            module,
            self._parameters,
            self.optimizer,
            self._optimizer_step,
            shard=self.shard,
            rule=self.sync,
            bucket_bytes=bucket_bytes,
            landing=landing,
            seed=seed,
            num_virtual_workers=num_virtual_workers,
        )
        held = None if self.shard.is_whole else {name: local(p).detach() for name, p in self._parameters.items()}
        context = WorkerContext(module, self.optimizer, self.group, seed, world, held)
        self._synchroniser = self.sync.start_synchroniser(context)
        self.membership.dispatcher = self.dispatcher or self.membership.dispatcher
        self._stop_votes: StopVotes | None = None
        if self._synchroniser is not None and not self.sync.is_asynchronous:
            self._stop_votes = StopVotes(self.group, self._synchroniser)
        holders = (self._parameters, self._optimizer_step, self._reduction, self._synchroniser, self._stop_votes)
        self.state = WorkerState(module, self.sync, self.shard, *holders, ema)
        """State that lasts from step to step, other than the model and its optimizer."""
        self.comparison.average = self.state.average
        self.membership.add_replica(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward in the chosen precision."""
        return self._run(self._compiled, *args, **kwargs)

    if not TYPE_CHECKING:  # so that a misspelt attribute is found there

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the module; methods that its class adds to `nn.Module` run as forward does."""
            return find_attribute(self, name, self._run, is_late=vars(self).get("_is_late", False))

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_step = torch.is_grad_enabled()  # evaluation is no part of one
        PROGRESS.enter(time.monotonic(), b"forward" if is_step else b"evaluate")
        if is_step:
            self._beginning.places.check()
            self._times.began_s = self._times.began_s or time.perf_counter()
            if self.state.keeps_refused or self._reduction.virtual is not None:
                self.state.begin_forward()
        forward = self.shard.forward_pass() if function is self._compiled else nullcontext()
        with self.autocast(), self._counting(not is_borrowed()), forward:
            landing = self._reduction.landing
            return landing.run(lambda: function(*args, **kwargs)) if landing is not None else function(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forward runs in."""
        return autocast(self._precision, self.group.device.type)

    def _counting(self, counts: bool) -> AbstractContextManager[None]:
        """Return the context of the module on samples that count, or not."""
        return self._batch_norm.running(counts=counts) if self._batch_norm is not None else nullcontext()

    @property
    def loss_scale(self) -> float | None:
        """Factor by which fp16 gradients are scaled; None in other precisions."""
        return self._optimizer_step.loss_scale if self._optimizer_step.is_scaled else None

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends for a step's gradients, as the codec estimates them."""
        scatter = self.shard.reduce_scatter
        return self._reduction.wire_bytes + (scatter.wire_bytes if scatter is not None else 0)

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Dispatcher of samples to workers that run at their own pace; None if all step together."""
        return self._synchroniser.dispatcher if self._synchroniser is not None else None

    @property
    def membership(self) -> Membership:
        """State of the workers as a group, such as their agreement to stop."""
        return self.shard.world.membership

    def should_save(self, every: int) -> bool:
        """Return whether it is time to save, the same on every worker: ask after each `update`.

        Args:
            every: Updates from one save to the next.

        Returns:
            True after each `every`-th update, and once all workers stop because a signal asked one of them to. If
            workers run at their own pace, after each `every`-th global batch; all then get a batch of weight 0.
        """
        return self.membership.should_save(every, None if self.dispatcher is not None else self.num_updates)

    def backward(
        self,
        loss: Tensor | Loss,
        *,
        weight: float | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        last: bool = True,
    ) -> None:
        """Add the gradients of `loss` to those of the step, and exchange them if it is the `last` of the step.

        Args:
            loss: Loss, 0-dim: a mean or a sum over `weight` samples or tokens, as `reduction` says. Or a `Loss`, which
                has its own weight.
            weight: Number of samples or tokens in the loss, such as `Batch.count` returns; 0 for a loss that must not
                count. It makes uneven shares and a short last batch right, so it must be given.
            reduction: Kind of `loss`: a mean or a sum.
            last: Whether this is the step's last backward; False while accumulating, on every worker alike. Nothing is
                exchanged then (except at the very first call, which agrees on the unit of weights).

        Raises:
            GradientError: `loss` is no 0-dim tensor, `weight` missing, negative or not finite, a gradient sparse or
                computed twice, a parameter unfrozen after the replica was made, or used before it was updated; or
                `update` was not called after the last backward.
        """
        is_mean = reduction == "mean" or isinstance(loss, Loss)
        loss, weight = read_loss(loss, weight, reduction, self.shard)
        self._begin_backward(weight, last=last)
        assert self.state.weight_unit is not None
        factor = weight if is_mean else float(weight > 0)
        numerator = loss.detach().double() * factor if weight else torch.zeros_like(self._loss)
        if self._reduction.virtual is not None:
            self._reduction.virtual.note(weight, numerator, last=last)
        if last:
            self._send_scalars(self._weight + weight, self._loss + numerator)
        # A loss of weight 0 may be NaN, and NaN times 0 is NaN; but ranks of one worker need each other.
        counts = weight > 0 or not self.shard.is_whole
        scale = factor / self.state.weight_unit
        scaled = loss if scale == 1.0 else loss * scale
        with self._counting(not is_borrowed()):  # for blocks that run forward again
            if self._batch_norm is not None:
                self._batch_norm.backward(self._optimizer_step.scale(scaled) if counts else scaled, counts=counts)
            elif counts:
                self._optimizer_step.scale(scaled).backward()
        if counts:
            # Only now, so that a failed backward leaves no weight behind.
            self._weight += weight
            self._loss = self._loss + numerator
        if self._reduction.landing is not None:
            self._reduction.landing.end_backward()
        self._reduction.end_backward(last=last)
        self._times.backward_ended_s = time.perf_counter()

    def backward_through(self, batch: Batch, loss: LossOfOutput, *, last: bool = True, timed: bool = False) -> None:
        """Run micro-batches forward and backward through the stages of a pipeline, instead of a call and `backward`.

        Every rank of a worker passes the same samples. Gradients are exchanged after all micro-batches.

        Args:
            batch: Samples of this worker; the first stage takes the tensors of its `inputs`.
            loss: Function that returns the loss of a micro-batch, given the model's output for it and the micro-batch.
            last: See `backward`.
            timed: Whether the pipeline records the times of its computations (`Pipeline.times`).
        """
        assert self.shard.pipeline is not None
        self._beginning.places.check()
        self._begin_backward(float(batch.num_samples), last=last)
        unit = self.state.weight_unit
        assert unit is not None

        def numerator(output: Tensor, data: Any) -> Tensor:
            num_samples = min(len(list_tensors(data)[0]), batch.num_samples)  # a borrowed sample does not count
            made = loss(output, batch.part(data, num_samples))
            self._weight, mean = self._weight + made.weight, made.whole_mean
            self._loss = self._loss + mean.detach().double() * made.weight
            return self._optimizer_step.scale(mean * (made.weight / unit))

        with self.autocast(), self._counting(batch.num_samples > 0):
            self.shard.pipeline.run(tuple(list_tensors(batch.inputs)), batch.both, numerator, timed=timed)
        if last:
            self.shard.reduce_tied_gradients(self._parameters)
            self._send_scalars(self._weight, self._loss)
            self._reduction.end_backward(collect=True)
        self._times.backward_ended_s = time.perf_counter()

    def update(self) -> StepResult:
        """Wait for the exchange, then let the optimizer take its step and drop the gradients.

        Raises:
            NonFiniteError: A loss, gradient or gradient norm is not finite. Parameters are unchanged (except those of
                earlier buckets, if buckets are applied one by one). Where all workers apply the same gradients, at the
                update, so are buffers, and the next step can be made.
            CommunicationError: A worker died or stopped answering.
            DivergenceError: Replicas are no longer equal.
        """
        if self._scalars is None:
            raise GradientError("backward(last=True) must come before update(), but it did not; call replica.backward")
        try:
            return self._update(self._scalars)
        except Exception as error:
            if self._reduction.abandon(error):
                self.state.take_buffers_back()
                self._end_step()
            raise

    def _update(self, scalars: StepScalars) -> StepResult:
        began_s, landed_step = time.perf_counter(), self.num_updates
        totals = self._reduction.check_totals(scalars, self._loss, self.num_updates)
        assert self.state.weight_unit is not None
        waited_s = time.perf_counter() - began_s
        divisor = (totals.weight or self.state.weight_unit) / self.state.weight_unit
        all_totals: StepTotals | None = None
        stop = totals.stop and self._reduction.covers_all_workers
        if self._reduction.landing is not None and self._reduction.landing.is_ready:
            self._times.buckets = self._reduction.land_by_bucket(self._reduction.landing, divisor, self.num_updates)
            waited_s += sum(bucket.waited_s for bucket in self._times.buckets)
            landing = self._reduction.landing
            stepped, result = OptimizerStepResult(landing.gradient_norm, False), SyncResult()
            landed_step -= landing.delay
        else:
            waited_s += self._reduction.receive(divisor, self.num_updates, may_skip=self._optimizer_step.is_scaled)
            if self._stop_votes is not None:
                all_totals, is_voted = self._stop_votes.end(self.num_updates)
                stop |= is_voted
            stepped, result = self._step(all_totals, has_gradients=totals.weight > 0)
            stop |= result.stop
        self.membership.is_stopping |= stop
        newly_unused = self._reduction.warn_unused(landed_step) if totals.weight else []
        self.state.weight_unit = totals.weight or self.state.weight_unit
        # Torch's schedulers warn if another optimizer than their own steps, such as a server's.
        self._given_optimizer._opt_called = True  # type: ignore[attr-defined]
        # If workers run at their own pace, a step without samples is no step.
        if self.state.average is not None and not stepped.skipped and (totals.weight or not self.sync.is_asynchronous):
            self.state.average.update()
        self.state.num_updates, self.state.is_torn = self.state.num_updates + 1, False
        if self._stop_votes is not None:
            self._stop_votes.commit()
        self._times.ended_s, reported = time.perf_counter(), all_totals or totals
        self._last_loss = reported.loss / reported.weight if reported.weight else self._last_loss
        made = StepResult(
            loss=self._last_loss,
            weight=reported.weight,
            gradient_norm=stepped.gradient_norm,
            communication_s=waited_s + result.waited_s,
            skipped=stepped.skipped,
            stop=stop,
            newly_unused=newly_unused,
            wire_bytes=result.wire_bytes + self.wire_bytes + self.shard.take_sent_bytes(),
            times=self._times,
        )
        self.state.last_result = (self.num_updates, made)
        if self.state.keeps_refused or self.state.buffers is not None or self.state.on_undecided is not None:
            self.state.end_update()  # before anything else is exchanged, in which others may be lost
        self._reduction.adapt_layout(self._times)
        if self.comparison.interval and self.num_updates % self.comparison.interval == 0:
            self.compare()
        self._end_step()
        self._reduction.prepare(self.num_updates)
        return made

    def _end_step(self) -> None:
        """Forget the step's gradients and times."""
        self._weight, self._loss, self._scalars, self._times = 0.0, torch.zeros_like(self._loss), None, StepTimes()

    def flush(self) -> None:
        """Apply the buckets that wait for the next forward, so that parameters are those after the last update."""
        self._reduction.flush()

    def compare(self) -> None:
        """Compare all replicas, if they should be equal and `hash_interval` is not 0; may raise `DivergenceError`."""
        self.flush()
        self.comparison.check(self.num_updates, with_optimizers=self.state.keeps_optimizers_equal)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Replace parameters inside by the rule's consensus of all workers; every worker enters it at the same step."""
        self.flush()
        with self.state.distance.measured():
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace parameters inside by their moving averages, to evaluate or save them; all workers enter it together.

        If workers differ, it is the mean of their averages; before the first update, the parameters of `consensus`.

        Raises:
            SettingsError: The replica was made without `ema`.
        """
        average = self.state.average
        if average is None:
            raise SettingsError("ema must be given to the Replica to have averages of its parameters; try ema=0.999")
        with self.consensus(), average.applied(self.module):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return counters, loss scale, rule's state, codecs' residuals, averages; not module and optimizer."""
        return self.state.state_dict() | {"fingerprint": self._beginning.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this worker, after those of the module and the optimizer.

        Raises:
            SettingsError: The state is incomplete, or of another rule, codec or number of workers.
        """
        self.state.load_state_dict(state)
        self._beginning.expect(state["fingerprint"])

    def begin_anew(self) -> None:
        """Start rule and codecs anew, with the module and the optimizer's state as they are: not a resume."""
        self.state.is_begun = True

    @property
    def num_updates(self) -> int:
        """Number of updates since the beginning of training."""
        return self.state.num_updates

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradient is waiting for an `update`."""
        return self._scalars is None and not self._weight

    def close(self) -> None:
        """Apply the remaining buckets, remove hooks, and close connections and threads, as leaving the group does."""
        if not self.membership.remove_replica(self):
            return
        try:
            self.flush()
        finally:
            self._optimizer_step.close()
            self._reduction.close()
            if self._batch_norm is not None:
                self._batch_norm.close()
            if self._synchroniser is not None:
                self._synchroniser.close()
            self.shard.close()
            self.state.close()

    def _begin_backward(self, weight: float, *, last: bool) -> None:
        if self._scalars is not None or any(p.requires_grad for p in self._frozen.values()):
            refuse_backward(self._frozen, self._reduction.failure, is_exchanging=self._scalars is not None)
        if not self._beginning.is_checked:
            self._beginning.check(is_resumed=self.state.is_begun)
        if not self.state.is_begun:
            self.state.check_begin(local_optimizer(self.optimizer))
        self._reduction.begin_backward(is_first=not self._times.backward_began_s)
        self._times.backward_began_s = self._times.backward_began_s or time.perf_counter()
        self._times.began_s = self._times.began_s or self._times.backward_began_s
        if self.state.weight_unit is None:
            self.state.weight_unit = self._reduction.sum_first_weights(weight)
        self.shard.begin_backward(last=last)

    def _send_scalars(self, weight: float, numerator: Tensor) -> None:
        """Send the weight of this worker's samples of the step, and launch their gradients."""
        assert self.state.weight_unit is not None
        wants_stop = bool(self.membership.stop_requested_by)
        total, numerator, stop = self.shard.reduce_step_scalars(weight, numerator, wants_stop)
        self._scalars = self._reduction.send_scalars(total, numerator, stop)
        if self._stop_votes is not None:
            self._stop_votes.begin(self.num_updates, total, numerator, stop)
        divisor = partial(self._scalars.divisor, self.state.weight_unit)
        self._reduction.arm(divisor, total / self.state.weight_unit, self.num_updates, self.loss_scale or 1.0)

    def _step(self, all_totals: StepTotals | None, *, has_gradients: bool) -> tuple[OptimizerStepResult, SyncResult]:
        """Step the optimizer, with the rule's work before and after, and drop the gradients."""
        sync = self._synchroniser
        weight_since_sync = self._stop_votes.weight_since_sync if self._stop_votes is not None else self._weight
        total = all_totals.weight_since_sync if all_totals else 0.0
        step = LocalStep(self.num_updates, float(weight_since_sync), total, bool(self.membership.stop_requested_by))

        def push(is_overflown: bool) -> None:
            if sync is not None:
                sync.before_update(replace(step, weight=0.0) if is_overflown else step)
            if self._reduction.virtual is not None:  # first, so that the update is whole whoever is lost in it
                self._reduction.virtual.end_step()
            self.state.is_torn = self.state.on_undecided is None or self.state.agree_on_update()

        self._times.optimizer_began_s = time.perf_counter()
        stepped = self._optimizer_step.run(
            self.optimizer, self.num_updates, push, is_optimizer_run=self._runs_optimizer, has_gradients=has_gradients
        )
        self._times.optimizer_ended_s = time.perf_counter()
        self._times.buckets = self._reduction.finish(skipped=stepped.skipped)
        if self.shard.reduce_scatter is not None:
            self.shard.reduce_scatter.roll_back() if stepped.skipped else self.shard.reduce_scatter.commit()
        result = sync.after_update(step) if sync is not None else SyncResult()
        if self._stop_votes is not None and (all_totals or self._reduction.covers_all_workers):
            self._stop_votes.weight_since_sync = 0.0
        return stepped, result
