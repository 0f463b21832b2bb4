"""Fingerprints of replicas' state, which reveal replicas that silently became different."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.group import Group
from paceline.errors import DivergenceError
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.replica.parameter_average import ParameterAverage
from paceline.sync.every_step import EveryStep
from paceline.sync.rule import Rule


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of a tensor's bytes."""
    plain = tensor.detach().cpu().contiguous().flatten()
    if plain.numel() == 0:
        return 0
    return xxhash.xxh3_64_intdigest(plain.view(torch.uint8).numpy().data)


def find_difference(hashes: Mapping[str, int], group: Group) -> list[dict[str, str]]:
    """Return the hashes of all ranks, by rank, if they differ; an empty list if all are the same.

    Args:
        hashes: Hashes of this rank's state, by the names that errors use.
        group: The ranks whose state should be the same.
    """
    total = xxhash.xxh3_64_intdigest(repr(list(hashes.items())).encode())
    mine = torch.tensor([total >> 32, total & 0xFFFFFFFF], device=group.device)
    everybody = torch.zeros(group.size, 2, dtype=torch.int64, device=group.device)
    group.all_gather(everybody, mine, name="replica hash").wait()
    if len({tuple(row) for row in everybody.tolist()}) == 1:
        return []
    return group.gather_documents({name: f"{value:x}" for name, value in hashes.items()}, name="replica hashes")


def describe_difference(everybody: Sequence[Mapping[str, str]], names: Sequence[int]) -> str:
    """Return the first difference between ranks, and the ranks that differ from a majority; empty if all agree.

    Args:
        everybody: Hashes by rank; see `find_difference`.
        names: Numbers of the ranks in errors.
    """
    things = dict.fromkeys(thing for hashes in everybody for thing in hashes)
    first = next((thing for thing in things if len({hashes.get(thing) for hashes in everybody}) > 1), None)
    if first is None:
        return ""
    (common, count), *others = Counter(tuple(hashes.items()) for hashes in everybody).most_common()
    if count == others[0][1]:
        which = "" if names == list(range(len(names))) else f" ({', '.join(map(str, names))})"
        return f"the {len(everybody)} ranks{which} differ, first in {first}"
    odd = [str(name) for name, hashes in zip(names, everybody, strict=True) if tuple(hashes.items()) != common]
    return f"rank {', '.join(odd)} differs from the others, first in {first}"


