"""Torch's generator of random numbers on CPUs, moved on without drawing.

It is the Mersenne Twister (Matsumoto and Nishimura 1998), whose step is linear over GF(2): a jump multiplies its state
by a power of that step, which is a polynomial below the characteristic one (Haramoto et al. 2008). A jump takes some
ten milliseconds whatever its length; a short distance is drawn, which is cheaper.
"""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GENERATOR = torch.default_generator
"""Torch's generator itself, also while code that builds a model is given something in its place."""
_NUM_WORDS, _MIDDLE, _WORD_BITS, _LOWER_BITS, _TWIST = 624, 397, 32, 31, 0x9908B0DF
_LOWER = (1 << _LOWER_BITS) - 1
_DEGREE = _NUM_WORDS * _WORD_BITS - _LOWER_BITS
_LEFT, _NEXT, KEY = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _NUM_WORDS)
"""Places in the state that torch returns: words left in the block, the next word, and the block."""
_MAX_DRAWN = 900
"""Blocks that are drawn rather than jumped over."""
_ROWS_AT_ONCE = 256


def skip(state: Tensor, num_words: int) -> Tensor:
    """Return the state of torch's CPU generator after `num_words` more words of 32 bits."""
    if not num_words:
        return state.clone()
    content = state.numpy().copy()
    left, position, key = content[_LEFT].view(np.int32), content[_NEXT].view(np.uint64), content[KEY].view(np.uint64)
    target = _NUM_WORDS + 1 - int(left[0]) + num_words
    num_blocks = max(0, target - 1) // _NUM_WORDS
    key[:] = _advance(key.astype(np.uint32), num_blocks)
    target -= num_blocks * _NUM_WORDS
    left[0], position[0] = _NUM_WORDS + 1 - target, target
    return torch.from_numpy(content)


def count_words(before: Tensor, after: Tensor) -> int:
    """Return the number of words drawn between two states, if it is below 624."""
    return (_words_left(before) - _words_left(after)) % _NUM_WORDS


@cache
def cost(draw: Callable[[Tensor], object], dtype: torch.dtype, remainder: int) -> tuple[int, int] | None:
    """Return the words that filling a contiguous tensor takes: per element, and beyond that; None if neither is fixed.

    They are counted, not known: of tensors of three sizes with the same `remainder` by 16.
    """
    generator = GENERATOR
    kept = generator.get_state()
    try:
        counts = []
        for size in (32 + remainder, 48 + remainder, 64 + remainder):
            generator.manual_seed(size)
            generator.set_state(skip(generator.get_state(), 1))
            before = generator.get_state()
            draw(torch.empty(size, dtype=dtype))
            counts.append(count_words(before, generator.get_state()))
    finally:
        generator.set_state(kept)
    per_element, rest = divmod(counts[1] - counts[0], 16)
    if rest or counts[2] - counts[1] != counts[1] - counts[0]:
        return None
    return per_element, counts[0] - per_element * (32 + remainder)


def _words_left(state: Tensor) -> int:
    return int(state.numpy()[_LEFT].view(np.int32)[0])


