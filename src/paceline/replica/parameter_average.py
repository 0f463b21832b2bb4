"""The exponential moving average of parameters, which often judges better than the last of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.parallel.fully_sharded import reshard
from paceline.parallel.local import local, wrap


class ParameterAverage:
    """Moving averages of the parameters that a rank holds.

    average <- decay * average + (1 - decay) * parameter, after each update, from the parameters after the first update
    on, as `torch.optim.swa_utils.AveragedModel` has it with ``get_ema_multi_avg_fn(decay)``. Of an update that fp16
    overflow skipped nothing is taken. Buffers are not averaged: those of the model go with the averages.

    Each worker averages its own parameters. Where a rule lets workers differ, their averages' mean counts, which is
    the average of their mean, since both are linear: it depends neither on when workers meet nor on their number.

    In memory: a copy of the parameters that the rank holds, in 32 bits at least. On the wire: nothing, but where
    workers differ an all-reduce of that size whenever the averages are looked at or saved.

    Args:
        parameters: Those that are trained, by name.
        decay: Between 0 and 1: after 1 / (1 - decay) updates a parameter counts 1/e as much as now.
        group: The workers that hold the same parameters.
        is_equal: Whether the rule keeps replicas equal.

    Raises:
        SettingsError: The decay is none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, group: Group, *, is_equal: bool) -> None:
        if not 0 < decay < 1:
            raise SettingsError(f"ema must be a decay between 0 and 1, such as 0.999, but got {decay}; None for none")
        self._parameters, self._decay = dict(parameters), decay
        self._group, self._is_equal = group, is_equal
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_begun(self) -> bool:
        """Whether there are averages: after the first update."""
        return bool(self._tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What this worker's averages are on this rank, by parameter; nothing before the first update."""
        return self._tensors

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters of now into account."""
        held = {name: local(parameter) for name, parameter in self._parameters.items()}
        if not self._tensors:
            self.load(held)
            return
        averages = list(self._tensors.values())
        values = [held[name].to(average.dtype) for name, average in self._tensors.items()]
        torch._foreach_lerp_(averages, values, 1 - self._decay)

    def mean(self) -> dict[str, Tensor]:
        """Return the averages that the workers together stand for, laid out as the parameters are. All workers call it.

        They are not copied where the rule keeps replicas equal.
        """
        means = self._tensors
        if not self._is_equal and self._group.size > 1:
            means = {name: average.clone() for name, average in means.items()}
            for name, mean in means.items():
                if mean.numel():
                    self._group.all_reduce(mean, name=f"average of {name}").wait()
                    mean /= self._group.size
        return {name: wrap(self._parameters[name], mean) for name, mean in means.items()}

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Inside, parameters of `module` are the averages of all workers; outside, their own. All workers enter it."""
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
            reshard(module)  # or what was gathered of averages would be trained

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Go on from averages, as this rank holds them; without any, from the parameters after the next update."""
        self._tensors = {
            name: averages[name].to(parameter.device, torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in self._parameters.items()
            if averages
        }
