"""Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017)."""

from typing import Any

import torch
from pydantic import Field
from torch import nn

from paceline.optim.base import NamedOptimizer
from paceline.optim.trust_ratio import RatioBounds, global_norms, trust_ratios
from paceline.optim.update_rule import UpdateRule, local, local_gradient
from paceline.registry import register


@register("lars")
class LARS(NamedOptimizer):
    """SGD with momentum in which every matrix moves by the same fraction of its norm (You, Gitman and Ginsburg 2017).

    The gradient of each, with weight decay d, is scaled by ``trust_coefficient * |w| / (|g| + d |w|)``. If
    `ratio_bounds` force it to 1 this is SGD with momentum. Vectors (biases, norms) have ratio 1 and no decay, as in
    later work with LARS; in the paper they have a ratio too. The momentum sums updates that are already multiplied by
    the learning rate, as in the paper; `rate_in_momentum` False multiplies the sum by it, as torch's SGD does. Both are
    equal as long as the rate does not change; while it rises, the paper's form takes shorter steps.

    In memory: one buffer of the parameters' size. On the wire: nothing but two norms of each sharded parameter.
    """

    learning_rate: float = Field(default=0.1, gt=0)
    """Base learning rate, before the schedule's factor; vectors use it unscaled, as in SGD."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    trust_coefficient: float = Field(default=0.02, gt=0)
    """Distance that a matrix moves at learning rate 1 without momentum, as a fraction of its norm. The paper has 0.001,
    with correspondingly larger learning rates."""
    ratio_bounds: RatioBounds | None = None
    """Smallest and largest ratio."""
    rate_in_momentum: bool = True
    """Whether the learning rate multiplies each update before the momentum sums it, as in the paper, or the sum."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the rule over the parameters of `module`."""
        return LARSRule(
            self.group_parameters(module),
            {
                "lr": self.learning_rate,
                "momentum": self.momentum,
                "trust_coefficient": self.trust_coefficient,
                "ratio_bounds": self.ratio_bounds,
                "rate_in_momentum": self.rate_in_momentum,
            },
        )


class LARSRule(UpdateRule):
    """LARS as an optimizer.

    Its state is ``velocity`` in the paper's form, a sum of steps, otherwise ``momentum_buffer``, a sum of gradients:
    two names, since one form's sum is not the other's.
    """

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update the parameters of a group."""
        weights = [local(parameter) for parameter in parameters]
        gradients = [local_gradient(parameter) for parameter in parameters]
        adapted = [index for index, parameter in enumerate(parameters) if parameter.dim() >= 2]
        decay: float = group["weight_decay"]
        updates = list(torch._foreach_add(gradients, weights, alpha=decay))
        if adapted:
            laid_out = [parameters[index] for index in adapted]
            measured = [weights[index] for index in adapted] + [gradients[index] for index in adapted]
            weight_norms, gradient_norms = global_norms(laid_out * 2, measured).chunk(2)
            ratios = trust_ratios(
                weight_norms,
                gradient_norms + decay * weight_norms,
                group["trust_coefficient"],
                group["ratio_bounds"],
            )
            torch._foreach_mul_([updates[index] for index in adapted], ratios)
        if group["rate_in_momentum"]:
            torch._foreach_mul_(updates, group["lr"])
        if group["momentum"]:
            key = "velocity" if group["rate_in_momentum"] else "momentum_buffer"
            for parameter in parameters:
                if key not in self.state[parameter]:
                    self.state[parameter][key] = torch.zeros_like(parameter)
            buffers = [local(self.state[parameter][key]) for parameter in parameters]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers
        torch._foreach_add_(weights, updates, alpha=-1.0 if group["rate_in_momentum"] else -group["lr"])
