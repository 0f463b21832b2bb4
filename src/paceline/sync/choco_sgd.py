"""CHOCO-SGD: decentralised SGD whose messages a codec compresses."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.compression import Codec, Int8, NoCodec, RandomK
from paceline.compression.codec import RESIDUALS, State
from paceline.compression.message import decode_blocks, encode_blocks, message_bytes
from paceline.errors import NonFiniteError, SettingsError
from paceline.registry import register
from paceline.sync.dpsgd import check_keeps_mean
from paceline.sync.gossip import FlatParameters, GossipMessages, GossipRule, MixingRow
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext
from paceline.topology.graphs import Floats


@register("choco_sgd")
class ChocoSGD(GossipRule):
    """CHOCO-SGD (Koloskova, Stich, Jaggi 2019, arXiv:1902.00340; for networks of neurons 2020, arXiv:1907.09356).

    Each worker has a public copy c_i of its parameters, which its neighbours keep too. In every step it sends q_i =
    decode(encode(x_i - c_i)), and all of them add it to their c_i: the part that the codec drops stays in the
    difference, so the codec's own feedback is not used. Then x_i <- x_i + step_size * sum_j W_ij (c_j - c_i) - lr *
    g_i. The mean over workers is preserved, whatever the codec loses. Without a codec and with `step_size` 1 it is
    dpsgd.

    On the wire is one encoded message to each neighbour and step, while the next gradients are computed. A worker holds
    a copy for each neighbour: one sum of them all would do, but its rounding errors would move the mean for ever.
    Clipping bounds each worker's own gradient. It differs from the papers in that mixing comes before the step of the
    optimizer and not after it, and in that copies begin as the common parameters and not as 0.
    """

    codec: Codec = Int8()
    """Codec of the differences."""
    step_size: float | None = Field(default=None, gt=0, le=1)
    """Step towards the neighbours' copies. The more a codec drops, the smaller it must be, or workers drift apart for
    ever: by default half the contraction of the codec, of the block that it serves worst, divided by the largest
    eigenvalue of I - W, but at most 0.5 with a codec that loses something. 1 is right without one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.graph.is_static:
            raise SettingsError(
                f"the graph of choco_sgd must stay the same, since workers keep copies of their neighbours, but got "
                f"{self.graph.name}; take one that does not change, such as exponential, or sync dpsgd"
            )
        is_expansive = isinstance(self.codec, RandomK) and self.codec.scaled
        if self.codec.carries_momentum or is_expansive:
            raise SettingsError(
                f"the codec of choco_sgd must bring copies closer and have no momentum, but got {self.codec.name}"
                f"{', scaled' if is_expansive else ''}; take another, such as top_k"
            )
        return self

    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that mixes.

        Raises:
            SettingsError: The graph does not exist for that number of workers, or does not preserve their mean.
        """
        check_keeps_mean(self, context.group)
        return ChocoSynchroniser(context, self)

    def message_bytes(self, shapes: Sequence[Size]) -> int:
        """Return the size of the codec's payloads."""
        return message_bytes(self.codec, {str(number): shape for number, shape in enumerate(shapes)})


