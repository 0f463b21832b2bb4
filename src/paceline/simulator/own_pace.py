"""A program whose ranks run at their own pace: event simulation of a fluid network.

A rank's *part* is its work in one round. It begins when the rank's part before has ended; a transfer begins when
the parts at both its ends have (a send waits for its receiver); a part ends when all its transfers have arrived and
have been decoded and added.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from paceline.simulator.network import fair_rates
from paceline.simulator.transfers import Transfers
from paceline.topology.cluster import Floats, Integers

_SAME = 1e-12
"""Smallest difference of two moments, relative to the time since the start: rounding must not split one event."""


def run_at_own_pace(rounds: Sequence[Transfers], capacities_bytes_per_s: Floats) -> tuple[float, float, float]:
    """Return the time at which all have ended, and its share of adding and of codecs.

    The shares are measured along the path of causes that led to the last end.
    """
    if not any(len(transfers.sources) for transfers in rounds):
        return 0.0, 0.0, 0.0
    return _Run(rounds, capacities_bytes_per_s).run()


@dataclass(frozen=True)
class _Parts:
    """The parts, ordered by rank, then round."""

    of_source: Integers
    """Part of each transfer at its source."""
    of_destination: Integers
    num_transfers: Integers
    is_first: NDArray[np.bool_]
    """Whether this is the first part of its rank."""
    is_last: NDArray[np.bool_]
    encode_s: Floats
    decode_s: Floats
    add_s: Floats


class _Run:
    """State of a simulation: parts and transfers under way, and coming events."""

    def __init__(self, rounds: Sequence[Transfers], capacities_bytes_per_s: Floats) -> None:
        self.transfers = _concatenate(rounds)
        self.parts = _find_parts(self.transfers, np.repeat(np.arange(len(rounds)), [len(r.sources) for r in rounds]))
        self.capacities_bytes_per_s = capacities_bytes_per_s
        num_transfers, num_parts = len(self.transfers.sources), len(self.parts.num_transfers)
        by_part = np.argsort(np.concatenate([self.parts.of_source, self.parts.of_destination])) % num_transfers
        self.transfers_of = np.split(by_part, np.cumsum(self.parts.num_transfers)[:-1])
        self.num_missing = self.parts.num_transfers.tolist()
        self.num_ready = [0] * num_transfers
        # Seconds of (adding, codecs) on the path of causes to the beginning of a part or transfer.
        self.spent_s = [(0.0, 0.0)] * num_parts
        self.spent_by_transfer_s = [(0.0, 0.0)] * num_transfers
        self.last_end = (0.0, 0.0, 0.0)
        self.now_s = 0.0
        self.events: list[tuple[float, bool, int]] = []
        """(time, True, transfer) of an arrival; (time, False, part) of a beginning."""
        self.active = np.zeros(0, dtype=np.int64)
        self.rates = np.zeros(0)
        self.left_bytes = self.transfers.wire_bytes.astype(np.float64)

    def run(self) -> tuple[float, float, float]:
        for part in np.flatnonzero(self.parts.is_first):
            self._begin_later(int(part), 0.0, (0.0, 0.0))
        while len(self.active) or self.events:
            sent = self._advance()
            for transfer in sent:
                heapq.heappush(self.events, (self.now_s + self.transfers.delays_s[transfer], True, int(transfer)))
            begun = self._handle_events()
            if len(sent) or begun:
                self.active = np.append(self.active, np.array(begun, dtype=np.int64))
                self.rates = fair_rates(self.transfers.routes[self.active], self.capacities_bytes_per_s)
        return self.last_end

    def _advance(self) -> Integers:
        """Advance to the next event; return the transfers whose last byte has left."""
        needed_s = self.left_bytes[self.active] / self.rates
        next_event_s = self.events[0][0] - self.now_s if self.events else np.inf
        step_s = max(0.0, min(float(needed_s.min(initial=np.inf)), next_event_s))
        self.now_s += step_s
        ends = needed_s <= step_s + _SAME * self.now_s
        sent = self.active[ends]
        self.active, self.rates = self.active[~ends], self.rates[~ends]
        self.left_bytes[self.active] -= self.rates * step_s
        return sent

    def _handle_events(self) -> list[int]:
        """Handle the events that are due; return the transfers that begin."""
        begun = []
        while self.events and self.events[0][0] <= self.now_s * (1 + _SAME):
            _, is_arrival, index = heapq.heappop(self.events)
            if is_arrival:
                for part in (int(self.parts.of_source[index]), int(self.parts.of_destination[index])):
                    self.num_missing[part] -= 1
                    if self.num_missing[part] == 0:
                        self._end(part, self.spent_by_transfer_s[index])
                continue
            for transfer in self.transfers_of[index].tolist():
                self.num_ready[transfer] += 1
                if self.num_ready[transfer] == 2:
                    self.spent_by_transfer_s[transfer] = self.spent_s[index]
                    begun.append(transfer)
        return begun

    def _end(self, part: int, spent_s: tuple[float, float]) -> None:
        add_s, decode_s = float(self.parts.add_s[part]), float(self.parts.decode_s[part])
        end_s, spent_s = self.now_s + add_s + decode_s, (spent_s[0] + add_s, spent_s[1] + decode_s)
        self.last_end = max(self.last_end, (end_s, *spent_s))
        if not self.parts.is_last[part]:
            self._begin_later(part + 1, end_s, spent_s)

    def _begin_later(self, part: int, at_s: float, spent_s: tuple[float, float]) -> None:
        encode_s = float(self.parts.encode_s[part])
        self.spent_s[part] = spent_s[0], spent_s[1] + encode_s
        heapq.heappush(self.events, (at_s + encode_s, False, part))


def _concatenate(rounds: Sequence[Transfers]) -> Transfers:
    width = max(transfers.routes.shape[1] for transfers in rounds)
    routes = [
        np.pad(transfers.routes, ((0, 0), (0, width - transfers.routes.shape[1])), constant_values=-1)
        for transfers in rounds
    ]
    names = [field.name for field in fields(Transfers) if field.name != "routes"]
    columns = {name: np.concatenate([getattr(transfers, name) for transfers in rounds]) for name in names}
    return Transfers(routes=np.concatenate(routes), **columns)


def _find_parts(transfers: Transfers, rounds: Integers) -> _Parts:
    num_transfers, num_rounds = len(rounds), int(rounds.max()) + 1
    ranks = np.concatenate([transfers.sources, transfers.destinations])
    keys, parts = np.unique(ranks * num_rounds + np.tile(rounds, 2), return_inverse=True)
    of_source, of_destination = parts[:num_transfers], parts[num_transfers:]
    is_other_rank = np.diff(keys // num_rounds) > 0
    return _Parts(
        of_source=of_source,
        of_destination=of_destination,
        num_transfers=np.bincount(parts),
        is_first=np.append(True, is_other_rank),
        is_last=np.append(is_other_rank, True),
        encode_s=_sum_by(of_source, transfers.encode_s, len(keys)),
        decode_s=_sum_by(of_destination, transfers.decode_s, len(keys)),
        add_s=_sum_by(of_destination, transfers.add_s, len(keys)),
    )


def _sum_by(parts: Integers, seconds: Floats, num_parts: int) -> Floats:
    return np.bincount(parts, seconds, minlength=num_parts).astype(np.float64)
