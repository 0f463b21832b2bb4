"""Episodes as samples: a source whose workers are the actors, which play with the model that learns from them.

Shapes: E episodes that are played side by side, T steps of an episode, O observed numbers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.data.base import Data, Source, Spec, Splits
from paceline.data.orders import Indices
from paceline.data.permutation import derive_seed
from paceline.errors import SettingsError
from paceline.recipes.actor_critic import cart_pole
from paceline.registry import register

_NUM_EPISODES = 2**40
"""Episodes that there are: more than anybody plays, so that no two are alike."""
_HELD_OUT = 1
"""Word that makes seeds of held-out episodes others than those of training."""


@runtime_checkable
class HasTwin(Protocol):
    """A module that actors can play with."""

    def twin(self) -> nn.Module:
        """Return a module of the same shapes, on the CPU, whose forward returns logits and values of states."""


@register("cart_pole")
class CartPole(Data):
    """Episodes of the control task `cart_pole`, made while the model trains on them.

    A sample is a whole episode: episode i has a start and random choices of its own, f(seed, i), and else depends on
    the model's parameters when it is played. A global batch thus holds the same episodes on any number of workers, to
    rounding; each is used once, and a run resumes by their number alone.
    """

    discount: float = Field(0.99, gt=0, lt=1)
    """Weight of the next step's reward."""
    advantage_decay: float = Field(0.98, ge=0, le=1)
    """Weight, besides `discount`, of the next step's surprise in an advantage (lambda, Schulman et al. 2016): 0 trusts
    the critic, 1 what was played."""
    lag: int = Field(0, ge=0, le=8)
    """Steps that actors may be ahead of the learner. With 0 all play with its newest parameters, and a run that is
    resumed equals one that was not; with more they play while it learns, with those of as many steps before."""
    num_evaluated: int = Field(100, ge=1)
    """Episodes of an evaluation, in which the likeliest action is taken."""
    max_steps: int = Field(cart_pole.MAX_STEPS, ge=1)
    """Steps after which an episode ends."""
    seed: int = Field(0, ge=0)
    """Seed of all episodes."""

    def open(self) -> Splits:
        """Return the episodes to play, and those of evaluations."""
        return Splits(Episodes(self), Episodes(self, is_held_out=True), shuffle=False)


class Episodes(Source):
    """Episodes that are played when they are read.

    Args:
        settings: Settings of the data.
        is_held_out: Whether the likeliest actions are taken, in a fixed number of episodes.
    """

    def __init__(self, settings: CartPole, *, is_held_out: bool = False) -> None:
        self._settings, self._is_held_out = settings, is_held_out
        self.steps_ahead = settings.lag
        self.spec = Spec(cart_pole.NUM_ACTIONS, (settings.max_steps, cart_pole.NUM_OBSERVED))
        self._module: nn.Module | None = None
        self._actor: nn.Module | None = None

    def __len__(self) -> int:
        """Return the number of episodes that there are."""
        return self._settings.num_evaluated if self._is_held_out else _NUM_EPISODES

    def watch(self, module: nn.Module) -> None:
        """Play with the parameters that `module` has whenever episodes are read.

        Raises:
            SettingsError: The module has no `twin`, or holds a part of a model.
        """
        if not isinstance(module, HasTwin):
            raise SettingsError(
                f"a model that plays must have a method twin, which returns a module of the same shapes, but got "
                f"{type(module).__name__}; add it, or take model actor_critic"
            )
        actor = module.twin().requires_grad_(requires_grad=False).eval()
        shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (actor, module)]
        if shapes[0] != shapes[1]:
            raise SettingsError(
                "a model that plays must be whole on each rank, but this one is divided; leave axes of the layout "
                "other than data out"
            )
        self._module, self._actor = module, actor

    def read(self, indices: Indices) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Play episodes, and return their observations_ETO, and what the learner needs of each step."""
        actor = self._copy_actor()
        settings = self._settings
        draws = [self._draw(int(index)) for index in indices]
        noise_ET1 = torch.from_numpy(np.stack(draws))
        with torch.no_grad():
            played = play(actor, noise_ET1, is_greedy=self._is_held_out)
            values_ET1 = _judge(actor, played.observed)
        advantages, returns = weigh(
            values_ET1.numpy(), played.lengths.numpy(), played.fell.numpy(), settings.discount, settings.advantage_decay
        )
        is_played = torch.arange(settings.max_steps) < played.lengths[:, None]
        return played.observed[:, :-1], {
            "actions": played.actions,
            "log_probabilities": played.log_probabilities,
            "advantages": torch.from_numpy(advantages) * is_played,
            "returns": torch.from_numpy(returns) * is_played,
            "is_played": is_played,
        }

    def _copy_actor(self) -> nn.Module | None:
        """Return the actor with the parameters of now; None before there is a model: then both actions are as likely.

        Where actors lag, the learner may change parameters while they are copied. What is learned from is the
        probability with which an action was taken indeed, whatever mixture of two steps that came from.
        """
        if self._module is not None and self._actor is not None:
            self._actor.load_state_dict(self._module.state_dict())
        return self._actor

    def _draw(self, index: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the random numbers of an episode: of its start, and of each step."""
        seed = derive_seed(self._settings.seed, index, _HELD_OUT * self._is_held_out)
        generator = np.random.Generator(np.random.Philox(seed))
        return generator.random(cart_pole.NUM_OBSERVED + self._settings.max_steps)


