"""Copies of a module's buffers, from which a step that is dropped takes them back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.parallel.local import local

_SMALL_BYTES = 1 << 20
"""Size up to which a buffer is copied before forward has ever changed it, with `only_changing`."""


def list_spoilt_buffers(module: nn.Module, *, of_norms: bool = True) -> list[str]:
    """Return the persistent buffers with NaN, and `of_norms` the statistics that are NaN or infinite."""
    spoilt = []
    for prefix, owner in module.named_modules():
        is_norm = isinstance(owner, _NormBase)
        for key, held in owner._buffers.items():
            if held is None or key in owner._non_persistent_buffers_set or not held.is_floating_point():
                continue
            value = local(held)
            bad = ~torch.isfinite(value) if is_norm else torch.isnan(value)
            if bad.any() and (of_norms or not is_norm):
                spoilt.append(f"{prefix}.{key}" if prefix else key)
    return spoilt


class BufferCopies:
    """Copies of a module's persistent buffers, such as statistics of BatchNorm, which forward changes before an update.

    Only those that have changed are copied again, and statistics of norms in training, which torch changes without a
    new version. A buffer that forward replaces by another tensor is taken back too.

    Args:
        module: The module.
        only_changing: Whether a buffer above 1 MiB is left out until forward first changes it, as most are constants.
    """

    def __init__(self, module: nn.Module, *, only_changing: bool = False) -> None:
        self._places = [
            (owner, key)
            for owner in module.modules()
            for key, held in owner._buffers.items()
            if held is not None and key not in owner._non_persistent_buffers_set
        ]
        self._noted = [self._tensor(place) for place in range(len(self._places))]
        self._versions = [tensor._version for tensor in self._noted]
        self._copies: list[Tensor | None] = [
            None if only_changing and self._is_constant(place) else tensor.detach().clone()
            for place, tensor in enumerate(self._noted)
        ]

    def _tensor(self, place: int) -> Tensor:
        owner, key = self._places[place]
        tensor = owner._buffers[key]
        assert tensor is not None
        return tensor

    def _is_constant(self, place: int) -> bool:
        return self._noted[place].nbytes > _SMALL_BYTES and not isinstance(self._places[place][0], _NormBase)

    def _list_changed(self) -> list[int]:
        return [
            place
            for place, (owner, key) in enumerate(self._places)
            if (held := owner._buffers[key]) is not self._noted[place]
            or held._version != self._versions[place]
            or (isinstance(owner, _NormBase) and owner.training)
        ]

    @torch.no_grad()
    def note(self) -> None:
        """Copy the present values."""
        copies: list[Tensor] = []
        values: list[Tensor] = []
        for place in self._list_changed():
            self._noted[place] = tensor = self._tensor(place)
            self._versions[place], copied = tensor._version, self._copies[place]
            if copied is None or copied.shape != tensor.shape or copied.device != tensor.device:
                self._copies[place] = tensor.detach().clone()
            else:
                copies.append(copied)
                values.append(tensor)
        if copies:
            torch._foreach_copy_(copies, values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values that were copied last."""
        for place in self._list_changed():
            owner, key = self._places[place]
            if (copied := self._copies[place]) is None:
                continue
            owner._buffers[key] = tensor = self._noted[place]
            tensor.copy_(copied)
            self._versions[place] = tensor._version

    @contextmanager
    @torch.no_grad()
    def restored(self) -> Iterator[None]:
        """Give the module, inside, the values that were copied last."""
        present = [(place, tensor := self._tensor(place), tensor.clone()) for place in self._list_changed()]
        self.restore()
        yield
        for place, tensor, value in present:
            owner, key = self._places[place]
            owner._buffers[key] = tensor
            tensor.copy_(value)
