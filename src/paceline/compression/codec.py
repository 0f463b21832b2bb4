"""The contract of a codec: how a worker's part of a sum is made smaller for the wire.

A codec works on semantic blocks: one parameter's gradient, never a flat bucket, so that results do not depend on how
parameters are bucketed. It never communicates: `Codec.exchange` is a generator that yields requests
(`AllReduce`, `AllGather`, `AllToAll`) and gets their results back, for as many rounds as it needs. The caller packs
the requests of many blocks into one message.

Error feedback belongs to the codec's state. It is transactional: `exchange` reads the state and returns a
new one, which replaces the old one only when the exchange has succeeded on all workers.
"""

import functools
import hashlib
import operator
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import torch
from pydantic import Field
from torch import Size, Tensor

from paceline.registry import Family

Flag = bool | Tensor
"""A truth value: on the host, or 0-dim where a block is on a GPU, which the host does not wait for."""


class Algebra(StrEnum):
    """Operations that may run on payloads in transit."""

    LINEAR = "linear"
    """Payloads can be added: any all-reduce program works."""
    REQUANTISE = "requantise"
    """Owners of a part decode, add and encode again: all-to-all, then all-gather."""
    GATHER = "gather"
    """Every worker gets all payloads: all-gather."""


@dataclass(frozen=True)
class AllReduce:
    """Request for the sum of all workers' payloads; the payload is given up and may be reused for the result.

    Args:
        payload: Flat tensor (1-dim) of a dtype that can be added.
        is_finite: In the last round, whether this worker's part of the sum was finite, if that is known: it then
            travels with the payload, and needs no message of its own.
    """

    payload: Tensor
    is_finite: Flag | None = None


@dataclass(frozen=True)
class AllGather:
    """Request for the payloads of all workers: uint8, shape ``(num_workers, num_bytes)``, by rank.

    Args:
        payload: This worker's bytes: uint8, shape ``(num_bytes,)``, of the same size on every worker.
        is_finite: See `AllReduce`.
    """

    payload: Tensor
    is_finite: Flag | None = None


@dataclass(frozen=True)
class AllToAll:
    """Request for the row of each worker that is for this one: uint8, shape ``(num_workers, num_bytes)``, by sender.

    Args:
        payload: Rows to send: uint8, shape ``(num_workers, num_bytes)``; row r is for worker r.
    """

    payload: Tensor


Request = AllReduce | AllGather | AllToAll
State = Mapping[str, Tensor]
"""State that a codec keeps of one block, by site. Empty at first.

``worker``: values that this worker has not sent yet; ``owner``: values that it has not passed on as the owner of a
part. These are residuals. They add up over workers, and so does ``momentum``. Any other tensor (a warm start) is the
same on all.
"""
RESIDUALS = frozenset(("worker", "owner"))
ADDED = RESIDUALS | {"momentum"}
"""Sites whose tensors add up over workers."""


class FeedbackDroppedWarning(UserWarning):
    """Residuals of codecs cannot be used here, and were dropped."""


@dataclass(frozen=True)
class CodecContext:
    """Identity of one encoding: block, step, rank and seed.

    Args:
        block: Name of the parameter; with `step` and `seed` it seeds random numbers.
        step: Number of updates done before.
        rank: Rank of this worker.
        num_workers: Number of workers.
        seed: Seed of the run.
    """

    block: str
    step: int
    rank: int
    num_workers: int
    seed: int = 0


@dataclass
class Exchanged:
    """Result of the exchange of one block.

    Args:
        total: Sum over workers of the values that each really sent, in the shape of the block; bitwise equal on all
            workers.
        state: State after the exchange, to be kept if the exchange succeeds on all workers.
        is_finite: Whether this worker's value, with its residual, was finite; False too if a sum that it computed for
            all is too large. If it is False on any worker, no worker may use any of `total` and `state`.
    """

    total: Tensor
    state: State = field(default_factory=dict)
    is_finite: Flag = True


Exchange = Generator[Request, Tensor, Exchanged]


class CodecSetting(Family):
    """Settings of a codec, or of how one is chosen while training runs."""

    family = "codec"
    setting = "sync.codec"


