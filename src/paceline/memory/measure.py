"""What training needs while it runs, by what it is for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.memory.tracker import StorageTracker


@contextmanager
def counting(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, tracker: StorageTracker | None = None
) -> Iterator[StorageTracker]:
    """Inside, count what training `module` makes; gradients and optimizer state are told apart as they come.

    Hooks on parameters that make views of their gradients must have been registered before.

    Args:
        module: What is trained.
        optimizer: Over its parameters.
        device: Kind of device whose tensors count.
        tracker: Counts on from where it was; a new one without it.
    """
    is_new = tracker is None
    tracker = tracker or StorageTracker(device)
    tracker.label("parameters", [*module.parameters(), *module.buffers()])
    tracker.label("optimizer", optimizer_tensors(optimizer))
    tracker.label("gradients", [p.grad for p in module.parameters() if p.grad is not None])
    if is_new:
        tracker.reset_peak()

    def take_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tracker.label("gradients", [parameter.grad])

    def take_state(stepped: torch.optim.Optimizer, *_: object) -> None:
        tracker.label("optimizer", optimizer_tensors(stepped))

    handles = [
        parameter.register_post_accumulate_grad_hook(take_gradient)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    step_handle = optimizer.register_step_post_hook(take_state)
    try:
        with tracker:
            yield tracker
    finally:
        for handle in [*handles, step_handle]:
            handle.remove()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