class Played(NamedTuple):
    """Episodes that were played; steps after their ends hold zeros."""

    observed: Tensor
    """States, and the last one: [E, T + 1, O]."""
    actions: Tensor
    """[E, T], int64."""
    log_probabilities: Tensor
    """Logarithms of the probabilities with which the actions were taken: [E, T]."""
    lengths: Tensor
    """Number of steps of each episode: [E]."""
    fell: Tensor
    """True for an episode that ended since the pole fell, or the cart left its track: [E]."""


def play(actor: nn.Module | None, noise: Tensor, *, is_greedy: bool = False) -> Played:
    """Play episodes side by side, each to its end.

    Args:
        actor: Module whose forward returns logits and values; None to take each action as often.
        noise: Random numbers in [0, 1) of each episode: of its start, and of each step; [E, O + T].
        is_greedy: Whether the likeliest action is taken.
    """
    state = cart_pole.start(noise[:, : cart_pole.NUM_OBSERVED])
    choices = noise[:, cart_pole.NUM_OBSERVED :]
    num_episodes, max_steps = choices.shape
    observed = torch.zeros(num_episodes, max_steps + 1, cart_pole.NUM_OBSERVED)
    actions = torch.zeros(num_episodes, max_steps, dtype=torch.int64)
    log_probabilities = torch.zeros(num_episodes, max_steps)
    lengths = torch.zeros(num_episodes, dtype=torch.int64)
    fell = torch.zeros(num_episodes, dtype=torch.bool)
    observed[:, 0] = state
    for step in range(max_steps):
        logits = torch.zeros(num_episodes, 2) if actor is None else actor(observed[:, step])[0]
        log_odds = torch.log_softmax(logits, dim=-1)
        goes_right = log_odds[:, 1] > log_odds[:, 0] if is_greedy else choices[:, step] < log_odds[:, 1].exp()
        actions[:, step] = goes_right
        log_probabilities[:, step] = torch.where(goes_right, log_odds[:, 1], log_odds[:, 0])
        state = torch.where(fell[:, None], state, cart_pole.move(state, goes_right))
        lengths += ~fell
        fell = fell | cart_pole.has_fallen(state)
        observed[:, step + 1] = state
        if bool(fell.all()):
            break
    # What follows an episode's end must not depend on the length of those that were played beside it.
    steps = torch.arange(max_steps + 1)
    observed *= (steps <= lengths[:, None]).unsqueeze(-1)
    is_played = steps[:-1] < lengths[:, None]
    return Played(observed, actions * is_played, log_probabilities * is_played, lengths, fell)


def weigh(
    values: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    fell: np.ndarray[Any, Any],
    discount: float,
    decay: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the advantages of actions (generalised advantage estimation, Schulman et al. 2016), and the returns.

    Each step is rewarded with 1 - `discount`, so that a return that never ends is 1. What the limit of steps has broken
    off goes on with the value of its last state.

    Args:
        values: Values of all states and of the last one: [E, T + 1].
        lengths: Number of steps of each episode: [E].
        fell: True for an episode that ended by itself: [E].
        discount: Weight of the next step's reward.
        decay: Weight, besides, of the next step's surprise.
    """
    num_episodes, max_steps = values.shape[0], values.shape[1] - 1
    advantages = np.zeros((num_episodes, max_steps), dtype=np.float32)
    following = np.zeros(num_episodes)
    for step in reversed(range(max_steps)):
        is_last = lengths == step + 1
        next_value = np.where(is_last & fell, 0.0, values[:, step + 1])
        surprise = (1 - discount) + discount * next_value - values[:, step]
        following = np.where(step < lengths, surprise + discount * decay * np.where(is_last, 0.0, following), 0.0)
        advantages[:, step] = following
    return advantages, (advantages + values[:, :-1]).astype(np.float32)


def _judge(actor: nn.Module | None, observed: Tensor) -> Tensor:
    """Return the values of states."""
    values: Tensor = torch.zeros(observed.shape[:-1]) if actor is None else actor(observed)[1]
    return values
