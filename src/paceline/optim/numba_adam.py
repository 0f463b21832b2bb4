"""The change that Adam makes, on CPUs: one pass over memory."""

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Numbers = tuple[np.float32, ...]


def replace(gradient: Tensor, weights: Tensor, first: Tensor, second: Tensor, numbers: tuple[float, ...]) -> None:
    """Update flat float32 moments, and replace `gradient` by what Adam would subtract from `weights`.

    Args:
        gradient: Gradients, replaced.
        weights: Weights, which stay as they are.
        first: First moment.
        second: Second moment.
        numbers: Factor of the gradient, 1 - beta1, beta2, 1 - beta2, rate and epsilon with the corrections of both
            moments, decay of weights that is added to the gradient, decay that is added to the change, and factor of
            the change.
    """
    _replace(gradient.numpy(), weights.numpy(), first.numpy(), second.numpy(), tuple(map(np.float32, numbers)))


@njit(nogil=True, cache=True, error_model="numpy")
def _replace(gradient: Floats, weights: Floats, first: Floats, second: Floats, numbers: Numbers) -> None:
    scale, share1, beta2, share2, rate, epsilon, coupled, decoupled, factor = numbers
    for i in range(gradient.size):
        weight = weights[i]
        g = gradient[i] * scale + coupled * weight
        m = first[i] + share1 * (g - first[i])
        v = second[i] * beta2 + share2 * g * g
        first[i] = m
        second[i] = v
        gradient[i] = (rate * m / (np.sqrt(v) + epsilon) + decoupled * weight) * factor
