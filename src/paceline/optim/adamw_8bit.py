"""AdamW with state in 8 bits (Dettmers et al. 2022)."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from paceline.optim.base import DecayRate, NamedOptimizer
from paceline.optim.eight_bits import BLOCK_SIZE, Encoded, values_by_code
from paceline.optim.update_rule import UpdateRule, local, local_gradient
from paceline.registry import register

_CHUNK_ELEMENTS = 2**12 * BLOCK_SIZE
"""Elements that are decoded at once: 4 MiB of floats."""


@register("adamw_8bit")
class AdamW8bit(NamedOptimizer):
    """AdamW that keeps its two moments in 8 bits an element between steps (Dettmers et al. 2022).

    Parameters of fewer than `smallest` elements keep their moments in 32 bits, so that with a `smallest` above all of
    them this is AdamW. Unlike in the paper it stores the root of the second moment, which needs half the decades,
    and never rounds a nonzero value to 0, so that no small moment is divided by nearly nothing.

    In memory: 2.03 bytes of state an element instead of 8, and a few MiB during a step. On the wire: nothing. In
    checkpoints moments are 32-bit tensors of the parameters' shape, which fit any layout; resuming in the same layout
    changes nothing, in another layout moments are rounded again.
    """

    learning_rate: float = Field(default=1e-3, gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Addend to the root of the second moment, so that nothing is divided by zero."""
    smallest: int = Field(default=4096, ge=1)
    """Number of elements of the smallest parameter with 8-bit state."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the rule over the parameters of `module`."""
        return AdamW8bitRule(
            self.group_parameters(module),
            {
                "lr": self.learning_rate,
                "betas": self.betas,
                "eps": self.epsilon,
                "smallest": self.smallest,
                "decoupled_weight_decay": True,
            },
        )


class AdamW8bitRule(UpdateRule):
    """AdamW with state in 8 bits, as an optimizer.

    Between steps it keeps ``exp_avg`` and ``root`` (of the second moment) of a parameter as float32, or as
    ``<name>_codes`` and ``<name>_scales``. `state_dict` returns them as float32 always.
    """

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update the parameters of a group: on CPUs in one pass over memory, else chunk by chunk."""
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            state = self.state[parameter]
            weights, gradients = local(parameter), local_gradient(parameter)
            if not state:
                zeros = torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
                state |= {"step": torch.tensor(0.0), **self._keep(parameter, {"exp_avg": zeros, "root": zeros})}
            state["step"] += 1
            step = float(state["step"])
            rate, correction = group["lr"] / (1 - beta1**step), (1 - beta2**step) ** 0.5
            decay = 1 - group["lr"] * group["weight_decay"]
            flat_weights, flat_gradients = weights.flatten(), gradients.flatten()
            take = _step_in_numba if "root_codes" in state and _suits_numba(weights, gradients) else _step_in_torch
            take(flat_weights, flat_gradients, state, (beta1, beta2, rate, correction, group["eps"], decay))
            if not weights.is_contiguous():  # flattening has copied them
                weights.copy_(flat_weights.view(weights.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the state like torch's optimizers, with moments as float32, in the parameters' shape and layout."""
        document = super().state_dict()
        document["state"] = {
            index: self._decode(parameter, self.state[parameter])
            for index, parameter in self._numbered()
            if parameter in self.state
        }
        return document

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Torch would cast it to the parameters' dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for index, parameter in self._numbered():
            if index in state_dict["state"]:
                saved = state_dict["state"][index]
                device = local(parameter).device
                moments = {
                    name: local(tensor).to(device, torch.float32).flatten()
                    for name, tensor in saved.items()
                    if name != "step"
                }
                self.state[parameter] = {"step": saved["step"].clone(), **self._keep(parameter, moments)}

    def _numbered(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield all parameters with their numbers in `state_dict`."""
        yield from enumerate(parameter for group in self.param_groups for parameter in group["params"])

    def _keep(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return flat moments in the form that is kept between steps."""
        smallest = next(g["smallest"] for g in self.param_groups if any(p is parameter for p in g["params"]))
        if parameter.numel() < smallest:
            return {name: values.clone() for name, values in moments.items()}
        kept: dict[str, Tensor] = {}
        for name, values in moments.items():
            encoded = Encoded.zeros(len(values), values.device)
            kept |= {f"{name}_codes": encoded.codes, f"{name}_scales": encoded.scales}
            for start, stop in _chunks(len(values)):
                _write(kept, name, start, values[start:stop])
        return kept

    def _decode(self, parameter: nn.Parameter, kept: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the kept state of a parameter, as float32 of its shape."""
        part = local(parameter)
        decoded = {"step": kept["step"]}
        for name in ("exp_avg", "root"):
            whole = torch.empty(part.numel(), dtype=torch.float32, device=part.device)
            for start, stop in _chunks(part.numel()):
                whole[start:stop] = _read(kept, name, start, stop)
            moment = whole.view(part.shape)
            if isinstance(parameter, DTensor):
                moment = DTensor.from_local(
                    moment,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            decoded[name] = moment
        return decoded


def _suits_numba(weights: Tensor, gradients: Tensor) -> bool:
    is_plain = weights.device.type == "cpu" and weights.dtype == gradients.dtype == torch.float32
    return is_plain and not isinstance(weights, FakeTensor) and importlib.util.find_spec("numba") is not None


def _step_in_numba(weights: Tensor, gradients: Tensor, state: Mapping[str, Any], numbers: tuple[float, ...]) -> None:
    from paceline.optim.numba_adamw_8bit import step  # numba takes long to import

    first, root = ((state[f"{name}_codes"], state[f"{name}_scales"]) for name in ("exp_avg", "root"))
    tables = values_by_code(weights.device, is_signed=True), values_by_code(weights.device, is_signed=False)
    step(weights.detach(), gradients.detach(), first, root, tables, numbers)


def _step_in_torch(weights: Tensor, gradients: Tensor, state: Mapping[str, Any], numbers: tuple[float, ...]) -> None:
    beta1, beta2, rate, correction, epsilon, decay = numbers
    for start, stop in _chunks(weights.numel()):
        gradient = gradients[start:stop].float()
        first = _read(state, "exp_avg", start, stop).lerp_(gradient, 1 - beta1)
        root = _read(state, "root", start, stop).square_().mul_(beta2)
        root.addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        weight = weights[start:stop]
        weight.mul_(decay)
        weight.sub_((rate * first / (root / correction + epsilon)).to(weight.dtype))
        _write(state, "exp_avg", start, first)
        _write(state, "root", start, root)


def _chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of chunks of whole blocks."""
    for start in range(0, num_elements, _CHUNK_ELEMENTS):
        yield start, min(start + _CHUNK_ELEMENTS, num_elements)


def _read(kept: Mapping[str, Any], name: str, start: int, stop: int) -> Tensor:
    """Return a chunk of a moment as float32; one kept in 8 bits is decoded into its own memory."""
    if name in kept:
        return kept[name][start:stop]  # type: ignore[no-any-return]
    encoded = Encoded(kept[f"{name}_codes"], kept[f"{name}_scales"])
    return encoded.narrow(start, stop).decode(is_signed=name == "exp_avg")


def _write(kept: Mapping[str, Any], name: str, start: int, values: Tensor) -> None:
    """Store a chunk of a moment."""
    stop = start + len(values)
    if name in kept:
        kept[name][start:stop] = values
    else:
        encoded = Encoded(kept[f"{name}_codes"], kept[f"{name}_scales"])
        encoded.narrow(start, stop).encode(values, is_signed=name == "exp_avg")
