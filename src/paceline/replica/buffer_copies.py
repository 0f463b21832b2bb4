"""Copies of a module's buffers, from which a step that is dropped takes them back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class BufferCopies:
    """Copies of a module's persistent buffers, such as statistics of BatchNorm, which forward changes before an update.

    Only those that have changed are copied again, and statistics of norms, which torch changes without a new version.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        persistent = module.state_dict().keys()
        self._buffers = [buffer for name, buffer in module.named_buffers() if name in persistent]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._versions = [buffer._version for buffer in self._buffers]
        norms = (layer for layer in module.modules() if isinstance(layer, _NormBase))
        self._unversioned = {id(buffer) for layer in norms for buffer in layer.buffers()}

    def note(self) -> None:
        """Copy the present values."""
        for place, buffer in enumerate(self._buffers):
            if buffer._version != self._versions[place] or id(buffer) in self._unversioned:
                self._copies[place].copy_(buffer)
                self._versions[place] = buffer._version

    def restore(self) -> None:
        """Restore the values that were copied last."""
        with torch.no_grad():
            for buffer, copied in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copied)
        self._versions = [buffer._version for buffer in self._buffers]

    @contextmanager
    @torch.no_grad()
    def restored(self) -> Iterator[None]:
        """Give the module, inside, the values that were copied last."""
        present = [buffer.clone() for buffer in self._buffers]
        self.restore()
        yield
        for buffer, value in zip(self._buffers, present, strict=True):
            buffer.copy_(value)
