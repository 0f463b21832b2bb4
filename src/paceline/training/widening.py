"""Progressive training: a model that becomes wider during training, and computes the same at first.

Chen, Goodfellow and Shlens 2016, "Net2Net": every new unit is a copy of an old one, and what reads the copies of a unit
divides its old weight among them, so that their sum, and with it the model's output, stays. The weight is divided at
random: equal parts would give the copies equal gradients for ever. The paper draws the units to copy and adds noise
instead; here all are copied in turn, since a norm's statistics stay only if each unit has as many copies. It sends
nothing: every worker draws the same numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SettingsError
from paceline.training.model import UnitWidth

_LEAST_PART, _MOST_PART = 0.5, 1.5
"""Range of the numbers in whose proportion a weight is divided: no copy begins without a part."""


def widen_module(old: nn.Module, new: nn.Module, width: UnitWidth, seed: int) -> None:
    """Fill the wider module `new` from `old`, which has `width`.

    Raises:
        SettingsError: The modules differ in more than the sizes of dims, or one becomes smaller.
    """
    source = old.state_dict()
    readers = _find_readers(new, width)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in new.state_dict().items():
            found = source.get(name)
            if found is None or not _can_widen(found, tensor):
                raise SettingsError(
                    f"a model that grows must differ in its width only, but {name} has shape {tuple(tensor.shape)} and "
                    f"had {'none' if found is None else tuple(found.shape)}"
                )
            value = _copy_units(found, tensor)
            if name in readers:
                value = value * _draw_parts(found, tensor, readers[name], generator).to(value.device)
            tensor.copy_(value)


def widen_optimizer(old: tuple[nn.Module, torch.optim.Optimizer], new: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Transfer the optimizer state: copies of a unit get copies of its moments.

    State of another shape than its parameter's (Adafactor's rows and columns, moments in 8 bits) begins anew, together
    with the rest of that parameter's, if the parameter has become larger.
    """
    (old_module, old_optimizer), (new_module, new_optimizer) = old, new
    parameters = dict(old_module.named_parameters())
    for name, parameter in new_module.named_parameters():
        before = parameters[name]
        state = old_optimizer.state.get(before)
        if not state:
            continue
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
        if parameter.shape == before.shape or all(value.shape == before.shape for value in tensors):
            new_optimizer.state[parameter] = {
                key: _widen_state(value, before, parameter) for key, value in state.items()
            }


def _find_readers(module: nn.Module, width: UnitWidth) -> dict[str, int]:
    """Return the tensors that read units which others make, with the dim along which they do."""
    readers = {
        f"{name}.weight": 1
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.modules.conv._ConvNd)
    }
    return readers | {name: 0 for name, _ in module.named_parameters() if name in width.divided}


def _can_widen(old: Tensor, new: Tensor) -> bool:
    return old.dim() == new.dim() and all(after >= before for before, after in zip(old.shape, new.shape, strict=True))


def _copy_units(old: Tensor, new: Tensor) -> Tensor:
    """Return `old` repeated along each dim up to the shape of `new`: unit i is a copy of unit i modulo their number."""
    for dim, (before, after) in enumerate(zip(old.shape, new.shape, strict=True)):
        if after != before:
            old = old.index_select(dim, torch.arange(after, device=old.device) % before)
    return old


def _draw_parts(old: Tensor, new: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Return factors of the shape of `new`; those of a unit's copies along `dim` add up to 1."""
    before, after = old.shape[dim], new.shape[dim]
    drawn = torch.empty(new.shape, dtype=torch.float64).uniform_(_LEAST_PART, _MOST_PART, generator=generator)
    unit = torch.arange(after) % before
    shape = [before if place == dim else size for place, size in enumerate(new.shape)]
    sums = torch.zeros(shape, dtype=torch.float64).index_add_(dim, unit, drawn)
    return drawn / sums.index_select(dim, unit)


def _widen_state(value: Any, old: Tensor, new: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _copy_units(value, new).clone() if value.shape == old.shape else value.clone()
