"""What a codec is: how a worker's part of a sum is made smaller for the wire, and what is sent in its place.

A codec works on semantic blocks: one parameter's gradient, never a flat bucket, so that results do not depend on how
parameters are bucketed. It never communicates: `Codec.exchange` is a generator that yields what must be exchanged
(`AllReduce`, `AllGather`, `AllToAll`) and gets the result back, for as many rounds as it needs. Whoever runs it packs
the requests of many blocks into one message.

Error feedback belongs to the codec's state. It is transactional: `exchange` reads the state and returns a
new one, which takes the old one's place only when the exchange has succeeded on all workers.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import torch
from pydantic import Field
from torch import Size, Tensor

from paceline.registry import Family


class Algebra(StrEnum):
    """What may be done to payloads on their way."""

    LINEAR = "linear"
    """Payloads add: any program of all-reduce will do."""
    REQUANTISE = "requantise"
    """Owners of a part decode, add and encode again: all-to-all, then all-gather."""
    GATHER = "gather"
    """Everybody gets the payloads of all: all-gather."""


@dataclass(frozen=True)
class AllReduce:
    """Ask for the sum of the payloads of all workers; the tensor sent is given up and may be what comes back.

    Args:
        payload: 1-dim, of a dtype that can be added.
    """

    payload: Tensor


@dataclass(frozen=True)
class AllGather:
    """Ask for the payloads of all workers: uint8, shape ``(num_workers, num_bytes)``, by rank.

    Args:
        payload: uint8, shape ``(num_bytes,)``, of the same size on every worker.
    """

    payload: Tensor


@dataclass(frozen=True)
class AllToAll:
    """Ask for the row that each worker has for this one: uint8, shape ``(num_workers, num_bytes)``, by sender.

    Args:
        payload: uint8, shape ``(num_workers, num_bytes)``: row r is for worker r.
    """

    payload: Tensor


Request = AllReduce | AllGather | AllToAll
State = Mapping[str, Tensor]
"""What a codec keeps of one block, by site. Empty at first.

