"""Fingerprints of parameters, by which replicas that silently became different are found."""

from collections import Counter
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import DivergenceError


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of a tensor's bytes."""
    plain = tensor.detach().cpu().contiguous().flatten()
    if plain.numel() == 0:
        return 0
    return xxhash.xxh3_64_intdigest(plain.view(torch.uint8).numpy().data)


def check_equal(parameters: Mapping[str, Tensor], group: Group, step: int) -> None:
    """Compare the parameters of all ranks.

    Raises:
        DivergenceError: They differ. With two ranks it says that they do, with more which one is odd, and names
            the first parameter that differs.
    """
    hashes = {name: hash_tensor(tensor) for name, tensor in parameters.items()}
    total = xxhash.xxh3_64_intdigest(repr(list(hashes.values())).encode())
    mine = torch.tensor([total >> 32, total & 0xFFFFFFFF], device=group.device)
    everybody = torch.zeros(group.size, 2, dtype=torch.int64, device=group.device)
    group.all_gather(everybody, mine, name="replica hash").wait()
    totals = [tuple(row) for row in everybody.tolist()]
    if len(set(totals)) == 1:
        return
    all_hashes = group.gather_documents({name: f"{value:x}" for name, value in hashes.items()}, name="parameter hashes")
    first = next(name for name in hashes if len({document[name] for document in all_hashes}) > 1)
    raise DivergenceError(
        f"replicas must be equal, but at step {step} {_name_odd(totals)}, first in parameter {first}; "
        "look for code that changes parameters on one rank only, or a faulty machine, and resume from a checkpoint"
    )


def _name_odd(totals: list[tuple[int, ...]]) -> str:
    (common, count), *others = Counter(totals).most_common()
    if count == others[0][1]:
        return f"the {len(totals)} ranks differ"
    odd = [str(rank) for rank, total in enumerate(totals) if total != common]
    return f"rank {', '.join(odd)} differs from the others"
