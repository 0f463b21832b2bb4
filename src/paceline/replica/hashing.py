"""Fingerprints of what replicas hold, by which those that silently became different are found."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.group import Group
from paceline.errors import DivergenceError
from paceline.parallel.local import local
from paceline.parallel.part import Part
from paceline.parallel.zero_redundancy import own_part


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of a tensor's bytes."""
    plain = tensor.detach().cpu().contiguous().flatten()
    if plain.numel() == 0:
        return 0
    return xxhash.xxh3_64_intdigest(plain.view(torch.uint8).numpy().data)


def check_equal(hashes: Mapping[str, int], group: Group, step: int) -> None:
    """Compare what all ranks hold.

    Args:
        hashes: This rank's, by what errors call each thing.
        group: The ranks that must hold the same.
        step: Updates done.

    Raises:
        DivergenceError: They differ. With two ranks it says that they do, with more which one is odd, and names
            the first thing that differs.
    """
    if everybody := find_difference(hashes, group):
        _refuse(everybody, group, step)


def find_difference(hashes: Mapping[str, int], group: Group) -> list[dict[str, str]]:
    """Return the hashes of all ranks, by rank, where they differ; an empty list where all are the same."""
    total = xxhash.xxh3_64_intdigest(repr(list(hashes.items())).encode())
    mine = torch.tensor([total >> 32, total & 0xFFFFFFFF], device=group.device)
    everybody = torch.zeros(group.size, 2, dtype=torch.int64, device=group.device)
    group.all_gather(everybody, mine, name="replica hash").wait()
    if len({tuple(row) for row in everybody.tolist()}) == 1:
        return []
    return group.gather_documents({name: f"{value:x}" for name, value in hashes.items()}, name="replica hashes")


class Comparison:
    """Compares at intervals what several ranks hold the same of: replicas, and what ranks of one worker have in common.

    Parameters, the optimizer's state and persistent buffers must be equal. Buffers may be each worker's own, as
    statistics of its samples are: those of torch's norms are left out, and so is one that has changed on every worker
    since the start and differs the first time that it is looked at.

    Args:
        module: The model.
        optimizer: Its optimizer.
        part: What this rank holds of the model.
        interval: Steps from one comparison to the next; 0 for none.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part, interval: int) -> None:
        self._module, self._optimizer, self._part = module, own_part(optimizer), part
        self._interval = interval if part.world.size > 1 else 0
        self._start = self._hash_buffers() if self._interval else {}
        self._own: set[str] = set()
        """Buffers that are each worker's own."""
        self._alike: set[str] = set()
        """Buffers that have changed and were the same on all workers."""
        self._steppers = part.group
        """Ranks that keep the same optimizer state."""
        if self._interval and part.mesh is not None and part.layout.shares_optimizer:
            self._steppers = part.mesh.group("data", "context")

    def is_due(self, step: int) -> bool:
        """Whether it is time for one after `step` updates; the same on every rank."""
        return self._interval > 0 and step % self._interval == 0

    def check(self, step: int) -> None:
        """Raise `DivergenceError` where ranks differ in what they should hold alike; every rank calls it."""
        if not self._interval:
            return
        parameters = dict(self._module.named_parameters())
        held = {name: {f"parameter {name}": hash_tensor(local(p))} for name, p in parameters.items()}
        kept = {name: self._hash_state(name, parameter) for name, parameter in parameters.items()}
        if self._steppers is self._part.group:
            held = {name: hashes | kept[name] for name, hashes in held.items()}
        elif self._steppers.size > 1:
            check_equal(_join(kept, kept), self._steppers, step)
        if self._part.group.size > 1:
            self._check_replicas(_join(held, held), step)
        for group, names in self._part.list_common(parameters):
            if group.size > 1 and names:
                check_equal(_join(held, names), group, step)

    def _check_replicas(self, hashes: dict[str, int], step: int) -> None:
        group = self._part.group
        buffers = {name: value for name, value in self._hash_buffers().items() if name not in self._own}
        changed = {name for name, value in buffers.items() if value != self._start[name]}
        everybody = find_difference(hashes | buffers, group)
        if not everybody:
            self._alike |= changed
            return
        for names in group.gather_documents(sorted(changed), name="buffers that have changed"):
            changed &= set(names)
        own = {name for name in changed - self._alike if len({theirs[name] for theirs in everybody}) > 1}
        self._own |= own
        everybody = [{name: value for name, value in theirs.items() if name not in own} for theirs in everybody]
        if any(theirs != everybody[0] for theirs in everybody):
            _refuse(everybody, group, step)

    def _hash_buffers(self) -> dict[str, int]:
        statistics = {
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in self._module.named_modules()
            if isinstance(layer, _NormBase)
            for name, _ in layer.named_buffers()
        }
        persistent = self._module.state_dict().keys() - statistics
        return {
            f"buffer {name}": hash_tensor(local(buffer))
            for name, buffer in self._module.named_buffers()
            if name in persistent
        }

    def _hash_state(self, name: str, parameter: nn.Parameter) -> dict[str, int]:
        """Return hashes of what the optimizer keeps of a parameter: its tensors and numbers."""
        hashes = {}
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                hashes[f"optimizer state {key} of {name}"] = hash_tensor(local(value))
            elif isinstance(value, int | float):
                hashes[f"optimizer state {key} of {name}"] = xxhash.xxh3_64_intdigest(repr(value).encode())
        return hashes


def _join(hashes: Mapping[str, Mapping[str, int]], names: Iterable[str]) -> dict[str, int]:
    return {label: value for name in names for label, value in hashes[name].items()}


def _refuse(everybody: Sequence[Mapping[str, str]], group: Group, step: int) -> NoReturn:
    names = dict.fromkeys(name for hashes in everybody for name in hashes)
    first = next(name for name in names if len({hashes.get(name) for hashes in everybody}) > 1)
    odd = _name_odd([tuple(hashes.items()) for hashes in everybody], group.names)
    raise DivergenceError(
        f"replicas must be equal, but at step {step} {odd}, first in {first}; look for code that changes it on one "
        "rank only, or a faulty machine, and resume from the last checkpoint, which was compared before it was saved"
    )


def _name_odd(totals: list[tuple[tuple[str, str], ...]], ranks: list[int]) -> str:
    (common, count), *others = Counter(totals).most_common()
    if count == others[0][1]:
        which = "" if ranks == list(range(len(ranks))) else f" ({', '.join(map(str, ranks))})"
        return f"the {len(totals)} ranks{which} differ"
    odd = [str(rank) for rank, total in zip(ranks, totals, strict=True) if total != common]
    return f"rank {', '.join(odd)} differs from the others"
