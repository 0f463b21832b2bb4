"""Random permutations that are computed where they are read, without memory: a Feistel network over the index bits."""

import numpy as np

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

_NUM_ROUNDS = 6
_WORD = (1 << 64) - 1


def permute(places: Words, size: int, key: int) -> Words:
    """Return the image of each of `places` under the permutation of 0..size-1 with that `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [np.uint64(derive_seed(key, number)) for number in range(_NUM_ROUNDS)]
    result = places.copy()
    outside = np.arange(len(places))
    while len(outside):
        left, right = result[outside] >> shift, result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix_words(right ^ round_key) & mask)
        result[outside] = (left << shift) | right
        outside = outside[result[outside] >= size]
    return result


def mix_words(words: Words) -> Words:
    """Return a hash of each word (the finalizer of SplitMix64, Steele 2014); products wrap."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive_seed(*numbers: int) -> int:
    """Return one 64-bit seed from several numbers, such as (seed, step, worker)."""
    state = 0
    for number in numbers:
        word = (state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD  # as in `mix_words`, faster for one word
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
        state = word ^ (word >> 31)
    return state
