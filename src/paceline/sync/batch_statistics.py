"""BatchNorm's running statistics, pooled over workers.

Each worker's statistics are those of its own samples. Evaluation and a change in the number of workers need those of
all samples: means average, but variances do not, so second moments are averaged instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group

Moments = tuple[Tensor, Tensor]
"""Running mean and running variance of one layer, each of shape (num_features,)."""


def find_statistics(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers of `module` that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None
    }


def pool_moments(moments: Sequence[Moments], weights: Sequence[float] | None = None) -> Moments:
    """Return mean and variance of the union of sets, given those of each.

    Args:
        moments: Mean and variance of each set.
        weights: Weight of each set, not all 0; equal by default.
    """
    means = torch.stack([mean.double() for mean, _ in moments])
    variances = torch.stack([variance.double() for _, variance in moments])
    if weights is None:
        mean = means.mean(0)
        # The mean of second moments less the second moment of the mean, without its cancellation.
        return mean, variances.mean(0) + (means - mean).square().mean(0)
    fractions = torch.tensor(weights, dtype=torch.float64, device=means.device).div(sum(weights)).unsqueeze(1)
    mean = (fractions * means).sum(0)
    return mean, (fractions * (variances + (means - mean).square())).sum(0)


@contextmanager
def pooled_over_workers(module: nn.Module, group: Group) -> Iterator[None]:
    """While active, every layer has the running statistics of all workers' samples; afterwards, its own again."""
    layers = find_statistics(module).values()
    own = [(mean.clone(), variance.clone()) for mean, variance in map(_moments, layers)]
    pool_over_workers(module, group)
    try:
        yield
    finally:
        for layer, moments in zip(layers, own, strict=True):
            set_moments(layer, moments)


def pool_over_workers(module: nn.Module, group: Group, weight: float = 1.0) -> int:
    """Give every layer the running statistics of all workers' samples; return the bytes that this worker sent.

    The number of batches that a layer has seen (``num_batches_tracked``) stays each worker's own.

    Args:
        module: Module, the same on every worker.
        group: Group of the workers.
        weight: Weight of this worker's statistics; not 0 on all of them.
    """
    layers = list(find_statistics(module).values())
    if not layers or group.size == 1:
        return 0
    flat = torch.cat([torch.cat(_moments(layer)) for layer in layers])
    mine = torch.cat([flat.double(), flat.new_tensor([weight], dtype=torch.float64)])
    everybody = mine.new_zeros(group.size, len(mine))
    group.all_gather(everybody, mine, name="batch statistics").wait()
    weights = everybody[:, -1].tolist()
    sizes = [2 * layer.num_features for layer in layers]
    for layer, part in zip(layers, everybody[:, :-1].split(sizes, dim=1), strict=True):
        set_moments(layer, pool_moments([_halves(row) for row in part], weights))
    return (group.size - 1) * mine.nbytes


def set_moments(layer: _BatchNorm, moments: Moments) -> None:
    """Replace a layer's running mean and variance."""
    for target, value in zip(_moments(layer), moments, strict=True):
        target.copy_(value)


def _halves(row: Tensor) -> Moments:
    mean, variance = row.chunk(2)
    return mean, variance


def _moments(layer: _BatchNorm) -> Moments:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var
