"""The exponential moving average of parameters, which often evaluates better than the latest parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.parallel.fully_sharded import reshard
from paceline.parallel.local import local, wrap


class ParameterAverage:
    """Moving averages of a rank's parameters.

    average <- decay * average + (1 - decay) * parameter, after each update, from the parameters after the first update
    on, as in `torch.optim.swa_utils.AveragedModel` with ``get_ema_multi_avg_fn(decay)``. An update that fp16
    overflow skipped does not count. Buffers are not averaged: the model's own go with the averages.

    Each worker averages its own parameters. Where a rule lets workers differ, the mean of their averages counts, which
    is the average of their mean, since both are linear: it depends neither on the sync steps nor on the number of
    workers.

    Memory: a copy of the rank's parameters, in 32 bits at least. On the wire: nothing, but if workers differ an
    all-reduce of that size whenever the averages are used or saved.

    Args:
        parameters: Parameters that are trained, by name.
        decay: Decay per update, between 0 and 1: a parameter's weight falls to 1/e in about 1 / (1 - decay) updates.
        group: The workers that hold the same parameters.
        is_equal: Whether the rule keeps replicas equal.

    Raises:
        SettingsError: The decay is not between 0 and 1.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, group: Group, *, is_equal: bool) -> None:
        if not isinstance(decay, int | float) or not 0 < decay < 1:
            raise SettingsError(f"ema must be a decay between 0 and 1, such as 0.999, but got {decay!r}; None for none")
        self._parameters, self._decay = dict(parameters), decay
        self.group, self._is_equal = group, is_equal
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_begun(self) -> bool:
        """Whether there are averages yet: after the first update."""
        return bool(self._tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This worker's averages on this rank, by parameter; empty before the first update."""
        return self._tensors

    @torch.no_grad()
    def update(self) -> None:
        """Add the present parameters to the averages."""
        held = {name: local(parameter) for name, parameter in self._parameters.items()}
        if not self._tensors:
            self.load(held)
            return
        averages = list(self._tensors.values())
        values = [held[name].to(average.dtype) for name, average in self._tensors.items()]
        torch._foreach_lerp_(averages, values, 1 - self._decay)

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of all workers' averages, laid out as the parameters are. All workers call it.

        If the rule keeps replicas equal, these are this worker's averages, not copies.
        """
        means = self._tensors
        if not self._is_equal and self.group.size > 1:
            means = {name: average.clone() for name, average in means.items()}
            for name, mean in means.items():
                if mean.numel():
                    self.group.all_reduce(mean, name=f"average of {name}").wait()
                    mean /= self.group.size
        return {name: wrap(self._parameters[name], mean) for name, mean in means.items()}

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Replace the parameters of `module` inside by the averages over all workers. All workers enter it."""
        reshard(module)
        held = {name: local(parameter) for name, parameter in self._parameters.items()}
        own = {name: tensor.detach().clone() for name, tensor in held.items()}
        with torch.no_grad():
            for name, mean in self.mean().items():
                held[name].copy_(local(mean))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in held.items():
                    tensor.copy_(own[name])
            reshard(module)  # otherwise gathered averages would be trained

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Continue from this rank's saved averages; without any, from the parameters after the next update."""
        self._tensors = {
            name: averages[name].to(parameter.device, torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in self._parameters.items()
            if averages
        }
