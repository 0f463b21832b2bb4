"""How alike two steps are: what no parameter explains of one is expected of the other as far as they are alike."""

from collections.abc import Sequence

import numpy as np

from paceline.simulator.training.description import Description
from paceline.topology.cluster import Floats

SPREAD = 0.10
"""Standard deviation of the logarithm of what no parameter explains of a step."""
_DISTANCES = {"tokens": 0.6, "width": 0.5, "tensor": 0.6, "pipeline": 0.3}
"""Distance of steps that differ by a factor of two."""
_OTHERNESS = {
    "model": 3.0, "generation": 1.6, "precision": 1.6, "attention": 2.0, "is_compiled": 1.0, "stack": 2.0,
}  # fmt: skip
"""Distance of steps that differ in a choice."""


class Features:
    """What the likeness of steps is judged by."""

    def __init__(self, descriptions: Sequence[Description]) -> None:
        cases = [description.case for description in descriptions]
        sizes = {
            "tokens": [case.tokens or case.image[-1] for case in cases],
            "width": [getattr(case.model, "width", 1024) for case in cases],
            "tensor": [case.tensor for case in cases],
            "pipeline": [case.pipeline for case in cases],
        }
        choices = {
            "model": [case.model.likeness for case in cases],
            "generation": [case.device.generation for case in cases],
            "precision": [case.precision for case in cases],
            "attention": [case.attention for case in cases],
            "is_compiled": [str(case.is_compiled) for case in cases],
            "stack": [case.stack for case in cases],
        }
        self.sizes = np.array([_DISTANCES[name] * np.log2(values) for name, values in sizes.items()])
        self.choices = [(_OTHERNESS[name], np.array(values)) for name, values in choices.items()]


def covariance(first: Features, second: Features) -> Floats:
    """Return the covariance of the unexplained parts of every step of `first` with every one of `second`."""
    distance = np.abs(first.sizes[:, :, None] - second.sizes[:, None, :]).sum(axis=0)
    for (weight, mine), (_, others) in zip(first.choices, second.choices, strict=True):
        distance = distance + weight * (mine[:, None] != others[None, :])
    return np.asarray(SPREAD**2 * np.exp(-distance))
