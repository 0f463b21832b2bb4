"""The random numbers that a construction draws, of which those that nobody needs are only counted."""

import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.parallel.deferred.generator import GENERATOR, KEY, skip


@dataclass(frozen=True, eq=False)
class Moment:
    """A moment in the stream of torch's generator on CPUs."""

    base: Tensor
    """An earlier state of the generator."""
    num_words: int = 0
    """Number of words of 32 bits that are drawn from there."""

    def digest(self) -> bytes:
        """Return what tells it apart from other moments."""
        return self.base.numpy().tobytes() + str(self.num_words).encode()


class RandomStream:
    """Torch's generator while a construction is recorded.

    It moves on only where numbers are needed. In between it holds a mark instead of its state, so that code which takes
    the state and sets it again returns to the same moment. Going over words once, at the end, takes a jump; going over
    them at every operation would take one each.
    """

    def __init__(self) -> None:
        self._marks: dict[bytes, Moment] = {}
        self._nonce = np.frombuffer(secrets.token_bytes(16), dtype=np.uint32)
        self._last: tuple[Moment, Tensor] | None = None

    def now(self) -> Moment:
        """Return the moment at which torch's generator is."""
        state = GENERATOR.get_state()
        return self._marks.get(state.numpy().tobytes()) or Moment(state)

    def advance(self, moment: Moment, num_words: int) -> None:
        """Move torch's generator to some words after a moment."""
        content = moment.base.numpy().copy()
        key = content[KEY].view(np.uint64)
        key[:4], key[4] = self._nonce, len(self._marks)
        self._marks[content.tobytes()] = Moment(moment.base, moment.num_words + num_words)
        GENERATOR.set_state(torch.from_numpy(content))

    def settle(self) -> None:
        """Give torch's generator its real state, for draws of its own."""
        GENERATOR.set_state(self.find(self.now()))

    def find(self, moment: Moment) -> Tensor:
        """Return the generator's state at a moment. One after another is found faster."""
        before, state = self._last or (Moment(moment.base), moment.base)
        if before.base is not moment.base or before.num_words > moment.num_words:
            before, state = Moment(moment.base), moment.base
        state = skip(state, moment.num_words - before.num_words)
        self.note(moment, state)
        return state

    def note(self, moment: Moment, state: Tensor) -> None:
        """Note the state at a moment that was reached by drawing."""
        self._last = moment, state
