"""Adafactor (Shazeer and Stern 2018)."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from paceline.optim.base import NamedOptimizer
from paceline.optim.trust_ratio import global_norms
from paceline.optim.update_rule import UpdateRule, local
from paceline.registry import register


@register("adafactor")
class Adafactor(NamedOptimizer):
    """Adaptive rates from second moments that are kept by row and by column (Shazeer and Stern 2018).

    Each step moves a parameter by `learning_rate` (or 1 / sqrt(step) if that is less) times its own root mean square.
    In memory: m + n numbers for a matrix of m rows and n columns instead of Adam's 2 m n; one for each element of a
    vector; larger tensors (convolutions) are factored over the last two dims only. Like torch's, and unlike the
    paper's, it has no first moment. On the wire: means over the shared parts of a parameter, and two norms of it.
    """

    learning_rate: float = Field(default=3e-2, gt=0)
    """Largest relative step, before the schedule's factor; the paper's 1e-2 is for runs of 100,000 steps and more."""
    beta2_decay: float = Field(default=-0.8, lt=0)
    """Exponent of the second moment's decay: it forgets with rate step ** beta2_decay."""
    epsilon: float = Field(default=1e-3, gt=0)
    """Smallest root mean square that steps are relative to."""
    clip_threshold: float = Field(default=1.0, ge=1)
    """Largest root mean square of an update before the learning rate."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the rule over the parameters of `module`."""
        return AdafactorRule(
            self.group_parameters(module),
            {
                "lr": self.learning_rate,
                "beta2_decay": self.beta2_decay,
                "eps": self.epsilon,
                "clip_threshold": self.clip_threshold,
            },
        )


class AdafactorRule(UpdateRule):
    """Adafactor as an optimizer; its state equals that of torch's, which does not support DTensors."""

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update the parameters of a group, one at a time."""
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = _settle(parameter.grad, parameter)
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
            state["step"] += 1
            step = float(state["step"])
            epsilon = torch.finfo(parameter.dtype).eps
            update = self._estimate(state, gradient, step ** group["beta2_decay"], epsilon)
            update = _settle(update.clamp(min=epsilon**2).rsqrt() * gradient, parameter)
            root = parameter.numel() ** 0.5
            size = max(group["eps"], _norm(parameter) / root)
            excess = max(1.0, _norm(update) / (root * group["clip_threshold"]))
            weights = local(parameter)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(local(update), alpha=-size * min(group["lr"], step**-0.5) / excess)

    def _estimate(self, state: dict[str, Any], gradient: Tensor, forgotten: float, epsilon: float) -> Tensor:
        """Return the second moment after a gradient."""
        if gradient.dim() < 2:
            return self._average(state, "variance", gradient.square(), forgotten)
        squares = gradient.square()
        rows = self._average(state, "row_var", squares.mean(dim=-1, keepdim=True), forgotten)
        columns = self._average(state, "col_var", squares.mean(dim=-2, keepdim=True), forgotten)
        return rows * columns / _settle(rows.mean(dim=-2, keepdim=True)).clamp(min=epsilon)

    def _average(self, state: dict[str, Any], name: str, new: Tensor, forgotten: float) -> Tensor:
        """Return an average with `new` in place of the forgotten part."""
        new = _settle(new)
        kept: Tensor = state.get(name, torch.zeros_like(new))
        if isinstance(new, DTensor) and not (isinstance(kept, DTensor) and kept.placements == new.placements):
            # A checkpoint has loaded it unsharded.
            whole = kept.full_tensor() if isinstance(kept, DTensor) else kept
            kept = distribute_tensor(whole, new.device_mesh, new.placements, src_data_rank=None)
        state[name] = kept.lerp_(new, forgotten)
        return kept


def _settle(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor without partial sums on any rank, with the placements of `like`, if given."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor):
        return tensor.redistribute(placements=like.placements)
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _norm(tensor: Tensor) -> float:
    return float(global_norms([tensor], [local(tensor)]))
