"""Streaming DiLoCo: DiLoCo with one fragment of the model at a time, each exchanged while workers continue."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.batch_statistics import pool_over_workers
from paceline.sync.diloco import DiLoCo
from paceline.sync.fragments import cut_into_fragments
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.periodic import ErrorFeedback, check_start
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext


@register("streaming_diloco")
class StreamingDiLoCo(DiLoCo):
    """Streaming DiLoCo with overlapping communication (Douillard et al. 2025, arXiv:2501.18512).

    Each fragment has its own turn in the period, in which its outer gradient is sent, through the codec if there is
    one. `delay` steps later the mean has arrived, the outer optimizer steps, and x_i <- mixing * x_i + (1 - mixing) *
    x, so that not all of worker i's progress meanwhile is lost. With one fragment and no delay and mixing it is diloco.
    On the wire are the bytes of diloco, in `num_fragments` parts of at most 1.1 times the mean size.

    Clipping bounds each worker's own gradient. BatchNorm's statistics are pooled by second moments once a period.
    A mean that has been sent but not applied is in the checkpoint.
    It differs from the paper in that fragments are balanced by bytes rather than of whole layers (`fragments.py`),
    that any codec works where the paper has 4-bit floats, with error feedback, that workers count by the samples that
    they used since the fragment's last turn, and that the first turn of a fragment comes before a whole period.
    """

    num_fragments: int = Field(default=4, ge=1)
    """Number of fragments of the model, at most `period`; turns are spread evenly over the period."""
    delay: int = Field(default=1, ge=0)
    """Steps from the sending of a fragment to the use of its mean, less than `period`; 0 waits for it."""
    mixing: float = Field(default=0.0, ge=0, lt=1)
    """Weight that a worker's own parameters keep when a fragment is applied: 0 takes the common ones. The paper's 0.5
    ended 2 % higher with a delay of one step."""

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.delay >= self.period or self.num_fragments > self.period:
            raise SettingsError(
                "delay must be less than period and num_fragments at most period, but got "
                f"delay {self.delay}, num_fragments {self.num_fragments}, period {self.period}; take a longer period"
            )
        return self

    @property
    def turns(self) -> list[int]:
        """Turn of each fragment, as steps into the period; the last one, at its end, is 0."""
        return [(place + 1) * self.period // self.num_fragments % self.period for place in range(self.num_fragments)]

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that exchanges the fragments."""
        return StreamingSynchroniser(context, self)

    def local_traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a fragment and period."""
        tensors = {
            str(place): torch.empty(shape, dtype=torch.float32, device="meta") for place, shape in enumerate(shapes)
        }
        fragments = cut_into_fragments(tensors, self.num_fragments)
        return tuple(
            Traffic(
                "all_reduce",
                sum(tensor.nbytes for tensor in fragment.values()),
                sum(self.codec.wire_bytes(tensor.shape, num_workers) for tensor in fragment.values()),
                self.period,
                overlap=self.delay,
            )
            for fragment in fragments
        )


class StreamingSynchroniser(Synchroniser):
    """Sends fragments in their turns and applies them a little later. One is on the wire at a time.

    Args:
        context: The worker's model, optimizer and group.
        rule: The settings.
    """

    def __init__(self, context: WorkerContext, rule: StreamingDiLoCo) -> None:
        self._context, self._rule = context, rule
        # An exchange beside computing must not delay the control values of the steps meanwhile.
        self._group = context.group.duplicate("fragments") if rule.delay else context.group
        self._reducer = rule.start_difference_reducer(self._group, context.seed)
        self._outer = rule.start_outer()
        self._hyperparameters = rule.start_hyperparameters(context, rule.synchronous_steps)
        self._blocks = cut_into_fragments({n: p.detach() for n, p in context.parameters.items()}, rule.num_fragments)
        shapes = {block: view.shape for fragment in self._blocks for block, view in fragment.items()}
        self._feedback = ErrorFeedback(self._reducer, rule.codec, context, shapes)
        self._fragments: list[OuterParameters] = []
        self._weights = [0.0] * rule.num_fragments
        """Weight of this worker's samples from each fragment's last turn to the last turn of any."""
        self._total_weights = [0.0] * rule.num_fragments
        """Weight of all workers' samples in the same steps."""
        self._sent_weights = [0.0] * rule.num_fragments
        """Weight with which each fragment was sent last: its own parameters count by it until the mean is applied."""
        self._weight = 0.0
        """Weight of this worker's samples since the last turn of any."""
        self._step: LocalStep | None = None
        """Update whose exchanges are under way."""
        self._is_counted = False
        """Whether the weight of its samples is counted."""
        self._broken: set[int] = set()
        """Fragments that were sent to workers of which some are lost."""

    def is_sync_step(self, number: int) -> bool:
        """Return whether a fragment has its turn."""
        return number >= self._rule.synchronous_steps and self._turn(number) in self._rule.turns

    def before_update(self, step: LocalStep) -> None:
        """Change the optimizer's hyper-parameters; copy the common parameters before the first step alone."""
        check_start(bool(self._fragments), step.number, self._rule.synchronous_steps)
        if not self._fragments and step.number >= self._rule.synchronous_steps:
            self._make_fragments()
        if self._fragments:
            self._hyperparameters.apply()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Apply the fragments that are due, then send the one that is due."""
        self._hyperparameters.restore()
        if not self._fragments:
            return SyncResult()
        self._step, self._is_counted = step, False
        waited_s, wire_bytes = self._apply_due(step.number), 0
        self._count(step)
        if self.is_sync_step(step.number):
            waited_s += sum(fragment.receive() for fragment in self._fragments)
            wire_bytes = self._send_due(step.number)
            waited_s += self._apply_due(step.number)
        self._step = None
        return SyncResult(waited_s, wire_bytes)

    def abandon(self) -> Abandoned:
        """Drop the fragment on the wire, and remember it, or the one whose turn it was: `repair` sends it again."""
        for place, fragment in enumerate(self._fragments):
            if fragment.abandon():
                self._weights[place] += self._sent_weights[place]
                self._broken.add(place)
        if self._step is None:
            return Abandoned.TORN
        if not self._is_counted:
            self._count(self._step)
        if self.is_sync_step(self._step.number):
            place = self._rule.turns.index(self._turn(self._step.number))
            if self._weights[place]:
                self._broken.add(place)
        self._step = None
        return Abandoned.DONE

    def repair(self, *, is_new: bool) -> str:
        """Exchange the broken fragments at once, without the lost workers' part, and add up who counts by how much."""
        everybody = self._context.group.gather_documents(sorted(self._broken), name="broken fragments")
        self._broken = set()
        places = sorted({place for theirs in everybody for place in theirs})
        weights = [weight + self._weight for weight in self._weights]
        for place, total_weight in enumerate(self._add_up(weights)):
            if place in places and total_weight:
                self._fragments[place].send(weights[place], total_weight, 0)
                self._fragments[place].receive()
                self._fragments[place].apply(self._outer, self._rule.mixing)
                self._weights[place] = -self._weight  # which the next turn of any adds to all
        self._total_weights = self._add_up(self._weights)
        return f"fragments {', '.join(map(str, places))} were exchanged at once" if places else ""

    def last_exchange(self, number: int) -> int:
        """Return the beginning of the period that ends here: each fragment was exchanged in it."""
        return max(number - self._rule.period, min(number, self._rule.synchronous_steps))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the workers' mean, by the samples used since each fragment's last turn."""
        with ExitStack() as stack:
            for fragment, weight, sent in zip(self._fragments, self._weights, self._sent_weights, strict=False):
                stack.enter_context(fragment.averaged(weight + self._weight + (sent if fragment.is_sent else 0.0)))
            yield

    def shared_state(self) -> dict[str, Tensor]:
        """Return the outer parameters, the means that have not been applied, and the outer optimizer's state."""
        state = self._outer.state()
        for fragment in self._fragments:
            state |= fragment.state()
        return state

    def state(self) -> dict[str, Tensor]:
        """Return the codec's residuals, once the exchange under way has ended."""
        for fragment in self._fragments:
            fragment.receive()
        return self._feedback.state()

    def detached_state(self) -> dict[str, Tensor]:
        """Return the residuals that this worker holds, as a worker and for others."""
        for fragment in self._fragments:
            fragment.receive()
        return self._feedback.state(is_detached=True)

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue the period, with the fragments that had been sent."""
        self._fragments = []
        if any(name.startswith("fragment") for name in shared):
            self._make_fragments()
            for fragment in self._fragments:
                fragment.load_state(shared)
        self._outer.load_state(shared, warns=self._context.group.rank == 0)
        self._feedback.load_state(saved)

    def document(self) -> dict[str, Any]:
        """Return the weights."""
        return {
            "weight": self._weight,
            "weights": self._weights,
            "total_weights": self._total_weights,
            "sent_weights": self._sent_weights,
            "broken": sorted(self._broken),
        }

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load them."""
        self._weight = document["weight"]
        self._weights, self._total_weights = list(document["weights"]), list(document["total_weights"])
        self._sent_weights = list(document.get("sent_weights", self._sent_weights))
        self._broken = set(document.get("broken", ()))

    def close(self) -> None:
        """Close connections and threads."""
        self._reducer.close()
        if self._group is not self._context.group:
            self._group.close()

    def _turn(self, number: int) -> int:
        """Return the position in the period of the end of step `number`."""
        return (number + 1 - self._rule.synchronous_steps) % self._rule.period

    def _make_fragments(self) -> None:
        self._fragments = [
            OuterParameters(f"fragment {place}", blocks, self._group, self._reducer)
            for place, blocks in enumerate(self._blocks)
        ]

    def _count(self, step: LocalStep) -> None:
        """Add the weight of the samples since the last turn of any fragment to those of all, if there is a turn."""
        self._is_counted = True
        self._weight = step.weight
        if self.is_sync_step(step.number):
            self._weight = 0.0
            self._weights = [weight + step.weight for weight in self._weights]
            self._total_weights = [weight + step.total_weight for weight in self._total_weights]

    def _add_up(self, weights: Sequence[float]) -> list[float]:
        total = torch.tensor(weights, dtype=torch.float64, device=self._context.group.device)
        self._context.group.all_reduce(total, name="weights of fragments").wait()
        return [float(weight) for weight in total]

    def _send_due(self, number: int) -> int:
        """Send the fragment whose turn it is, unless no worker had a sample, and return the bytes on the wire."""
        turn = self._turn(number)
        place = self._rule.turns.index(turn)
        weight, total_weight = self._weights[place], self._total_weights[place]
        self._weights[place], self._total_weights[place], self._sent_weights[place] = 0.0, 0.0, weight
        if not total_weight:
            return 0
        self._fragments[place].send(weight, total_weight, number)
        wire_bytes = self._fragments[place].wire_bytes
        if turn == 0:
            wire_bytes += pool_over_workers(self._context.module, self._context.group, weight)
        return wire_bytes

    def _apply_due(self, number: int) -> float:
        """Apply the fragments that are due, and return the seconds waited."""
        waited_s = 0.0
        for fragment, turn in zip(self._fragments, self._rule.turns, strict=True):
            if fragment.is_sent and (self._turn(number) - turn) % self._rule.period == self._rule.delay:
                waited_s += fragment.receive()
                fragment.apply(self._outer, self._rule.mixing)
        return waited_s
