"""Fingerprints of parameters, by which replicas that silently became different are found."""

from collections import Counter
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import DivergenceError
from paceline.parallel.local import local
from paceline.parallel.part import Part


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of a tensor's bytes."""
    plain = tensor.detach().cpu().contiguous().flatten()
    if plain.numel() == 0:
        return 0
    return xxhash.xxh3_64_intdigest(plain.view(torch.uint8).numpy().data)


def check_equal(parameters: Mapping[str, Tensor], group: Group, step: int) -> None:
    """Compare the parameters of all ranks.

    Args:
        parameters: This rank's, by name.
        group: Those that must hold the same.
        step: Updates done.

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
    odd = _name_odd(totals, group.names)
    raise DivergenceError(
        f"replicas must be equal, but at step {step} {odd}, first in parameter {first}; "
        "look for code that changes parameters on one rank only, or a faulty machine, and resume from a checkpoint"
    )


class Comparison:
    """Compares at intervals what several ranks hold the same of: replicas, and what ranks of one worker have in common.

    Args:
        parameters: Those that are trained, by name.
        part: What this rank holds of the model.
        interval: Steps from one comparison to the next; 0 for none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], part: Part, interval: int) -> None:
        self._parameters = parameters
        self._part = part
        self.interval = interval if part.world.size > 1 else 0

    def check(self, step: int) -> None:
        """Raise `DivergenceError` where ranks differ in what they should hold alike; every rank calls it."""
        held = {name: local(parameter) for name, parameter in self._parameters.items()}
        for group, names in ((self._part.group, list(held)), *self._part.list_common(self._parameters)):
            if group.size > 1 and names:
                check_equal({name: held[name] for name in names}, group, step)


def _name_odd(totals: list[tuple[int, ...]], ranks: list[int]) -> str:
    (common, count), *others = Counter(totals).most_common()
    if count == others[0][1]:
        which = "" if ranks == list(range(len(ranks))) else f" ({', '.join(map(str, ranks))})"
        return f"the {len(totals)} ranks{which} differ"
    odd = [str(rank) for rank, total in zip(ranks, totals, strict=True) if total != common]
    return f"rank {', '.join(odd)} differs from the others"
