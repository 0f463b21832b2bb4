"""The choice of a codec while training runs: what each step measures, what all workers know of it, when to change.

Every worker sends its measurements of a step with the scalars of the next one, so that they cost no message, and all
workers choose the same from the same numbers at the same step.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Size

from paceline.comm.link_speed import LinkSpeed, TimedExchange
from paceline.compression import AutoCodec, Codec, NoCodec
from paceline.replica.step_result import StepTimes
from paceline.sync.codec_choice import CodecForecast, CodecPrice, StepNumbers, find_link, price_codec, rank_codecs
from paceline.sync.every_step import EveryStep

_FIRST_STEPS = 2
"""Steps with a codec that do not count: new buffers are touched for the first time."""
_WINDOW = 3
"""Steps whose median counts, so that one slow step changes nothing."""
_HIDDEN = 0.05
"""Share of a step without a codec that may wait for the exchange before anything else is thought of."""
_CLEAR_GAIN, _GAIN, _GAIN_OF_NONE = 0.7, 0.92, 0.98
"""Cost of a codec to that of the present one at which it is taken at once, and at which after `_PATIENCE` steps; none
costs no loss, and is preferred."""
_PATIENCE = 5
_HORIZON = 100
"""Steps over which a change must pay."""
_OVERLAP = 0.7
"""Share of backward behind which an exchange can hide: before that the first bucket is not full."""
_FORGETTING = 0.998
"""Part of a measured step time's difference from the prediction that remains after a step."""
_MOST_DOUBT = 2.0
"""Largest correction of a codec's step time that is taken for that of others, which have not run."""
_LATENCY_S = 2e-4
"""Latency of a collective until one has been measured."""
_SMALL_BYTES = 4096
"""Largest collective whose time is taken for latency."""
_MOST_ROWS = 64
"""Number of workers that share their measurements."""
_COPIED_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StepMeasurement:
    """Times of one step, of one worker or of all."""

    step_s: float = 0.0
    waited_s: float = 0.0
    """Time that waited for the exchange; of all workers the least, for the others wait for them too."""
    backward_s: float = 0.0
    wire_s: float = 0.0
    """Time in which some collective was under way."""
    codec_s: float = 0.0
    """Time in which buckets were encoded and decoded, and no collective was under way."""
    latency_s: float = -1.0
    """Time of the shortest small collective; -1 if there was none."""
    copy_s: float = 0.0
    """Time of copying a byte."""


NUM_VALUES = 1 + len(StepMeasurement.__dataclass_fields__)
"""Numbers that a worker shares: whether it has measured, and its measurement."""


@dataclass(frozen=True)
class CodecChange:
    """A change of the codec, from `step` on."""

    step: int
    before: str
    codec: str
    codec_of: str
    reason: str


def measure_step(times: StepTimes, timed: Sequence[TimedExchange] | None, copy_s: float) -> StepMeasurement:
    """Return this worker's measurement of a step.

    Args:
        times: Times of the step.
        timed: Collectives of a codec; None or empty if buckets were summed as they are.
        copy_s: Time of copying a byte.
    """
    buckets = [TimedExchange(bucket.wire_bytes, bucket.began_s, bucket.ended_s) for bucket in times.buckets]
    busy_s, wire_s = _join(buckets), _join(timed or buckets)
    small = [each.ended_s - each.began_s for each in timed or buckets if each.num_bytes <= _SMALL_BYTES]
    return StepMeasurement(
        step_s=times.ended_s - times.began_s,
        waited_s=sum(bucket.waited_s for bucket in times.buckets),
        backward_s=times.backward_ended_s - times.backward_began_s,
        wire_s=wire_s,
        codec_s=max(busy_s - wire_s, 0.0) if timed else 0.0,
        latency_s=min(small, default=-1.0),
        copy_s=copy_s,
    )


def time_copy(device: torch.device) -> float:
    """Return the seconds in which a worker copies a byte of memory."""
    if device.type != "cpu":
        return 1e-12  # a codec's own time is measured once it runs
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return min(times) / source.nbytes


