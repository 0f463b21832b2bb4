"""BatchNorm layers while a replica trains: samples that count for nothing leave no trace in their statistics."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import SettingsError

_TOO_FEW = "Expected more than 1 value per channel when training"
"""How torch's own error begins."""


def start_batch_norm(module: nn.Module) -> "LocalBatchNorm | None":
    """Return what runs the BatchNorm layers of `module`; None without any."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    return LocalBatchNorm(layers) if layers else None


def too_few_values(where: str) -> SettingsError:
    """Return the error for BatchNorm layers that have a single value of each channel, and where."""
    return SettingsError(
        f"BatchNorm must see more than one value of each channel while it trains, but got one {where}; leave out an "
        "epoch's last samples (drop_last) or join them with the next epoch's (join_epochs), raise global_batch, take "
        "fewer micro-batches, or start fewer workers"
    )


def is_too_few_values(error: ValueError) -> bool:
    """Whether torch raised `error` because a BatchNorm layer had a single value of each channel."""
    return str(error).startswith(_TOO_FEW)


class LocalBatchNorm:
    """BatchNorm layers that see this worker's own samples, as torch's do.

    Args:
        layers: By their names in the model.
    """

    def __init__(self, layers: Mapping[str, _BatchNorm]) -> None:
        self._layers = layers

    @contextmanager
    def running(self, *, counts: bool) -> Iterator[None]:
        """Inside, the module runs forward, or backward where blocks are computed again there.

        Args:
            counts: Whether its samples do. Those that do not are normalised by running statistics, which stay.

        Raises:
            SettingsError: A layer had a single value of each channel.
        """
        try:
            if counts:
                yield
            else:
                with self._uncounted():
                    yield
        except ValueError as error:
            if not is_too_few_values(error):
                raise
            raise too_few_values(f"in an input of shape {str(error).rpartition('size ')[2]}") from error

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        layers = [layer for layer in self._layers.values() if layer.training]
        untracked = [layer for layer in layers if layer.running_mean is None]
        hooks = [layer.register_forward_pre_hook(_lend_statistics) for layer in untracked]
        for layer in layers:
            layer.training = False
        try:
            yield
        finally:
            for layer in layers:
                layer.training = True
            for hook in hooks:
                hook.remove()
            for layer in untracked:
                layer.running_mean = layer.running_var = None


def _lend_statistics(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Let a layer without running statistics, which would take those of its input, have some."""
    input = inputs[0]
    layer.running_mean = input.new_zeros(input.shape[1], dtype=torch.promote_types(input.dtype, torch.float32))
    layer.running_var = torch.ones_like(layer.running_mean)