class Codec(CodecSetting):
    """Settings of a codec.

    Attributes:
        algebra: Operations that may run on its payloads.
        bucket_bytes: Best size of a bucket; None for the device's default.
        max_in_flight: Best number of buckets under way at a time: while one is encoded, or waits for the last byte of a
            round, others keep the wire busy.
        is_exact: Whether sums are the same as without the codec.
        suits_steps: Whether training with adaptive optimizers ends better where their steps are encoded, not gradients.
        conserves: Whether, with error feedback, sent values and residuals add up to the inputs (up to rounding).
            Momentum inside a codec breaks this.
    """

    algebra: ClassVar[Algebra]
    bucket_bytes: ClassVar[int | None] = None
    max_in_flight: ClassVar[int] = 2
    is_exact: ClassVar[bool] = False
    suits_steps: ClassVar[bool] = False
    conserves: ClassVar[bool] = True

    dense_below: int = Field(default=2048, ge=0)
    """Blocks of fewer elements (biases, norms) are summed uncompressed: they cost little and suffer most."""

    @property
    def carries_momentum(self) -> bool:
        """Whether the codec applies momentum itself, so that the optimizer must have none."""
        return False

    @abstractmethod
    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Exchange one block.

        Args:
            value: This worker's part of the sum: fp32, contiguous, any shape, on any device; not changed.
            state: State of the block; empty at first.
            context: Block, step, rank and seed of the exchange.
        """

    @abstractmethod
    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """Return the rounds of a block's exchange: the kind of request, and its bytes.

        The bytes of an `AllToAll` are those of all its rows. A test compares them with the payloads really yielded.
        """

    def held_back(self, states: Sequence[State], shape: Size) -> Tensor | None:
        """Return the sum of all residuals of a block, of workers and of owners; None if there are none."""
        return merge_states(states, shape).get("worker")

    def residual(self, state: State, shape: Size, rank: int, num_workers: int) -> Tensor | None:
        """Return what a worker holds back of a block, in its shape, as worker and as owner; None if it is nothing.

        Over all workers these add up to `held_back`.
        """
        return state["worker"].reshape(shape) if "worker" in state else None

    def resize(self, saved: Sequence[State], shape: Size, rank: int, num_workers: int) -> State:
        """Return a worker's state from the states that all workers saved, also if their number was another.

        If the number has changed, the residuals are divided evenly: no gradient is lost or counted twice.
        """
        if len(saved) == num_workers:
            return saved[rank]
        merged = merge_states(saved, shape)
        return {site: tensor / num_workers if site in ADDED else tensor for site, tensor in merged.items()}

    def detach(self, state: State, shape: Size, rank: int, num_workers: int) -> State:
        """Return a worker's state for any other number of workers: what it still owes, whichever site held it.

        The states of all workers, detached, owe together what they owed before.
        """
        kept = self.residual(state, shape, rank, num_workers)
        rest = {site: tensor for site, tensor in state.items() if site not in RESIDUALS}
        return rest if kept is None else rest | {"worker": kept}

    def wire_bytes(self, shape: Size, num_workers: int) -> int:
        """Return the bytes that a worker sends for a block of `shape`, with collectives that send the least."""
        copies = {AllReduce: 2 / num_workers, AllGather: 1, AllToAll: 1 / num_workers}
        others = num_workers - 1
        return round(sum(others * copies[kind] * size for kind, size in self.payloads(shape, num_workers)))

    def contraction(self, shape: Size) -> float:
        """Return the share of the squared norm of a block of normal values that one message carries, in (0, 1].

        It is delta in E ||x - Q(x)||^2 = (1 - delta) ||x||^2 (Stich et al. 2018, arXiv:1809.07599), by which rules
        without error feedback choose how far to trust a message.
        """
        return 1.0

    def is_dense(self, shape: Size) -> bool:
        """Whether a block of `shape` is summed uncompressed (`exchange_dense`); an empty one always is."""
        return shape.numel() < max(self.dense_below, 1)


def merge_states(states: Sequence[State], shape: Size) -> State:
    """Return the state with which one worker keeps all workers' residuals: none is lost or counted twice.

    Args:
        states: States of all workers, by rank.
        shape: Shape of the block.
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
    """Exchange a block uncompressed."""
    finite = is_finite(value)
    total = yield AllReduce(value.flatten().clone(), finite)
    return Exchanged(total.reshape(value.shape), is_finite=finite)


def dense_payloads(shape: Size) -> list[tuple[type[Request], int]]:
    """Return the rounds of `exchange_dense`."""
    return [(AllReduce, 4 * shape.numel())]


def is_finite(value: Tensor) -> Flag:
    """Whether no element is NaN or infinite."""
    if value.device.type != "cpu":
        return value.isfinite().all()
    # One pass that only reads: a sum with a non-finite term is never finite. A sum of large numbers may overflow as
    # well.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def all_of(flags: Iterable[Flag]) -> Flag:
    """Return whether all are true; a tensor if one of them is."""
    return functools.reduce(operator.and_, flags, True)


def flag_of(tensor: Tensor) -> Flag:
    """Return a 0-dim bool as a flag: on the host if it is there already."""
    return bool(tensor) if tensor.device.type == "cpu" else tensor


def shared_generator(context: CodecContext) -> torch.Generator:
    """Return a CPU generator that all workers seed equally: with the run's seed, the step and the block.

    torch's global generator is neither read nor changed. The generator is on the CPU for a block on a GPU too: the two
    kinds draw different numbers from one seed.
    """
    key = f"{context.seed} {context.step} {context.block}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
