"""What is checked before a replica's first step: that all workers begin alike, or go on with all that was saved."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from paceline.data.first_samples import is_alike
from paceline.data.stream import DifferentStreamsWarning
from paceline.errors import SettingsError
from paceline.parallel.batch_norm import LocalBatchNorm, too_few_samples
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard, ParameterPlaces, replaced_parameter
from paceline.parallel.start import broadcast_module, check_same_model
from paceline.replica.hashing import describe_difference, find_difference, hash_tensor
from paceline.sync.rule import Rule


def start_alike(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    shard: ModelShard,
    rule: Rule,
    settings: Mapping[str, object],
) -> None:
    """Compare settings, optimizers and models of all ranks, and copy rank 0's parameters and buffers to every rank.

    Args:
        module: The model.
        optimizer: Optimizer of the model; where replicas stay equal, its hyperparameters must be equal too.
        shard: Model shard of this rank.
        rule: Synchronisation rule.
        settings: Other arguments of the replica, by name: strings, numbers and None.

    Raises:
        SettingsError: A setting, the optimizer or the model is not the same on all ranks.
    """
    if shard.world.size == 1:
        return
    mine: dict[str, object] = {"sync": rule.name} | {
        f"sync.{name}": value for name, value in rule.model_dump(mode="json").items()
    }
    mine |= {name: _as_json(value) for name, value in settings.items()}
    if shard.mesh is None:  # ranks of a layout hold different parameters
        mine |= _describe_optimizer(module, optimizer, with_numbers=rule.keeps_replicas_equal)
    everybody = shard.world.gather_documents(mine, name="settings")
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        values = [theirs.get(name) for theirs in everybody]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise SettingsError(
                f"{name} must be the same on all ranks, but is {found}; give Replica the same settings everywhere"
            )
    # A layout did this when models were still whole.
    if shard.mesh is None and not shard.world.membership.has_equal_models:
        check_same_model(module, shard.group)
        broadcast_module(module, shard.group)


def _describe_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, with_numbers: bool
) -> dict[str, object]:
    """Return the optimizer's class, and of each parameter group the parameters and perhaps its hyperparameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, object] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        where = f"parameter group {number} of the optimizer"
        found[where] = ", ".join(names.get(id(parameter), "?") for parameter in group["params"])
        if with_numbers:
            found |= {f"{name} of {where}": _as_json(value) for name, value in group.items() if name != "params"}
    return found


