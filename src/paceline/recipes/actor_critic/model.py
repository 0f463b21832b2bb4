"""An actor and its critic: two small networks that look at the same state.

Shapes: B batch, in any number of dims; O observed numbers, A actions.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.registry import register
from paceline.training.model import Model


@register("actor_critic")
class ActorCritic(Model):
    """Settings of a policy over a few actions, and of the value of a state, as perceptrons of two hidden layers."""

    width: int = Field(64, ge=1)
    """Dims of a hidden layer."""

    def build(self, spec: Spec) -> "PolicyAndValue":
        """Return new networks: `spec` has the shape of an observation's sequence, and the number of actions."""
        return PolicyAndValue(spec.input_shape[-1], self.width, spec.num_classes)


class PolicyAndValue(nn.Module):
    """States to the logits of actions, and to their values; the two share no parameter.

    Args:
        num_observed: Numbers of a state.
        width: Dims of a hidden layer.
        num_actions: Number of actions.
    """

    def __init__(self, num_observed: int, width: int, num_actions: int) -> None:
        super().__init__()
        self._sizes = num_observed, width, num_actions
        self.actor = _perceptron(num_observed, width, num_actions, 0.01)  # both actions are as likely at first
        self.critic = _perceptron(num_observed, width, 1)

    def twin(self) -> "PolicyAndValue":
        """Return new networks of the same shapes, on the CPU, which actors load parameters into."""
        with torch.random.fork_rng(devices=[]):  # the random parameters are replaced
            return PolicyAndValue(*self._sizes)

    def forward(self, observed_BO: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits_BA and values_B."""
        return self.actor(observed_BO), self.critic(observed_BO).squeeze(-1)


def _perceptron(num_inputs: int, width: int, num_outputs: int, scale: float = 1.0) -> nn.Sequential:
    last = nn.Linear(width, num_outputs)
    with torch.no_grad():
        last.weight *= scale
    return nn.Sequential(nn.Linear(num_inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