class ChocoSynchroniser(Synchroniser):
    """Keeps public copies, and moves a worker's parameters towards those of its neighbours.

    Args:
        context: The worker's model, optimizer and group.
        rule: Settings of the rule.
    """

    def __init__(self, context: WorkerContext, rule: ChocoSGD) -> None:
        self._context, self._codec, self._rank = context, rule.codec, context.group.rank
        mixing = rule.graph.mixing_matrix(context.group.size)
        self._row = MixingRow.of(mixing, self._rank)
        self._sources = [rank for rank in self._row.weights if rank != self._rank]
        self._flat = FlatParameters(context.parameters)
        self._shapes = {name: parameter.shape for name, parameter in context.parameters.items()}
        self._copies = {rank: self._flat.read() for rank in self._row.weights}
        """Public copies by rank, including this worker's; all workers begin with the same parameters."""
        shapes = list(self._shapes.values())
        self._step_size = rule.step_size or find_step_size(self._codec, shapes, mixing)
        self._states: dict[str, State] = {}
        self._swap = GossipMessages(context.group, message_bytes(self._codec, self._shapes), torch.uint8)
        self._sent_in: int | None = None
        """Step of the messages under way."""
        self._mixed: dict[int, int] = {}

    def before_update(self, step: LocalStep) -> None:
        """Move towards the copies of the neighbours; the gradients are those of the parameters before."""
        self._receive_copies()
        model = self._flat.read()
        towards = self._row.mix(self._copies) - self._copies[self._rank]
        self._flat.write(model.add_(towards, alpha=self._step_size))
        self._mixed |= dict.fromkeys(self._row.weights, step.number)

    def after_update(self, step: LocalStep) -> SyncResult:
        """Begin to send the difference between the parameters and their copy."""
        parts = (self._flat.read() - self._copies[self._rank]).float().split([s.numel() for s in self._shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        message, done = encode_blocks(
            self._codec, values, self._states, step=step.number, seed=self._seed_of(self._rank)
        )
        if not all(exchanged.is_finite for exchanged in done.values()):
            raise NonFiniteError(
                f"parameters must be finite to be sent, but after step {step.number} on rank {self._rank} they are "
                "not; lower the learning rate or step_size, or clip gradients"
            )
        self._states = {name: _without_residuals(exchanged.state) for name, exchanged in done.items()}
        self._add(self._rank, {name: exchanged.total for name, exchanged in done.items()})
        self._swap.outgoing.copy_(message)
        self._swap.start(self._sources, self._row.destinations, f"differences of step {step.number}")
        self._sent_in = step.number
        return SyncResult(*self._swap.take_costs())

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the mean over workers."""
        with self._flat.averaged(self._context.group, self._flat.read()):
            yield

    def abandon(self) -> Abandoned:
        """Drop the messages under way: neighbours get copies anew in `load_state`."""
        self._swap.abandon()
        self._sent_in = None
        return Abandoned.DONE

    def repair(self, *, is_new: bool) -> str:
        """Let new workers begin at the mean of the others."""
        return self._flat.begin_at_mean(self._context.group, self._flat.read(), is_new=is_new)

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each neighbour's model when it was mixed in last, by rank."""
        return self._mixed

    def state(self) -> dict[str, Tensor]:
        """Return this worker's copy, which neighbours get from it again, and the start of its codec."""
        self._receive_copies()
        codec = {f"{self._codec.name}/{name}/{key}": t for name, s in self._states.items() for key, t in s.items()}
        return {"copy": self._copies[self._rank].clone(), **codec}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load them, and get copies from the neighbours; with another number of workers copies are the consensus."""
        self._receive_copies()
        self._flat.read(self._copies[self._rank])
        mine = saved[self._rank] if len(saved) == self._context.group.size else {}
        if mine:  # not if this worker was alone, without the rule
            self._copies[self._rank].copy_(mine["copy"])
            for name in self._shapes:
                prefix = f"{self._codec.name}/{name}/"
                kept = {key.removeprefix(prefix): t.cpu() for key, t in mine.items() if key.startswith(prefix)}
                self._states[name] = kept
        swap = GossipMessages(self._context.group, self._flat.num_elements, self._flat.dtype)
        swap.outgoing.copy_(self._copies[self._rank])
        swap.start(self._sources, self._row.destinations, "copies")
        self._copies |= swap.finish()
        swap.close()

    def close(self) -> None:
        """Close the connections."""
        self._swap.close()

    def _receive_copies(self) -> None:
        """Add the received differences to the neighbours' copies."""
        if self._sent_in is None:
            return
        for rank, message in self._swap.finish().items():
            decoded = decode_blocks(self._codec, message, self._shapes, step=self._sent_in, seed=self._seed_of(rank))
            self._add(rank, decoded)
        self._sent_in = None

    def _add(self, rank: int, difference: Mapping[str, Tensor]) -> None:
        """Add a decoded difference to the copy of a rank's parameters."""
        self._copies[rank].add_(torch.cat([difference[name].flatten() for name in self._shapes]))

    def _seed_of(self, rank: int) -> int:
        """Return the seed of a sender: workers must not all round the same way."""
        return self._context.seed * self._context.group.size + rank


def find_step_size(codec: Codec, shapes: Sequence[Size], mixing: Floats) -> float:
    """Return a step towards the copies with which workers stay together.

    Copies follow parameters with the codec's contraction delta, and a step gamma moves parameters away from them by up
    to gamma * beta times their disagreement, beta the largest modulus of an eigenvalue of I - W: that must be less than
    delta. Half of delta / beta was stable with every codec and graph that was tried. The bound of Koloskova et al. 2019
    (theorem 2), which also has the spectral gap, is 17 to 100 times smaller for top_k on rings of 4 and 8.

    Args:
        codec: Codec of the messages.
        shapes: Shapes of the blocks.
        mixing: Mixing matrix W.
    """
    if isinstance(codec, NoCodec):
        return 1.0
    largest = float(np.abs(np.linalg.eigvals(np.eye(len(mixing)) - mixing)).max())
    return min(0.5, 0.5 * min(codec.contraction(shape) for shape in shapes) / largest)


def _without_residuals(state: State) -> State:
    return {key: tensor for key, tensor in state.items() if key not in RESIDUALS}