class ReplicaComparison:
    """Compares, at intervals, state that is equal on several ranks: replicas, and state shared by a worker's ranks.

    Parameters, their averages, the optimizer's state and persistent buffers must be equal. Buffers may be local to each
    worker, as statistics of its samples are: those of torch's norms are left out, and so is a buffer that has changed
    on every worker since the start and differs at its first comparison.

    Args:
        module: The model.
        optimizer: Optimizer of the model.
        shard: Model shard of this rank.
        rule: Synchronisation rule, which says whether parameters are equal, and optimizers.
        interval: Steps from one comparison to the next; 0 for none.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, shard: ModelShard, rule: Rule, interval: int
    ) -> None:
        self._module, self._shard = module, shard
        self._optimizer = local_optimizer(optimizer)
        self.interval = interval if shard.world.size > 1 and rule.keeps_replicas_equal else 0
        program = rule.program if isinstance(rule, EveryStep) else None
        self._suspects = f"the program {program.name!r}, " if program is not None else ""
        self._start = self._hash_buffers() if self.interval else {}
        self._own: set[str] = set()
        """Buffers that are local to each worker."""
        self.heal: Callable[[list[dict[str, str]], dict[str, Any]], bool] | None = None
        """Function that lets odd ranks take what the majority has, given hashes by rank and what they are of; it
        returns whether there is a majority. None to end instead."""
        self.average: ParameterAverage | None = None
        """Moving averages of the parameters, which are compared too; None without any."""
        self._alike: set[str] = set()
        """Buffers that changed and were the same on all workers."""
        self._steppers = shard.group
        """Ranks with the same optimizer state."""
        if self.interval and shard.mesh is not None and shard.layout.shards_optimizer:
            self._steppers = shard.mesh.group("data", "context")

    def check(self, step: int, *, with_optimizers: bool = True) -> None:
        """Compare after `step` updates, `with_optimizers` where these should be equal too; every rank calls it.

        Raises:
            DivergenceError: Ranks differ in state that should be equal; the error is the same on all ranks.
        """
        if not self.interval:
            return
        buffers = self._hash_buffers()  # first, since it releases parameters that a forward pass has gathered
        everything = dict(self._module.named_parameters())
        replicated = [(group, names) for group, names in self._shard.list_replicated(everything) if group.size > 1]
        some = {name for _, names in replicated for name in names}
        # What nobody else holds is not hashed.
        parameters = {name: p for name, p in everything.items() if name in some or self._shard.group.size > 1}
        held = {name: {f"parameter {name}": hash_tensor(local(p))} for name, p in parameters.items()}
        compared = parameters if with_optimizers else {}
        kept = {name: self._hash_state(name, p) if name in compared else {} for name, p in parameters.items()}
        differences = []
        if self.average is not None:
            for name, average in self.average.tensors.items():
                if name in held:
                    held[name][f"average of {name}"] = hash_tensor(average)
        if self._steppers is self._shard.group:
            held = {name: hashes | kept[name] for name, hashes in held.items()}
        elif self._steppers.size > 1:
            differences.append(_compare(kept, kept, self._steppers))
        if self._shard.group.size > 1:
            differences.append(self._compare_replicas(held, buffers))
        for group, names in replicated:
            if names:
                differences.append(_compare(held, names, group))
        if self._shard.mesh is not None:
            everybody = self._shard.world.gather_documents(differences, name="differences")
            differences = [difference for theirs in everybody for difference in theirs]
        if difference := next(filter(None, differences), ""):
            raise DivergenceError(
                f"replicas must be equal, but at step {step} {difference}; look for {self._suspects}code that changes "
                "it on one rank only, or a faulty machine, and resume from the last checkpoint, which was compared "
                "before it was saved"
            )

    def _compare_replicas(self, held: Mapping[str, Mapping[str, int]], buffers: Mapping[str, int]) -> str:
        group = self._shard.group
        buffers = {name: value for name, value in buffers.items() if name not in self._own}
        changed = {name for name, value in buffers.items() if value != self._start[name]}
        everybody = find_difference(_join(held, held) | buffers, group)
        if not everybody:
            self._alike |= changed
            return ""
        for names in group.gather_documents(sorted(changed), name="buffers that have changed"):
            changed &= set(names)
        own = {name for name in changed - self._alike if len({theirs[name] for theirs in everybody}) > 1}
        self._own |= own
        rest = [{name: value for name, value in theirs.items() if name not in own} for theirs in everybody]
        if self.heal is not None and self._shard.mesh is None and self.heal(rest, self._list_targets()):
            return ""
        return describe_difference(rest, group.names)

    def _list_targets(self) -> dict[str, Any]:
        """Return what is compared by the names of its hashes: tensors, or numbers as a dictionary and a key."""
        targets: dict[str, Any] = {f"buffer {name}": buffer for name, buffer in self._module.named_buffers()}
        for name, average in self.average.tensors.items() if self.average is not None else ():
            targets[f"average of {name}"] = average
        for name, parameter in self._module.named_parameters():
            targets[f"parameter {name}"] = parameter
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                targets[f"optimizer state {key} of {name}"] = value if isinstance(value, Tensor) else (state, key)
        return targets

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
        """Return hashes of the optimizer's state for a parameter: tensors and numbers."""
        hashes: dict[str, int] = {}
        state = self._optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):  # a state that was sent may have another order
            if isinstance(value := state[key], Tensor):
                hashes[f"optimizer state {key} of {name}"] = hash_tensor(local(value))
            elif isinstance(value, int | float):
                hashes[f"optimizer state {key} of {name}"] = xxhash.xxh3_64_intdigest(repr(value).encode())
        return hashes


def _compare(hashes: Mapping[str, Mapping[str, int]], names: Iterable[str], group: Group) -> str:
    """Return the first difference between ranks in the hashes of some parameters."""
    return describe_difference(find_difference(_join(hashes, names), group), group.names)


def _join(hashes: Mapping[str, Mapping[str, int]], names: Iterable[str]) -> dict[str, int]:
    return {label: value for name in names for label, value in hashes[name].items()}
