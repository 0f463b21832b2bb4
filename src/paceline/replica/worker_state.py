"""State of a worker other than its model and optimizer, and its way into a checkpoint and back."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Size, Tensor, nn

from paceline.comm.group import Group
from paceline.comm.pacing import limit_bandwidth
from paceline.compression import AutoCodec
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import CommunicationError, SettingsError
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.replica.buffer_copies import BufferCopies, list_spoilt_buffers
from paceline.replica.codec_chooser import CodecChange
from paceline.replica.distance import ConsensusDistance
from paceline.replica.optimizer_mean import average_states
from paceline.replica.optimizer_step import OptimizerStep
from paceline.replica.parameter_average import ParameterAverage
from paceline.replica.reduction import GradientReduction
from paceline.replica.step_result import StepResult
from paceline.replica.step_scalars import StopVotes
from paceline.sync.every_step import EveryStep
from paceline.sync.idle import find_idleness
from paceline.sync.rule import Rule
from paceline.sync.synchroniser import Abandoned, Delays, HandedOver, LocalStep, ServedProgress, Synchroniser

_LEAST_UPDATES = 10
"""Number of updates from which on a rule that never acted is warned of: fewer are a trial."""


class IdleRuleWarning(UserWarning):
    """A rule never acted in a loop of one's own."""


