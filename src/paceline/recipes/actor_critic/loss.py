"""The loss of an actor and its critic on episodes that actors have played.

Shapes: B episodes, T steps of an episode, A actions.
"""

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field

from paceline.data.batch import Batch, call
from paceline.registry import register
from paceline.replica.loss import Loss
from paceline.training.objective import Objective


@register("actor_critic")
class ActorCriticLoss(Objective):
    """Policy gradient of advantages, squared error of values, less entropy: a mean over steps of episodes.

    Advantage actor-critic (Mnih et al. 2016). Actors that lag behind the learner are corrected by the ratio of its
    probability of an action to theirs, clipped as in proximal policy optimization (Schulman et al. 2017). Without a lag
    the ratio is 1, and the gradient is that of plain advantage actor-critic. Advantages are not normalised over a
    batch, which would depend on its division among workers.
    """

    clip: float = Field(0.2, gt=0)
    """Largest change of an action's probability, as a fraction, that an advantage is still followed for."""
    value_factor: float = Field(1.0, ge=0)
    """Factor of the squared error of values."""
    entropy_factor: float = Field(0.005, ge=0)
    """Factor of the policy's entropy, in nats, which keeps it exploring."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over steps, weighted by their number: `Batch.count`."""
        (logits, values), played = call(model, batch.inputs), batch.targets
        num_steps = batch.count(batch.on_host.targets["is_played"])
        log_odds = torch.log_softmax(logits, dim=-1)
        chosen = log_odds.gather(-1, played["actions"].unsqueeze(-1)).squeeze(-1)
        ratio, advantages = torch.exp(chosen - played["log_probabilities"]), played["advantages"]
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        entropy = -(log_odds.exp() * log_odds).sum(dim=-1)
        error = (values - played["returns"]) ** 2
        each = self.value_factor * error - gain - self.entropy_factor * entropy
        total = (each * played["is_played"]).sum()
        return Loss(total / max(num_steps, 1.0), num_steps)


def measure_return(output: Any, batch: Batch) -> dict[str, tuple[float, int]]:
    """Return the number of steps that the episodes lasted, which is their return."""
    played = batch.targets["is_played"][: batch.num_samples]
    return {"return": (float(played.sum()), batch.num_samples)}