def _as_json(value: object) -> object:
    """Return what tells a setting from another one."""
    if isinstance(value, Tensor | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


class Beginning:
    """The state in which a replica takes its first step.

    Args:
        module: The model.
        optimizer: Optimizer of the model.
        shard: Model shard of this rank. Parameters of a layout are not compared: they began as one model, and may be
            gathered for backward now.
        rule: Synchronisation rule; workers that run at their own pace cannot be compared.
        batch_norm: BatchNorm layers of the model, if there are any that may be watched.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        shard: ModelShard,
        rule: Rule,
        batch_norm: LocalBatchNorm | None,
    ) -> None:
        self._module, self._optimizer, self._group = module, optimizer, shard.group
        self._is_compared = shard.mesh is None
        self.places = ParameterPlaces(module)
        """Places of the parameters, to be checked before each forward that trains."""
        self._rule = rule
        self._parameters = dict(module.named_parameters()) if self._is_compared else {}
        self._frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        self._copied = self._hash_parameters() if rule.copies_first_parameters else None
        self._batch_norm = batch_norm
        if batch_norm is not None:
            batch_norm.watch()
        self._expected: Mapping[str, Any] | None = None
        self.is_checked = False
        """Whether the first step has begun."""

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells whether module and optimizer are those of a saved replica: a hash, and names of states."""
        kept = [sorted(self._optimizer.state.get(p, ())) for g in self._optimizer.param_groups for p in g["params"]]
        return {"module": _digest(self._hash_parameters()), "optimizer": _digest(kept)}

    def expect(self, fingerprint: Mapping[str, Any]) -> None:
        """Note the fingerprint that was saved with the state that was loaded."""
        self._expected = fingerprint

    def check(self, *, is_resumed: bool) -> None:
        """Check module and optimizer before the first backward.

        Args:
                is_resumed: Whether the replica goes on from a saved state, or begins anew by the user's word.

        Raises:
            SettingsError: A parameter was replaced or frozen since the replica was made; or module or optimizer are not
                those that were saved with the replica's state; or workers begin with different parameters, or with
                loaders that do not divide the same samples; or BatchNorm is going to see a single value of a channel.
        """
        self.is_checked = True
        self._check_same_parameters()
        if self._expected is not None:
            here = self.fingerprint()
            for name, others in (("module", "optimizer"), ("optimizer", "module")):
                if here[name] != self._expected[name]:
                    raise SettingsError(
                        f"the {name} must be as it was when the replica's state was saved, but it is not; load the "
                        f"states of {name}, {others} and replica, of the same update, or resume with "
                        "paceline.load_latest"
                    )
        num_values = self._batch_norm.end_watch() if self._batch_norm is not None else None
        if self._copied is not None and not is_resumed and self._hash_parameters() != self._copied:
            raise SettingsError(
                f"parameters must be at the first step what they were when the Replica was made, since sync "
                f"{self._rule.name} has copied them, but they changed; load weights before it is made, or with "
                "paceline.load_latest"
            )
        if self._rule.is_asynchronous:
            return
        loaders = list(self._group.membership.loaders)
        loaders = [loader for loader in loaders if loader.in_hand is not None] or loaders
        refused = self._refuse_batches(loaders, num_values)
        if self._group.size > 1:
            if not is_resumed:
                self._compare_parameters()
            documents = [loader.describe() for loader in loaders]
            everybody = self._group.gather_documents([documents, refused], name="loaders")
            self._compare_loaders([documents for documents, _ in everybody])
            refused = next((theirs for _, theirs in everybody if theirs), "")
        if refused:
            raise SettingsError(refused)

    def _check_same_parameters(self) -> None:
        here = dict(self._module.named_parameters()) if self._is_compared else {}
        for name in self._parameters | here:
            change = "frozen"
            if self._parameters.get(name) is not here.get(name):
                change = "replaced" if name in here and name in self._parameters else "added or removed"
            elif here[name].requires_grad or name in self._frozen:
                continue
            raise replaced_parameter(name, change)

    def _compare_parameters(self) -> None:
        everybody = find_difference(self._hash_parameters(), self._group)
        if difference := describe_difference(everybody, self._group.names):
            raise SettingsError(
                f"all workers must begin with the same parameters, but {difference}; load weights on every rank alike, "
                "before the Replica is made or from then on with paceline.load_latest"
            )

    def _refuse_batches(self, loaders: Sequence[Any], num_values: int | None) -> str:
        """Return why BatchNorm cannot train on a batch that is still to come; empty if it can on all."""
        for loader in loaders:
            batch = loader.in_hand
            if num_values is None or batch is None or num_values != batch.num_samples:  # more than one of a sample
                continue
            assert self._batch_norm is not None
            own, joint = loader.list_sizes()
            scope = self._batch_norm.scope
            if 1 in (joint if scope == "global" else own):
                return str(too_few_samples(loader.order.num_samples, loader.global_batch, scope))
        return ""

    def _compare_loaders(self, everybody: Sequence[Sequence[tuple[str, list[float] | None, bool]]]) -> None:
        """Compare the loaders of all ranks, by rank: the name of each, a sketch of its data, whether it is a stream."""
        named = [sorted({name for name, _, _ in loaders}) for loaders in everybody]
        if any(named) and not set.intersection(*map(set, named)):
            other = next(rank for rank, names in enumerate(named) if names != named[0])
            here, there = (" and ".join(named[rank]) or "none" for rank in (0, other))
            raise SettingsError(
                f"loaders must divide the same samples on all ranks, but rank 0 has {here}, and rank {other} {there}; "
                "give them the same data set and settings"
            )
        for rank, loaders in enumerate(everybody):
            pairs = [(one, other) for one in everybody[0] for other in loaders if one[0] == other[0]]
            if not pairs or any(is_alike(one[1], other[1]) for one, other in pairs):
                continue
            (name, _, is_stream), _ = pairs[0]
            if not is_stream:
                raise SettingsError(
                    f"loaders must divide the same samples on all ranks, but {name} holds others on rank {rank} than "
                    "on rank 0; seed random numbers alike on all ranks before the data set is made or split "
                    "(torch.manual_seed), and let no rank cut out its own part, which Loader does"
                )
            if self._group.rank == 0:
                warnings.warn(
                    f"an iterable data set must yield the same samples on all workers, of which each takes its share, "
                    f"but the first sample on rank {rank} is not that of rank 0: a data set that divides its samples "
                    "by rank itself loses most of them; yield all of them. Where they differ by augmentation only, "
                    "silence this: warnings.simplefilter('ignore', paceline.data.DifferentStreamsWarning)",
                    DifferentStreamsWarning,
                    stacklevel=2,
                )
            return

    def _hash_parameters(self) -> dict[str, int]:
        named = self._module.named_parameters() if self._is_compared else ()
        return {f"parameter {name}": hash_tensor(local(parameter)) for name, parameter in named}


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
