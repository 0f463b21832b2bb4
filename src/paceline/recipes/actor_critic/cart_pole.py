"""A control task: a cart that is pushed left or right must balance the pole on it.

Physics and limits of Barto, Sutton and Anderson 1983, section V, in the form that is known as CartPole-v1 (Gymnasium),
whose registry gives 500 as its largest return and a mean of 475 over 100 episodes as the return at which it is solved.

Shapes: E episodes that run side by side.
"""

import math

import torch
from torch import Tensor

MAX_STEPS = 500
"""Steps after which an episode ends, and so the largest return: each step counts 1."""
KNOWN_RETURN = 475.0
"""Mean return over 100 episodes at which the task is solved."""
NUM_OBSERVED = 4
"""Numbers of a state: position of the cart (m), its velocity (m/s), angle of the pole (rad), its velocity (rad/s)."""
NUM_ACTIONS = 2
START_RANGE = 0.05
"""Each number of a first state lies within this distance of 0."""
_GRAVITY, _CART_KG, _POLE_KG, _HALF_LENGTH_M, _FORCE_N, _STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_MOST_POSITION_M, _MOST_ANGLE = 2.4, 12 * math.pi / 180


def start(uniform_E4: Tensor) -> Tensor:
    """Return first states, of random numbers in [0, 1)."""
    return (2 * uniform_E4 - 1) * START_RANGE


def move(state_E4: Tensor, action_E: Tensor) -> Tensor:
    """Return the states after a push to the left (0) or the right (1): one step of Euler's method."""
    _, velocity, angle, turning = state_E4.unbind(-1)
    force = (2 * action_E.to(state_E4.dtype) - 1) * _FORCE_N
    cosine, sine = torch.cos(angle), torch.sin(angle)
    total_kg = _CART_KG + _POLE_KG
    push = (force + _POLE_KG * _HALF_LENGTH_M * turning**2 * sine) / total_kg
    bend = (_GRAVITY * sine - cosine * push) / (_HALF_LENGTH_M * (4 / 3 - _POLE_KG * cosine**2 / total_kg))
    slide = push - _POLE_KG * _HALF_LENGTH_M * bend * cosine / total_kg
    change = torch.stack([velocity, slide, turning, bend], dim=-1)
    return state_E4 + _STEP_S * change


def has_fallen(state_E4: Tensor) -> Tensor:
    """Return whether the cart is off its track, or the pole too far from upright."""
    return (state_E4[:, 0].abs() > _MOST_POSITION_M) | (state_E4[:, 2].abs() > _MOST_ANGLE)
