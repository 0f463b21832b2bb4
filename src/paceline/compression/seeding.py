"""Random numbers that all workers draw alike, for one block at one step."""

import hashlib

import torch

from paceline.compression.codec import Place


def shared_generator(place: Place) -> torch.Generator:
    """Return a generator on the CPU that depends on the run's seed, the step and the block, and on nothing else.

    torch's global generator is neither read nor changed. It is the CPU's for a block on a GPU too: the two kinds
    draw different numbers from one seed.
    """
    key = f"{place.seed} {place.step} {place.block}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
