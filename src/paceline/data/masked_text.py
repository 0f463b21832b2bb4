"""Text with some of its tokens hidden, as samples of a masked language model.

Shapes: B samples of a batch, T tokens of a sample (`sequence_length`).
"""

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.data.base import Source, Spec, Splits
from paceline.data.orders import Indices
from paceline.data.text import Text
from paceline.registry import register

NOT_ASKED = -100
"""Target of tokens that are not to be predicted; the value that torch's cross entropy ignores by default."""
NUM_SPECIAL_TOKENS = 8
"""Additional tokens of the vocabulary, above the text's own. Only the first is used, as the mask token; with eight a
vocabulary of bytes can be divided among 2, 4 or 8 ranks."""
REPLACED_BY_MASK = 0.8
REPLACED_BY_RANDOM = 0.1

_Words = np.ndarray[tuple[Any, ...], np.dtype[np.uint64]]
_Tokens = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]


@register("masked_text")
class MaskedText(Text):
    """Text of which some tokens are to be predicted (Devlin et al. 2019).

    The same number of tokens is drawn in each sample. Of these 80% become the mask token (the first number
    after the text's own), 10% a random token of the text's own, and 10% stay unchanged. The draw depends on `seed` and
    the sample's index alone, so that a resumed run and any number of workers see the same. As in the paper each text
    is masked in `num_maskings` ways, and not anew in each epoch.
    """

    mask_fraction: float = Field(0.15, gt=0, le=1)
    """Fraction of a sample's tokens that is to be predicted, rounded to whole tokens, at least one."""
    num_maskings: int = Field(10, ge=1)
    """Ways in which each stretch of the training text is masked; an epoch has all of them."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed of the masked places and of the random tokens."""

    def open(self) -> Splits:
        """Open the text; see `Text.open`."""
        splits = super().open()
        assert isinstance(splits.train, Source)
        assert isinstance(splits.held_out, Source)
        return Splits(self._mask(splits.train, self.num_maskings), self._mask(splits.held_out, 1))

    def _mask(self, windows: Source, num_maskings: int) -> "MaskedSource":
        return MaskedSource(windows, mask_fraction=self.mask_fraction, num_maskings=num_maskings, seed=self.seed)


class MaskedSource(Source):
    """Windows of tokens, each masked in several ways: sample i is window i modulo their number.

    Args:
        windows: Samples whose inputs are tokens_T below ``spec.num_classes``; their targets are ignored.
        mask_fraction: Fraction of the T tokens that is to be predicted.
        num_maskings: Ways in which each window is masked.
        seed: Random seed of the masking.
    """

    def __init__(self, windows: Source, *, mask_fraction: float, num_maskings: int, seed: int):
        self._mask_token = windows.spec.num_classes
        self.spec = Spec(self._mask_token + NUM_SPECIAL_TOKENS, windows.spec.input_shape)
        self._windows = windows
        self._num_asked = max(1, round(mask_fraction * windows.spec.input_shape[0]))
        self._num_maskings = num_maskings
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of windows times that of maskings."""
        return len(self._windows) * self._num_maskings

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64; targets are `NOT_ASKED` except for tokens to be predicted."""
        original = self._windows.read(indices % len(self._windows))[0].numpy()
        place_BT, fate_BT, random_BT = self._draw(indices, original.shape[1])
        rank_BT = place_BT.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        is_asked = rank_BT < self._num_asked
        fate = fate_BT / 2.0**64
        random_tokens = (random_BT % np.uint64(self._mask_token)).astype(np.int64)
        is_random = fate < REPLACED_BY_MASK + REPLACED_BY_RANDOM
        replaced: _Tokens = np.where(
            fate < REPLACED_BY_MASK, self._mask_token, np.where(is_random, random_tokens, original)
        )
        inputs = np.where(is_asked, replaced, original)
        targets = np.where(is_asked, original, NOT_ASKED)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _draw(self, indices: Indices, num_tokens: int) -> _Words:
        """Return three random words per token, of shape (3, B, T), which depend on seed and index alone."""
        words = np.empty((len(indices), 3, num_tokens), dtype=np.uint64)
        for row, index in enumerate(indices):
            key = np.array([self._seed, index], dtype=np.uint64)
            words[row] = np.random.Philox(key=key).random_raw(3 * num_tokens).reshape(3, num_tokens)
        return words.swapaxes(0, 1)
