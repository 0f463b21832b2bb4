"""What is checked before a replica's first step: that all workers begin alike, or go on with all that was saved."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from paceline.errors import SettingsError
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.replica.hashing import describe_difference, find_difference, hash_tensor
from paceline.sync.rule import Rule


class Beginning:
    """The state in which a replica takes its first step.

    Args:
        module: The model.
        optimizer: Optimizer of the model.
        shard: Model shard of this rank. Parameters of a layout are not compared: they began as one model, and may be
            gathered for backward now.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, shard: ModelShard) -> None:
        self._module, self._optimizer, self._group = module, optimizer, shard.group
        self._is_compared = shard.mesh is None
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

    def check(self, rule: Rule, *, is_resumed: bool) -> None:
        """Check module and optimizer before the first backward.

        Args:
            rule: Synchronisation rule; workers that run at their own pace cannot be compared.
            is_resumed: Whether the replica goes on from a saved state, or begins anew by the user's word.

        Raises:
            SettingsError: Module or optimizer are not those that were saved with the replica's state; or workers begin
                with different parameters, or with loaders that do not divide the same samples.
        """
        self.is_checked = True
        if self._expected is not None:
            here = self.fingerprint()
            for name, others in (("module", "optimizer"), ("optimizer", "module")):
                if here[name] != self._expected[name]:
                    raise SettingsError(
                        f"the {name} must be as it was when the replica's state was saved, but it is not; load the "
                        f"states of {name}, {others} and replica, of the same update, or resume with "
                        "paceline.load_latest"
                    )
        if self._group.size > 1 and not rule.is_asynchronous:
            if rule.begins_with_equal_replicas and not is_resumed:
                self._compare_parameters()
            self._compare_loaders()

    def _compare_parameters(self) -> None:
        everybody = find_difference(self._hash_parameters(), self._group)
        if difference := describe_difference(everybody, self._group.names):
            raise SettingsError(
                f"all workers must begin with the same parameters, but {difference}; load weights on every rank alike, "
                "before the Replica is made or from then on with paceline.load_latest"
            )

    def _compare_loaders(self) -> None:
        mine = sorted({str(loader) for loader in self._group.membership.loaders})
        everybody = self._group.gather_documents(mine, name="loaders")
        if any(everybody) and not set.intersection(*map(set, everybody)):
            raise SettingsError(
                f"loaders must divide the same samples on all ranks, but rank 0 has {' and '.join(everybody[0])}, and "
                f"this one, rank {self._group.rank}, {' and '.join(mine)}; give them the same data set and settings"
            )

    def _hash_parameters(self) -> dict[str, int]:
        named = self._module.named_parameters() if self._is_compared else ()
        return {f"parameter {name}": hash_tensor(local(parameter)) for name, parameter in named}


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
