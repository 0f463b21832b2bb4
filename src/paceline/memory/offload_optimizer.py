"""Optimizer state in CPU memory, where the CPU updates the parameters (ZeRO-Offload, Ren et al. 2021)."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.comm.streams import record
from paceline.errors import SettingsError


class OffloadedOptimizer:
    """Makes an optimizer take its steps on copies of parameters and gradients in another device's memory.

    The optimizer does not change: its groups hold the model's parameters, its learning rates may change from step to
    step, its state is saved under the parameters' names and loads into a run without offloading. Only during a step
    copies replace the parameters, so the state that it makes for them is on their device.

    It frees the state's bytes on the device, and needs no others there; on the host it takes state, parameters and
    gradients. A step sends each parameter and its gradient over and the parameter back: 12 bytes an element
    in fp32. Parameters are sent because everything else that changes them (a checkpoint, an average of workers) does so
    on the device.

    Args:
        optimizer: Optimizer that has not stepped yet, or has just been loaded.
        device: Device of the state.

    Raises:
        SettingsError: Ranks share a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str = "cpu") -> None:
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._copies: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        for parameter in self._parameters():
            if isinstance(parameter, DTensor):
                raise SettingsError(
                    "memory.offload must be none or activations where ranks share parameters, but got optimizer state; "
                    "a sharded layout divides that state already"
                )
            is_pinned = parameter.device.type == "cuda" and self._device.type == "cpu"
            self._copies[parameter] = torch.empty_like(
                parameter, device=self._device, requires_grad=False, pin_memory=is_pinned
            )
        self._moved_out: list[list[Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._use_copies),
            optimizer.register_step_post_hook(self._restore_parameters),
            optimizer.register_load_state_dict_post_hook(self._move_state),
        ]

    @torch.no_grad()
    def _use_copies(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Replace parameters by copies, except those without a gradient, which are not updated."""
        self._moved_out = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._copies[parameter] for parameter in group["params"]]
        for parameter, copy in self._copies.items():
            if parameter.grad is not None:
                copy.copy_(parameter, non_blocking=True)
                copy.grad = self._gradients.get(parameter)
                if copy.grad is None:
                    pinned = copy.is_pinned()
                    copy.grad = self._gradients[parameter] = torch.empty_like(copy, pin_memory=pinned)
                copy.grad.copy_(parameter.grad, non_blocking=True)
            if parameter in optimizer.state:
                optimizer.state[copy] = optimizer.state.pop(parameter)
        for device in {parameter.device for parameter in self._copies}:
            if (copied := record(device)) is not None:
                copied.synchronize()  # once, for all of them

    @torch.no_grad()
    def _restore_parameters(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, parameters in zip(optimizer.param_groups, self._moved_out, strict=True):
            group["params"] = parameters
        for parameter, copy in self._copies.items():
            if copy in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(copy)
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)
                copy.grad = None

    def _move_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move loaded state, which torch puts beside the parameters, to the state's device."""
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(self._device)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
