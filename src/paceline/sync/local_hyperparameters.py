"""Hyper-parameters of an optimizer that change while its worker steps alone."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.optim.torch_rules import is_adaptive, is_known

_FLAG = "decoupled_weight_decay"
"""Name of torch's flag of a group whose weight decay is no part of the gradient."""


def may_lengthen(optimizer: torch.optim.Optimizer, rank: int) -> bool:
    """Return whether steps of an optimizer may be multiplied, without its decoupled weight decay; warn if unknown.

    Only steps of adaptive optimizers may. What an optimizer that is neither torch's nor Paceline's does with weight
    decay is known only if its groups carry torch's flag ``decoupled_weight_decay``.

    Args:
        optimizer: The worker's optimizer.
        rank: Rank of the worker; 0 warns.
    """
    if not is_adaptive(optimizer):
        return False
    if is_known(optimizer) or all(_FLAG in group for group in optimizer.param_groups):
        return True
    if rank == 0:
        kind = type(optimizer)
        warnings.warn(
            f"steps of {kind.__module__}.{kind.__qualname__} keep their own length, since it is not known whether "
            "longer ones would multiply its weight decay; to lengthen them, say it before the replica is made: "
            f"for group in optimizer.param_groups: group[{_FLAG!r}] = True (it decays as AdamW) or False (as Adam); to "
            "silence this, give the rule scale_rate=False, or step_length='own' with coded steps",
            stacklevel=3,
        )
    return False


class LocalHyperparameters:
    """A bound on beta1 and a factor of the learning rate, in force from `apply` to `restore`: for one step.

    Only adaptive optimizers are changed (those with betas, RMSprop, Adagrad, Adadelta): they divide by the size of the
    gradients that they see, and those of one worker are noisier than the mean of all. Weight decay that is decoupled
    from the gradient, as AdamW's, stays what it was: it is divided by what multiplies the step.

    Args:
        optimizer: The worker's optimizer.
        largest_beta1: Largest beta1; None changes none.
        rate_factor: Factor of the learning rates.
        step_factor: Factor by which the step will be multiplied afterwards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        largest_beta1: float | None = None,
        rate_factor: float = 1.0,
        step_factor: float = 1.0,
    ) -> None:
        self._optimizer = optimizer
        self._largest_beta1, self._rate_factor, self._step_factor = largest_beta1, rate_factor, step_factor
        self._given: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def apply(self) -> None:
        """Change the hyper-parameters; those of a step that failed are restored first."""
        self.restore()
        if not is_adaptive(self._optimizer):
            return
        for group in self._optimizer.param_groups:
            changed: dict[str, Any] = {}
            if self._largest_beta1 is not None and "betas" in group:
                beta1, *others = group["betas"]
                changed["betas"] = (min(beta1, self._largest_beta1), *others)
            if self._rate_factor != 1.0:
                changed["lr"] = group["lr"] * self._rate_factor
            longer = self._rate_factor * self._step_factor
            if longer != 1.0 and group.get(_FLAG):
                changed["weight_decay"] = group["weight_decay"] / longer
            self._given.append((group, {name: group[name] for name in changed}))
            group.update(changed)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While active, the hyper-parameters are changed."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the hyper-parameters that the optimizer was given."""
        for group, given in self._given:
            group.update(given)
        self._given = []