def _advance(key: NDArray[np.uint32], num_blocks: int) -> NDArray[np.uint32]:
    """Return the block of words that comes `num_blocks` later."""
    if num_blocks <= _MAX_DRAWN:
        return _draw_blocks(key, num_blocks)
    sums = _sum_shifts(_list_words(key, _DEGREE // _NUM_WORDS + 3))
    windows = np.lib.stride_tricks.sliding_window_view(sums.reshape(-1), _NUM_WORDS)
    digits = np.packbits(_coefficients(_power(_NUM_WORDS * num_blocks)), bitorder="little")
    nibbles = np.stack([digits & 15, digits >> 4], 1).reshape(-1).astype(np.int64)
    rows = nibbles * sums.shape[1] + 4 * np.arange(len(nibbles))
    jumped: NDArray[np.uint32] = np.zeros(_NUM_WORDS, dtype=np.uint32)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):  # that many stay in the processor's cache
        jumped ^= np.bitwise_xor.reduce(windows[rows[begin : begin + _ROWS_AT_ONCE]], axis=0)
    return jumped


def _sum_shifts(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return, for each set of the shifts by 0 to 3 words, the sum of the words so shifted: four steps in one."""
    shifted = [np.roll(words, -shift) for shift in range(4)]
    sums = np.zeros((16, len(words)), dtype=np.uint32)
    for chosen in range(1, 16):
        highest = chosen.bit_length() - 1
        sums[chosen] = sums[chosen ^ (1 << highest)] ^ shifted[highest]
    return sums


def _list_words(key: NDArray[np.uint32], num_blocks: int) -> NDArray[np.uint32]:
    """Return the words of a block and of those after it, stepping as many words at once as need none of each other."""
    words = np.empty(num_blocks * _NUM_WORDS, dtype=np.uint32)
    words[:_NUM_WORDS] = key
    for begin in range(_NUM_WORDS, len(words), _NUM_WORDS - _MIDDLE):
        end = min(begin + _NUM_WORDS - _MIDDLE, len(words))
        first = begin - _NUM_WORDS
        low = words[first + 1 : end - _NUM_WORDS + 1]
        mixed = (words[first : end - _NUM_WORDS] & np.uint32(1 << _LOWER_BITS)) | (low & np.uint32(_LOWER))
        twisted = (mixed >> 1) ^ (low & 1) * np.uint32(_TWIST)
        words[begin:end] = words[first + _MIDDLE : end - _NUM_WORDS + _MIDDLE] ^ twisted
    return words


def _draw_blocks(key: NDArray[np.uint32], num_blocks: int) -> NDArray[np.uint32]:
    if not num_blocks:
        return key
    drawn = np.random.MT19937(0)
    drawn.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": _NUM_WORDS}}
    drawn.random_raw(_NUM_WORDS * num_blocks, output=False)
    words: NDArray[np.uint32] = drawn.state["state"]["key"]
    return words


@lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """Return t to the power of `exponent` modulo the characteristic polynomial; bit i is the coefficient of t^i."""
    num_bits = max(0, exponent.bit_length() - _DEGREE.bit_length() + 1)
    power = 1 << (exponent >> num_bits)
    for place in reversed(range(num_bits)):
        spread = _spread_bytes()[np.frombuffer(power.to_bytes(-(-_DEGREE // 8), "little"), dtype=np.uint8)]
        power = _reduce(int.from_bytes(spread.tobytes(), "little") << (exponent >> place & 1))
    return power


@cache
def _spread_bytes() -> NDArray[np.uint16]:
    """Return, for each byte, its square over GF(2): a zero after each bit."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    spread = np.packbits(np.stack([bits, np.zeros_like(bits)], 2).reshape(256, 16), axis=1, bitorder="little")
    return spread.view("<u2")[:, 0]


def _coefficients(polynomial: int) -> NDArray[np.uint8]:
    content = np.frombuffer(polynomial.to_bytes(-(-_DEGREE // 8), "little"), dtype=np.uint8)
    return np.unpackbits(content, bitorder="little")[:_DEGREE]


def _reduce(polynomial: int) -> int:
    """Return the rest of a polynomial below twice the degree after division by the characteristic one.

    That is t^d (1 + u) with u in negative powers of t, whose inverse over GF(2) is (1 + u)(1 + u^2)(1 + u^4)...; the
    power of a sum is the sum of the powers.
    """
    quotient, doubled = polynomial >> _DEGREE, 1
    drops = [_DEGREE - exponent for exponent in _characteristic()]
    while drops := [drop for drop in drops if drop * doubled < _DEGREE]:
        found = quotient
        for drop in drops:
            found ^= quotient >> drop * doubled
        quotient, doubled = found, 2 * doubled
    for exponent in _characteristic():
        polynomial ^= quotient << exponent
    return polynomial & ((1 << _DEGREE) - 1)


@cache
def _characteristic() -> tuple[int, ...]:
    """Return the exponents below the degree of the step's characteristic polynomial (the paper's, section 3.2)."""
    whole = (1 << _NUM_WORDS) | (1 << _MIDDLE)
    lower = (1 << (_NUM_WORDS - 1)) | (1 << (_MIDDLE - 1))
    powers = [1]
    for _ in range(_LOWER_BITS):
        powers.append(_multiply(powers[-1], lower))
    found = _multiply(whole, powers[_LOWER_BITS])
    for place in range(_LOWER_BITS):
        if _TWIST >> place & 1:
            found ^= _multiply(whole, powers[_LOWER_BITS - 1 - place])
    found ^= _TWIST >> _LOWER_BITS
    return tuple(exponent for exponent in range(_DEGREE) if found >> exponent & 1)


def _multiply(first: int, second: int) -> int:
    product = 0
    while second:
        lowest = second & -second
        product ^= first * lowest
        second ^= lowest
    return product