class CodecChooser:
    """Chooses the codec of every_step.

    Args:
        rule: Rule with codec auto.
        shapes: Shapes of the parameters.
        rank: Rank of this worker.
        num_workers: Number of workers.
        is_adaptive: Whether the optimizer is adaptive.
        steps_refused: Reason why steps cannot be coded; empty if they can.
        steps_overlap: Whether steps are made and sent while backward runs.
        bucket_bytes: Size of the buckets; None for the codecs' own.
        device: Device of the workers.
        may_choose: Whether a codec may be chosen; else a loaded choice is left for none, as where workers share memory.
    """

    def __init__(
        self,
        rule: EveryStep,
        shapes: Sequence[Size],
        *,
        rank: int,
        num_workers: int,
        is_adaptive: bool,
        steps_refused: str,
        steps_overlap: bool,
        bucket_bytes: int | None,
        device: torch.device,
        may_choose: bool = True,
    ) -> None:
        assert isinstance(rule.codec, AutoCodec)
        self._auto, self._open, self._may_choose = rule.codec, rule, may_choose
        self._rank, self._num_workers = rank, num_workers
        self._is_adaptive, self._steps_refused, self._steps_overlap = is_adaptive, steps_refused, steps_overlap
        self._shapes, self._bucket_bytes = shapes, bucket_bytes
        self._prices = {codec.name: self._price(codec) for codec in (NoCodec(), *self._auto.candidates)}
        self.rule = rule.with_codec(NoCodec(), "gradient")
        """Rule of the present steps."""
        self._queue: list[EveryStep] = []
        self._reason = self._before = ""
        self.copy_s = time_copy(device)
        """Time in which this worker copies a byte."""
        self._mine: StepMeasurement | None = None
        self._num_heard = 0
        self._window: deque[StepMeasurement] = deque(maxlen=_WINDOW)
        self._latency_s, self._compute_s = _LATENCY_S, math.inf
        self._encode_s: dict[str, float] = {}
        self._corrections: dict[str, float] = {}
        self._wanted, self._num_wanted = "", 0
        self._changes: list[CodecChange] = []

    def note(self, measured: StepMeasurement) -> None:
        """Record this worker's measurement of the step that has just ended."""
        self._mine = measured

    def values(self) -> list[float]:
        """Return what this worker adds to the sum over all: its last measurement, in its own place."""
        shared = [0.0] * (NUM_VALUES * min(self._num_workers, _MOST_ROWS))
        if self._mine is not None and self._rank < _MOST_ROWS:
            shared[NUM_VALUES * self._rank : NUM_VALUES * (self._rank + 1)] = [1.0, *vars(self._mine).values()]
        return shared

    def hear(self, values: Sequence[float]) -> None:
        """Take the sum of all workers' `values`, of the step before the present one, and decide."""
        rows = [values[begin : begin + NUM_VALUES] for begin in range(0, len(values), NUM_VALUES)]
        if not all(row[0] for row in rows):
            return
        self._num_heard += 1
        if self._num_heard <= _FIRST_STEPS:
            return
        self._window.append(_join_workers([StepMeasurement(*row[1:]) for row in rows]))
        if len(self._window) == _WINDOW and not self._queue and self._may_choose:
            self._decide()

    def take_next(self, step: int) -> EveryStep | None:
        """Return the rule from `step` on, if it changes there."""
        if not self._queue:
            return None
        self.rule = self._queue.pop(0)
        self._window.clear()
        self._num_heard = -1  # what is heard next is of the codec before
        self._wanted, self._num_wanted = "", 0
        if not self._queue:
            codec_of = self.rule.codec_of or "gradient"
            self._changes.append(CodecChange(step, self._before, self.codec.name, codec_of, self._reason))
        return self.rule

    def take_changes(self) -> list[CodecChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    @property
    def codec(self) -> Codec:
        """Codec of the present steps."""
        assert isinstance(self.rule.codec, Codec)
        return self.rule.codec

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and what it was learnt from, as JSON."""
        return {
            "rules": [[rule.codec.model_dump(mode="json"), rule.codec_of] for rule in (self.rule, *self._queue)],
            "reason": self._reason,
            "before": self._before,
            "latency_s": self._latency_s,
            "compute_s": None if math.isinf(self._compute_s) else self._compute_s,
            "encode_s": self._encode_s,
            "corrections": self._corrections,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved choice."""
        rules = [self._open.with_codec(Codec.model_validate(codec), of) for codec, of in state["rules"]]
        self.rule, self._queue = rules[0], rules[1:]
        self._prices = {self.codec.name: self._price(self.codec), **self._prices}  # it may be no candidate here
        self._reason, self._before, self._latency_s = state["reason"], state["before"], state["latency_s"]
        self._compute_s = math.inf if state["compute_s"] is None else state["compute_s"]
        self._encode_s, self._corrections = dict(state["encode_s"]), dict(state["corrections"])
        none = self._open.with_codec(NoCodec(), "gradient")
        if not self._may_choose and rules[-1] != none:
            self._reason, self._before = "since all workers share the memory of one host", self.codec.name
            self._queue = [] if self.rule == none else self._plan(self._prices[NoCodec.name])

    def _price(self, codec: Codec) -> CodecPrice:
        """Return the price of a step; encoding counts in bytes to copy, until the time of copying is known."""
        return price_codec(
            codec,
            self._shapes,
            self._num_workers,
            is_adaptive=self._is_adaptive and not self._steps_refused,
            copy_bytes_per_s=1.0,
            bucket_bytes=self._bucket_bytes,
        )

    def _decide(self) -> None:
        """Queue another codec, if the last steps say so."""
        now, name = _take_median(self._window), self.codec.name
        if now.latency_s >= 0:
            self._latency_s = now.latency_s
        if now.codec_s > 0:
            self._encode_s[name] = now.codec_s
        prices = {
            each: replace(price, encode_s=self._encode_s.get(each, price.encode_s * now.copy_s))
            for each, price in self._prices.items()
        }
        link = find_link(prices[name], now.wire_s, self._latency_s)
        # A codec takes time from computing, which is no reason against the others.
        computed_s = now.step_s - now.waited_s
        self._compute_s = computed_s if isinstance(self.codec, NoCodec) else min(computed_s, self._compute_s)
        overlap_s = _OVERLAP * now.backward_s
        numbers = StepNumbers(
            compute_s=self._compute_s,
            gradient_overlap_s=overlap_s,
            step_overlap_s=overlap_s if self._steps_overlap else 0.0,
            link=link,
            is_adaptive=self._is_adaptive,
            steps_refused=self._steps_refused,
        )
        predicted = rank_codecs([prices[name]], numbers, max_loss=self._auto.max_loss)[0]
        self._corrections = {each: 1 + (ratio - 1) * _FORGETTING for each, ratio in self._corrections.items()}
        self._corrections[name] = now.step_s / predicted.step_s
        if isinstance(self.codec, NoCodec) and now.waited_s < _HIDDEN * now.step_s:
            self._wanted, self._num_wanted = "", 0
            return
        # Where one codec was slower than predicted, such as on busy cores, the others are taken to be so too.
        tried = [ratio for each, ratio in self._corrections.items() if each != NoCodec.name]
        untried = min(max(tried, default=1.0), _MOST_DOUBT)
        corrections = dict.fromkeys(prices, untried) | {NoCodec.name: 1.0} | self._corrections
        ranking = rank_codecs(list(prices.values()), numbers, max_loss=self._auto.max_loss, corrections=corrections)
        by_name = {each.name: each for each in ranking}
        none = by_name[NoCodec.name]
        best = none if _GAIN_OF_NONE * none.cost_s <= ranking[0].cost_s else ranking[0]
        if self._is_worth_it(best, by_name[name], none.price.wire_s(link)):
            self._reason, self._before = _explain(ranking, link), name
            self._queue = self._plan(best.price)

    def _is_worth_it(self, best: CodecForecast, present: CodecForecast, dense_s: float) -> bool:
        """Return whether to change to the best codec now: at once if the gain is large, else if it lasts."""
        is_other_kind = best.price.codec_of != present.price.codec_of and present.name != NoCodec.name
        # Residuals are sent uncompressed; optimizers that step alone have two states as large, to be made equal.
        change_s = 0.0 if not is_other_kind else dense_s * (3 if present.price.codec_of == "step" else 1)
        cost_s = best.cost_s + change_s / _HORIZON
        gain = _GAIN_OF_NONE if best.name == NoCodec.name else _GAIN
        if best.name == present.name or (cost_s >= gain * present.cost_s and not present.refused):
            self._wanted, self._num_wanted = "", 0
            return False
        self._num_wanted = self._num_wanted + 1 if best.name == self._wanted else 1
        self._wanted = best.name
        return cost_s < _CLEAR_GAIN * present.cost_s or self._num_wanted >= _PATIENCE

    def _plan(self, price: CodecPrice) -> list[EveryStep]:
        """Return the rules by which the codec changes.

        Residuals of gradients cannot be carried into steps, nor back: one step sends them uncompressed.
        """
        rule = self._open.with_codec(price.codec, price.codec_of)
        if self.rule.codec_of == price.codec_of or isinstance(self.codec, NoCodec):
            return [rule]
        assert self.rule.codec_of is not None
        return [self._open.with_codec(NoCodec(), self.rule.codec_of), rule]


def _join(exchanges: Iterable[TimedExchange]) -> float:
    """Return the time in which any of the exchanges was under way."""
    total_s, until_s = 0.0, float("-inf")
    for each in sorted(exchanges, key=lambda each: each.began_s):
        total_s += max(0.0, each.ended_s - max(each.began_s, until_s))
        until_s = max(until_s, each.ended_s)
    return total_s


def _join_workers(rows: Sequence[StepMeasurement]) -> StepMeasurement:
    """Return one step of all workers. An exchange takes as long as for who waits least for others."""
    return StepMeasurement(
        step_s=max(row.step_s for row in rows),
        waited_s=min(row.waited_s for row in rows),
        backward_s=fmean(row.backward_s for row in rows),
        wire_s=min(row.wire_s for row in rows),
        codec_s=fmean(row.codec_s for row in rows),
        latency_s=min((row.latency_s for row in rows if row.latency_s >= 0), default=-1.0),
        copy_s=max(row.copy_s for row in rows),
    )


def _take_median(steps: Iterable[StepMeasurement]) -> StepMeasurement:
    columns = zip(*(vars(step).values() for step in steps), strict=True)
    return StepMeasurement(*(median(column) for column in columns))


def _explain(ranking: Sequence[CodecForecast], link: LinkSpeed) -> str:
    speed = f"at {8 * link.bytes_per_s / 1e6:.3g} Mbit/s and {1000 * link.latency_s:.2g} ms a message"
    return f"{speed}: {'; '.join(each.explain() for each in ranking)}"