class WorkerState:
    """Counters of one worker, and the state of its codecs and its rule.

    Args:
        module: The model.
        rule: The synchronisation rule.
        shard: Model shard of this rank.
        parameters: Parameters that are trained, by name.
        optimizer_step: Optimizer step, with the loss scale.
        reduction: Reduction of gradients, with the bucket layout and the codecs' residuals.
        synchroniser: Synchroniser, with the rule's state; None if the rule has none.
        stop_votes: Stop votes, with the weight since the last sync step; None without votes.
        ema: Decay of moving averages of the parameters; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        shard: ModelShard,
        parameters: Mapping[str, nn.Parameter],
        optimizer_step: OptimizerStep,
        reduction: GradientReduction,
        synchroniser: Synchroniser | None,
        stop_votes: StopVotes | None,
        ema: float | None,
    ) -> None:
        self._module, self._rule, self._shard, self._parameters = module, rule, shard, parameters
        self._optimizer_step, self._reduction = optimizer_step, reduction
        self._synchroniser, self._stop_votes = synchroniser, stop_votes
        is_equal = rule.keeps_replicas_equal
        self.average = None if ema is None else ParameterAverage(parameters, ema, shard.group, is_equal=is_equal)
        """Moving averages of the parameters; None without `ema`."""
        limit_bandwidth(self, rule.max_bandwidth)
        self.distance = ConsensusDistance(list(parameters.values()), shard, synchroniser)
        self.num_updates = 0
        """Number of updates."""
        self.weight_unit: float | None = None
        """Unit of numerators: the last step's weight. If the weight stays the same the divisor is exactly 1, which
        saves a pass over the gradients."""
        self.is_begun = False
        """Whether rule and codecs have started, anew or from a loaded state."""
        self.is_torn = False
        """Whether an update has begun to change the model and has not ended."""
        self.is_exchange_due = False
        """Whether the optimizer has taken its step, and the rule's exchange of that step is still to be made."""
        self.buffers: BufferCopies | None = None
        """Copies of the module's buffers after the last update, for whoever goes on without lost workers."""
        self.keeps_refused = any(True for _ in module.buffers())
        """Whether a step whose update is refused leaves buffers as before its forward passes: training may go on."""
        self._before_step: BufferCopies | None = None
        self._has_begun_step = False
        self._nan_at_start = set(list_spoilt_buffers(module, of_norms=False))
        self.on_undecided: Callable[[], None] | None = None
        """Function called before an update if it is not known whether all ranks make it; None if nobody asks.

        With one, ranks say before each update that they have all it takes. So if any has heard of all, those that are
        left make it too, whatever happens to others. Who does not hear of all makes it as well, since others may have
        heard; but some may lack gradients, as the rank that they share a model with is lost, and then all go on from
        the state before, if no replica of their part has made it. So the function must copy that state.
        """
        self._undecided: CommunicationError | None = None
        self.last_result: tuple[int, StepResult] | None = None
        """Result of the last update, with the number of updates then; None before the first."""
        self.warns_of_idleness = True
        """Whether `close` warns of a rule that never acted; a run, which knows its length, says so at its beginning."""

    def judge_with(self, judge: Callable[[str, float], None]) -> None:
        """Let `judge` see each step's loss and gradient norm before the update; it raises where that must not be made.

        It must decide the same on every worker: what it sees is the same where gradients are summed over all of them.
        """
        self._reduction.judge = self._optimizer_step.judge = judge

    def keep_step_copies(self) -> None:
        """Copy what a step changes before its end, so that it can be dropped then too; not in the step under way."""
        self._reduction.keeps_step_copies = True
        if self._reduction.landing is not None:
            self._reduction.landing.keep_copies()

    def compare_gradients_with(self, compare: Callable[[int], None]) -> None:
        """Let `compare` see each step's gradients, in the parameters, once they are summed over all workers."""
        self._reduction.compare = compare

    def skip_update(self) -> None:
        """Count an update that was refused, and dropped on all workers, as one that changed nothing."""
        self.num_updates += 1
        self._reduction.prepare(self.num_updates)

    @property
    def gradient_buffers(self) -> list[Tensor]:
        """Buffers of gradients that last from step to step; empty if autograd allocates gradients anew."""
        return self._reduction.list_buffers()

    def agree_on_update(self) -> bool:
        """Wait until all ranks have what an update takes; return that it may begin, also if some are lost."""
        assert self.on_undecided is not None
        try:
            self._shard.world.barrier(name="all have their gradients")
        except CommunicationError as error:
            self._undecided = error
            with self.buffers.restored() if self.buffers is not None else nullcontext():
                self.on_undecided()
        return True

    def begin_forward(self) -> None:
        """Copy the buffers in the first forward of a step, if an update that is refused may give them back."""
        if self._reduction.virtual is not None:
            self._reduction.virtual.begin_forward()
        elif not self._has_begun_step and self.buffers is None and self.keeps_refused:
            if self._before_step is None and self._reduction.is_refused_alike:
                self._before_step = BufferCopies(self._module, only_changing=True)
            elif self._before_step is not None:
                self._before_step.note()
        self._has_begun_step = True

    def take_buffers_back(self) -> None:
        """End a step whose update is refused, with the buffers as they were before its forward passes."""
        copies = self.buffers or self._before_step
        if copies is not None and self._has_begun_step:
            copies.restore()
        self._has_begun_step = False

    def find_spoilt_buffer(self) -> str:
        """Return a buffer that training has made NaN, or a norm's statistic that is not finite; empty without any."""
        return next((name for name in list_spoilt_buffers(self._module) if name not in self._nan_at_start), "")

    def end_update(self) -> None:
        """Copy the buffers as they are after an update.

        Raises:
            CommunicationError: Others were lost before they said whether they can make it.
        """
        self._has_begun_step = False
        if self.buffers is not None:
            self.buffers.note()
        if self._undecided is not None:
            raise self._undecided

    def close(self) -> None:
        """Lift the limit of the bandwidth, and warn, on rank 0, if the rule never acted in all updates of a loop."""
        limit_bandwidth(self, None)
        group, has_failed = self._shard.group, sys.exc_info()[0] is not None
        if group.rank or self.num_updates < _LEAST_UPDATES or has_failed or not self.warns_of_idleness:
            return
        shapes = [parameter.shape for parameter in self._parameters.values()]
        if (idleness := find_idleness(self._rule, self.num_updates, shapes, group.size)) is not None:
            warnings.warn(
                f"{idleness.reason}; lower {idleness.field} of {type(self._rule).__name__}, or take more steps",
                IdleRuleWarning,
                stacklevel=3,
            )

    def count_delays(self) -> Delays | None:
        """Return the staleness of pushes to servers; None without servers."""
        return self._synchroniser.count_delays() if self._synchroniser is not None else None

    def abandon_step(self) -> None:
        """Drop the step under way, whose peers are lost, without waiting for them.

        What is left is the state after `num_updates` updates, unless it `is_torn`; or after the next one too, but for
        its exchange, if that `is_exchange_due`.
        """
        outcome = self._synchroniser.abandon() if self._synchroniser is not None else Abandoned.TORN
        has_begun, is_half_reduced = self.is_torn, self._reduction.drop_step()
        self.is_exchange_due = has_begun and outcome is Abandoned.DUE
        self.is_torn = is_half_reduced or (has_begun and outcome is Abandoned.TORN)
        if self.is_exchange_due:
            return  # samples and statistics of that step count
        if has_begun and not self.is_torn and outcome is not Abandoned.OPEN:
            self.end_exchange()
            return
        if self._stop_votes is not None:
            self._stop_votes.roll_back()
        if self.buffers is not None:
            self.buffers.restore()

    def make_exchange(self) -> None:
        """Make the exchange that `is_exchange_due` among the present workers, and count its update; all call it.

        A worker that is alone, without the rule, has nothing to exchange.
        """
        votes, group = self._stop_votes, self._shard.group
        weight = float(votes.weight_since_sync) if votes is not None else 0.0
        total = torch.tensor([weight], dtype=torch.float64, device=group.device)
        group.all_reduce(total, name="weight of the exchange").wait()
        if self._synchroniser is not None:
            self._synchroniser.after_update(LocalStep(self.num_updates, weight, float(total)))
        self.end_exchange()

    def end_exchange(self) -> None:
        """Count the update whose exchange has been made or left out."""
        is_synced = self._synchroniser is None or self._synchroniser.is_sync_step(self.num_updates)
        if self._stop_votes is not None:
            self._stop_votes.commit()
            if is_synced:
                self._stop_votes.weight_since_sync = 0.0
        if self.average is not None:
            self.average.update()
        self.num_updates, self.is_exchange_due = self.num_updates + 1, False
        if self.buffers is not None:
            self.buffers.note()

    def settle(self, optimizer: torch.optim.Optimizer, *, is_new: bool) -> str:
        """Make what workers have in common fit the present ones, and make an exchange that is due; all call it.

        Args:
            optimizer: Optimizer of this worker.
            is_new: Whether this worker was sent the first one's state.

        Returns:
            Words on what was changed; empty if nothing was.
        """
        words = [self._synchroniser.repair(is_new=is_new)] if self._synchroniser is not None else []
        if self.is_exchange_due:
            self.make_exchange()
        if self._rule.meets_on_change and self._synchroniser is not None:
            self._meet(self._synchroniser, optimizer)
            words.append("all workers have met: parameters and the optimizer's state are their mean")
        return "; ".join(filter(None, words))

    @torch.no_grad()
    def _meet(self, sync: Synchroniser, optimizer: torch.optim.Optimizer) -> None:
        """Take the workers' mean of parameters, and of the optimizer's state, and begin a period."""
        with sync.consensus():
            mean = {name: parameter.clone() for name, parameter in self._parameters.items()}
        average_states(optimizer, dict(self._parameters), self._shard.group)
        for name, parameter in self._parameters.items():
            parameter.copy_(mean[name])
        sync.load_state([], {})
        if self._stop_votes is not None:
            self._stop_votes.weight_since_sync = 0.0

    def part(self) -> None:
        """Give each other what is not to be lost with a worker that leaves now; all call it."""
        if self._synchroniser is not None:
            self._synchroniser.part()

    @property
    def progress(self) -> ServedProgress | None:
        """What servers had applied when workers changed; None if each worker knows by itself."""
        return self._synchroniser.progress if self._synchroniser is not None else None

    @property
    def steps_alone(self) -> bool:
        """Whether workers make the present step without all others."""
        return not self._reduction.covers_all_workers

    def last_exchange(self) -> int:
        """Return the number of updates after which all of this worker's progress was exchanged last."""
        sync = self._synchroniser
        return sync.last_exchange(self.num_updates) if sync is not None else self.num_updates

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each other worker's model when it was mixed in last, by rank; for gossip."""
        return self._synchroniser.last_mixed() if self._synchroniser is not None else {}

    def own_state(self) -> dict[str, Any]:
        """Return what only this worker knows, for any other number of workers; nothing is exchanged.

        The rest is the same on all workers: `paceline.replica.state.capture_alone`.
        """
        sync, document = self._synchroniser, self.document()
        reducer = self._reduction.gradients.reducer if self._reduction.gradients is not None else None
        return {
            "feedback": reducer.detached_state(self._shapes) if reducer is not None else {},
            "codec": self.codec,
            "sync": sync.detached_state() if sync is not None else {},
            "shared": sync.shared_state() if sync is not None else {},
            "ema": dict(self.average.tensors) if self.average is not None else {},
            "weight_since_sync": float(document["weight_since_sync"]),
            "sync_document": document["sync_document"],
        }

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Load the `own_state` that this worker had among others, after the state that all have in common."""
        rank, size = self._shard.group.rank, self._shard.group.size
        by_worker: list[dict[str, Tensor]] = [{} for _ in range(size)]
        if self._stop_votes is not None:
            self._stop_votes.weight_since_sync = own["weight_since_sync"]
        if self._synchroniser is not None:
            if own["sync_document"]:  # a worker that was alone had no rule
                self._synchroniser.load_document(own["sync_document"])
            self.load_sync_state([own["sync"] if other == rank else {} for other in range(size)], own["shared"])
        if self.average is not None:
            self.average.load(own["ema"])
        if own["feedback"] and own["codec"] == self.codec:
            by_worker[rank] = own["feedback"]
            self.load_feedback(by_worker)
        elif own["feedback"]:
            warnings.warn(
                f"residuals of codec {own['codec']!r} are dropped, since this worker goes on alone, without a codec",
                FeedbackDroppedWarning,
                stacklevel=2,
            )

    @property
    def _shapes(self) -> dict[str, Size]:
        return {name: local(parameter).shape for name, parameter in self._parameters.items()}

    def document(self) -> dict[str, Any]:
        """Return this worker's state as JSON, without tensors and without the module's and the optimizer's."""
        self._reduction.flush()
        return {
            "num_updates": self.num_updates,
            "num_workers": self._shard.group.size,
            "weight_unit": self.weight_unit,
            "scaler": self._optimizer_step.state_dict(),
            "codec": self.codec,
            "sharded_codec": self._shard.reduce_scatter.codec.name if self._shard.reduce_scatter is not None else "",
            "codec_choice": self._reduction.choice(),
            "gradients": self._reduction.gradients.state_dict() if self._reduction.gradients is not None else None,
            "virtual_workers": self._reduction.virtual.document() if self._reduction.virtual is not None else None,
            "landing": self._reduction.landing.state_dict() if self._reduction.landing is not None else {},
            "sync": self._rule.name,
            "weight_since_sync": self._stop_votes.weight_since_sync if self._stop_votes is not None else 0.0,
            "sync_document": self._synchroniser.document() if self._synchroniser is not None else {},
        }

    def load_document(self, state: Mapping[str, Any], *, is_own: bool = True) -> None:
        """Load a saved document. A saved bucket layout is kept, since sums over three ranks or more depend on it.

        Args:
            state: State that `document` returned.
            is_own: Whether the state is this worker's, of the same rule among the same number of workers.
        """
        self.is_begun, self._has_begun_step = True, False
        self.num_updates = state["num_updates"]
        if self._reduction.virtual is not None:
            self._reduction.virtual.check_saved(state.get("virtual_workers"))
        self._reduction.resume(self.num_updates, state.get("codec_choice"))
        self.weight_unit = state["weight_unit"]
        self._optimizer_step.load_state_dict(state["scaler"])
        if self._reduction.gradients is not None and state["gradients"]:
            self._reduction.gradients.load_state_dict(state["gradients"])
        if self._reduction.landing is not None and state["num_workers"] == self._shard.group.size:
            self._reduction.landing.load_state_dict(state.get("landing", {}))
        if is_own and self._stop_votes is not None:
            self._stop_votes.weight_since_sync = state["weight_since_sync"]
        if is_own and self._synchroniser is not None:
            self._synchroniser.load_document(state["sync_document"])

    def sync_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the synchronisation rule's state as named tensors: this worker's, and the one common to all."""
        if self._synchroniser is None:
            return {}, {}
        return self._synchroniser.state(), self._synchroniser.shared_state()

    @property
    def keeps_sync_state(self) -> bool:
        """Whether the rule has state: not if it only sums gradients, nor if the worker is alone."""
        return self._synchroniser is not None

    def load_sync_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load the rule's state of all saved workers; see `Synchroniser.load_state`."""
        if self._synchroniser is not None:
            self._synchroniser.load_state(saved, shared)

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Leave to the first worker what this one has; see `Synchroniser.hand_over`."""
        assert self._synchroniser is not None
        if self.average is not None:
            self.average.group = alone
        return self._synchroniser.hand_over(alone)

    @property
    def keeps_optimizers_equal(self) -> bool:
        """Whether the optimizer's state is equal on all workers now."""
        return self._reduction.rule.keeps_optimizers_equal

    def take_codec_changes(self) -> list[CodecChange]:
        """Return the changes of codec auto since the last call."""
        chooser = self._reduction.chooser
        return chooser.take_changes() if chooser is not None else []

    @property
    def codec(self) -> str:
        """Name of the codec of `feedback`; empty if there is no feedback, as in a world of one."""
        codec = self._reduction.gradients.reducer.state_of if self._reduction.gradients is not None else ""
        is_of_steps = self._rule.keeps_replicas_equal and not self.keeps_optimizers_equal
        return f"{codec} of steps" if codec and is_of_steps else codec

    def feedback(self) -> dict[str, Tensor]:
        """Return the state of this worker's codec, by parameter and site."""
        self._reduction.flush()
        return self._reduction.gradients.reducer.state() if self._reduction.gradients is not None else {}

    def load_feedback(self, saved: list[dict[str, Tensor]]) -> None:
        """Load the codecs' state of all saved workers; another number of workers divides it anew."""
        if self._reduction.gradients is not None:
            self._reduction.gradients.reducer.load_state(saved, self._shapes)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, without the module's and the optimizer's, as tensors and plain values.

        Each worker has its own, as it may have its own module and optimizer: save all three on every rank, or call
        `paceline.save`, which does so, fits any number of workers, and detects damage.
        """
        sync, shared = self.sync_state()
        state = {"document": self.document(), "feedback": self.feedback(), "sync": sync, "shared": shared}
        state["ema"] = self.average.tensors if self.average is not None else {}
        return state | {"sharded": self._shard.reduce_scatter.state() if self._shard.reduce_scatter is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this worker, after those of the module and the optimizer.

        Raises:
            SettingsError: The state is incomplete, or of another rule, codec or number of workers.
        """
        parts = {"document", "feedback", "sync", "shared", "sharded", "ema", "fingerprint"}
        if missing := sorted(parts - state.keys()):
            raise SettingsError(
                f"a replica's state must be complete, but {', '.join(missing)} is missing; load all that its "
                "state_dict returned, or resume with paceline.load_latest"
            )
        saved, here = state["document"], self.document()
        is_chosen = (
            saved.get("codec_choice") and isinstance(self._rule, EveryStep) and isinstance(self._rule.codec, AutoCodec)
        )
        for name in ("sync", "codec", "sharded_codec", "num_workers"):
            if saved[name] != here[name] and not (name == "codec" and is_chosen):
                raise SettingsError(
                    f"a replica's state must be of the same {name}, but got {saved[name]!r} for {here[name]!r}; go on "
                    "with the same, or resume with paceline.load_latest, which takes what fits"
                )
        self.load_document(saved)
        everybody: list[dict[str, Any]] = [{} for _ in range(self._shard.group.size)]
        everybody[self._shard.group.rank] = dict(state["sync"])
        self.load_sync_state(everybody, state["shared"])
        everybody = [{} for _ in range(self._shard.group.size)]
        everybody[self._shard.group.rank] = dict(state["feedback"])
        self.load_feedback(everybody)
        if self._shard.reduce_scatter is not None:
            self._shard.reduce_scatter.load_state(state["sharded"])
        if self.average is not None:
            self.average.load(state["ema"])

    def check_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to continue from a saved optimizer without the saved state of rule and codecs."""
        self.is_begun = True
        if (self.keeps_sync_state or self.codec) and _has_stepped(optimizer):
            raise SettingsError(
                f"sync {self._rule.name} must go on from its own state where the optimizer goes on from a saved one, "
                "but replica.load_state_dict was not called; resume with paceline.load_latest, or call "
                "replica.begin_anew() where the rule should begin here"
            )


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has state that it was not made with: some, such as Adagrad, are made with steps of 0.

    State of a parameter without a count of steps, such as a momentum, came with a step.
    """
    return any(bool(state.get("step", 1)) for state in optimizer.state.values())
