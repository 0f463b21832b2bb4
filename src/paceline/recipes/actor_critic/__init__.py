"""Layer 10: an actor and its critic, which learn a control task from episodes that they play."""

from paceline.optim import Adam
from paceline.recipes.actor_critic.episodes import CartPole
from paceline.recipes.actor_critic.loss import ActorCriticLoss, measure_return
from paceline.recipes.actor_critic.model import ActorCritic
from paceline.schedules import Cosine
from paceline.training.run import Run

__all__ = ["ActorCritic", "ActorCriticLoss", "CartPole", "run"]


def run() -> Run:
    """An actor and its critic that learn to balance a pole on a cart, from episodes that they play meanwhile.

    Its known return is 475 of 500, a mean over 100 episodes (CartPole-v1).
    """
    return Run(
        model=ActorCritic(),
        data=CartPole(),
        loss=ActorCriticLoss(),
        metrics=measure_return,
        optimizer=Adam(learning_rate=4e-3),
        schedule=Cosine(warmup_steps=5, final_factor=0.02),
        clip_norm=None,
        global_batch=32,
        num_steps=200,
        evaluate_interval=50,
        checkpoint_interval=50,
    )