``worker``: what this worker has not sent yet; ``owner``: what it has not handed on as the owner of a part. These
are residuals. They add up over workers, and so does ``momentum``. Anything else (a warm start) is the same on all.
"""
RESIDUALS = frozenset(("worker", "owner"))
ADDED = RESIDUALS | {"momentum"}
"""Sites whose tensors add up over workers."""


class FeedbackDroppedWarning(UserWarning):
    """Codecs had held back what cannot be used here."""


@dataclass(frozen=True)
class CodecContext:
    """What tells one encoding from another: block, step, rank and seed.

    Args:
        block: The parameter's name; with `step` and `seed` it seeds what is random.
        step: Updates done before.
        rank: This worker.
        num_workers: All of them.
        seed: Of the run.
    """

    block: str
    step: int
    rank: int
    num_workers: int
    seed: int = 0


@dataclass
class Exchanged:
    """What came of the exchange of one block.

    Args:
        total: The sum over workers of what each really sent, in the shape of the value; bitwise the same on every
            worker.
        state: The state after it, to be kept if the exchange succeeds everywhere.
        is_finite: Whether this worker's value was finite, with what it kept; False too if a sum that it computed for
            all is too large. If it is False on any worker, nothing of `total` and `state` may be used on any.
    """

    total: Tensor
    state: State = field(default_factory=dict)
    is_finite: bool = True


Exchange = Generator[Request, Tensor, Exchanged]


class Codec(Family):
    """Settings of a codec.

    Attributes:
        algebra: What may be done to its payloads.
        bucket_bytes: Size of what is best exchanged together; None where the device's default is.
        max_in_flight: Buckets that are best under way at a time: while one is encoded, or waits for a round's last
            byte, others keep the wire busy.
        is_exact: Whether sums are what they would be without it.
        conserves: Whether, with error feedback, what was sent and what is kept add up to what came in (up to
            rounding). Momentum inside a codec breaks it.
    """

    family = "codec"
    algebra: ClassVar[Algebra]
    bucket_bytes: ClassVar[int | None] = None
    max_in_flight: ClassVar[int] = 2
    is_exact: ClassVar[bool] = False
    conserves: ClassVar[bool] = True

    dense_below: int = Field(default=2048, ge=0)
    """Blocks of fewer elements (biases, norms) are summed as they are: they cost little and suffer most."""

    @property
    def carries_momentum(self) -> bool:
        """Whether what it sends has momentum already, so that the optimizer must have none."""
        return False

    @abstractmethod
    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Exchange one block.

        Args:
            value: This worker's part of the sum: fp32, contiguous, any shape, on any device; left as it is.
            state: What was kept of the block; empty at first.
            context: Block, step, rank and seed of the exchange.
        """

    @abstractmethod
    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """Return the rounds of a block's exchange: what is asked for, and how many bytes.

        Those of an `AllToAll` are of all its rows. A test holds this to the payloads really yielded.
        """

    def held_back(self, states: Sequence[State], shape: Size) -> Tensor | None:
        """Return the sum of what all workers, also as owners, have not sent of a block; None if they keep nothing."""
        return merge_states(states, shape).get("worker")

    def resize(self, saved: Sequence[State], shape: Size, rank: int, num_workers: int) -> State:
        """Return a worker's state from those that all workers saved, whose number may have been another.

        Then what they held back is shared out evenly: no gradient is lost or counted twice.
        """
        if len(saved) == num_workers:
            return saved[rank]
        merged = merge_states(saved, shape)
        return {site: tensor / num_workers if site in ADDED else tensor for site, tensor in merged.items()}

    def wire_bytes(self, shape: Size, num_workers: int) -> int:
        """Return the bytes a worker sends for a block of `shape`, by collectives that send as little as can be."""
        copies = {AllReduce: 2 / num_workers, AllGather: 1, AllToAll: 1 / num_workers}
        others = num_workers - 1
        return round(sum(others * copies[kind] * size for kind, size in self.payloads(shape, num_workers)))

    def is_dense(self, shape: Size) -> bool:
        """Whether a block of `shape` is summed as it is (`exchange_dense`); an empty one always is."""
        return shape.numel() < max(self.dense_below, 1)


def merge_states(states: Sequence[State], shape: Size) -> State:
    """Return the state of one worker that keeps of a block what all do: none of it is lost or counted twice.

    Args:
        states: Those of all workers, by rank.
        shape: The block's.
    """
    merged = {site: tensor for state in reversed(states) for site, tensor in state.items() if site not in ADDED}
    parts = [state["worker"].reshape(shape) for state in states if "worker" in state]
    if owners := [state["owner"].flatten() for state in states if "owner" in state]:
        parts.append(torch.cat(owners).reshape(shape))
    for site, tensors in {"worker": parts, "momentum": [s["momentum"] for s in states if "momentum" in s]}.items():
        if tensors:
            merged[site] = torch.stack(tensors).sum(0)
    return merged


def exchange_dense(value: Tensor) -> Exchange:
    """Exchange a block as it is."""
    finite = is_finite(value)
    total = yield AllReduce(value.flatten().clone())
    return Exchanged(total.reshape(value.shape), is_finite=finite)


def dense_payloads(shape: Size) -> list[tuple[type[Request], int]]:
    """Return the rounds of `exchange_dense`."""
    return [(AllReduce, 4 * shape.numel())]


def is_finite(value: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # One pass that only reads: the sum of what is not finite never is. That of large numbers may overflow as well.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def shared_generator(context: CodecContext) -> torch.Generator:
    """Return a CPU generator that all workers seed alike: with the run's seed, the step and the block.

    torch's global generator is neither read nor changed. It is the CPU's for a block on a GPU too: the two kinds
    draw different numbers from one seed.
    """
    key = f"{context.seed} {context.step} {context.block}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
