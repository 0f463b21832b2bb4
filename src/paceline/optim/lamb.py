"""Layer-wise adaptive moments for large batches (You et al. 2020)."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.optim.base import DecayRate, NamedOptimizer
from paceline.optim.trust_ratio import RatioBounds, global_norms, trust_ratios
from paceline.optim.update_rule import UpdateRule, local, local_gradient
from paceline.registry import register


@register("lamb")
class LAMB(NamedOptimizer):
    """AdamW in which every matrix moves by the same fraction of its own norm (You et al. 2020).

    The update u of AdamW, weight decay included and moments bias-corrected, is scaled by ``|w| / |u|``.
    If `ratio_bounds` force that to 1 this is AdamW. Vectors (biases, norms) have ratio 1 and no decay, as in the
    authors' code. The paper bounds ``|w|`` if anything; here the bounds are on the ratio.

    In memory: two buffers of the parameters' size, as AdamW, and during a step another two. On the wire: nothing but
    two norms of each sharded parameter.
    """

    learning_rate: float = Field(default=2e-3, gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Addend to the root of the second moment, so that nothing is divided by zero."""
    ratio_bounds: RatioBounds | None = None
    """Smallest and largest ratio."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the rule over the parameters of `module`."""
        return LAMBRule(
            self.group_parameters(module),
            {
                "lr": self.learning_rate,
                "betas": self.betas,
                "eps": self.epsilon,
                "ratio_bounds": self.ratio_bounds,
                "decoupled_weight_decay": True,
            },
        )


class LAMBRule(UpdateRule):
    """LAMB as an optimizer; its state is that of torch's AdamW."""

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update the parameters of a group."""
        weights = [local(parameter) for parameter in parameters]
        updates = self._adapt(group, parameters)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        adapted = [index for index, parameter in enumerate(parameters) if parameter.dim() >= 2]
        if adapted:
            laid_out = [parameters[index] for index in adapted]
            measured = [weights[index] for index in adapted] + [updates[index] for index in adapted]
            weight_norms, update_norms = global_norms(laid_out * 2, measured).chunk(2)
            ratios = trust_ratios(weight_norms, update_norms, 1.0, group["ratio_bounds"])
            torch._foreach_mul_([updates[index] for index in adapted], ratios)
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adapt(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> list[Tensor]:
        """Update the moments with the gradients, and return the first divided by the root of the second."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        gradients = [local_gradient(parameter) for parameter in parameters]
        first = [local(state["exp_avg"]) for state in states]
        second = [local(state["exp_avg_sq"]) for state in states]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [float(state["step"]) for state in states]
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(first, roots)
        torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        return list(updates)
