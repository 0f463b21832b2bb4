"""Progressive training: a model that becomes deeper, or wider, during training.

Gong et al. 2019, "Efficient training of BERT by progressively stacking": the first steps train a shallow model, which
is cheaper in proportion to its layers; the deeper model starts from the trained layers.
How it becomes wider is in `widening`. Without growth steps it is plain training. It sends nothing: every worker grows
in the same way. During growth, the old and the new model are both in memory.
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import field_validator, model_validator
from torch import Tensor, nn

from paceline.compression import NoCodec
from paceline.errors import SettingsError
from paceline.registry import Settings
from paceline.sync import EveryStep, Rule
from paceline.topology.layout import Layout
from paceline.training.model import LayerStack, Model, ModelSize, size_of


class Growth(Settings):
    """Steps at which a model becomes deeper or wider, and the initial values of its new layers."""

    steps: tuple[int, ...] = ()
    """Steps before which the model grows; empty for no growth."""
    method: Literal["stack", "identity"] = "stack"
    """Method of growth. stack: the whole stack of layers is copied on top of itself, with its optimizer state (Gong et
    al. 2019). identity: new layers on top are copies whose branches end in zeros and whose optimizer state is new, so
    that the model's output stays the same."""
    depths: tuple[int, ...] = ()
    """Number of layers from each of the steps on; by default twice as many each time."""
    widths: tuple[int, ...] = ()
    """Width from each of the steps on, each a multiple of the one before; the number of layers then stays. The model's
    output does not change (Net2Net, Chen et al. 2016)."""

    @field_validator("steps", "depths", "widths")
    @classmethod
    def _must_ascend(cls, numbers: tuple[int, ...]) -> tuple[int, ...]:
        if any(later <= earlier for earlier, later in pairwise((0, *numbers))):
            raise ValueError(f"numbers must ascend from 1 on, but got {numbers}; sort them, each once")
        return numbers

    @model_validator(mode="after")
    def _must_match(self) -> Self:
        if self.depths and len(self.depths) != len(self.steps):
            raise ValueError(
                f"there must be a depth for each step, but got {len(self.depths)} depths for {len(self.steps)} steps"
            )
        if self.widths and len(self.widths) != len(self.steps):
            raise ValueError(
                f"there must be a width for each step, but got {len(self.widths)} widths for {len(self.steps)} steps"
            )
        if self.widths and self.depths:
            raise ValueError(
                f"a run must grow in depth or in width, but got depths {self.depths} and widths {self.widths}; leave "
                "one of them out"
            )
        return self

    def size_at(self, step: int, first: ModelSize) -> ModelSize:
        """Return the size in `step` of a model that began with `first`."""
        num_growths = sum(start <= step for start in self.steps)
        if self.widths:
            return first._replace(width=self.widths[num_growths - 1]) if num_growths else first
        return first if first.num_layers is None else first._replace(num_layers=self.depth_at(step, first.num_layers))

    def depth_at(self, step: int, first: int) -> int:
        """Return the number of layers in `step`, of a model that began with `first`."""
        num_growths = sum(start <= step for start in self.steps)
        if not num_growths:
            return first
        return self.depths[num_growths - 1] if self.depths else first * 2**num_growths


class Origin(NamedTuple):
    """Origin of a tensor of the deeper model."""

    name: str
    """Name of the tensor in the shallower model."""
    is_new: bool
    """Whether the tensor is in a new layer."""


def find_origin(name: str, depth: LayerStack) -> Origin:
    """Return the origin of the tensor `name` of a deeper model, in a model of `depth`.

    New layer i is a copy of old layer i modulo their number; all other tensors stay.
    """
    prefix = f"{depth.path}."
    number, _, rest = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or int(number) < depth.num_layers:
        return Origin(name, is_new=False)
    return Origin(f"{prefix}{int(number) % depth.num_layers}.{rest}", is_new=True)


def grow_module(old: nn.Module, new: nn.Module, depth: LayerStack, method: str) -> None:
    """Fill the deeper module `new` from `old`, which has `depth`.

    Raises:
        SettingsError: The modules differ in more than their number of layers.
    """
    source = old.state_dict()
    with torch.no_grad():
        for name, tensor in new.state_dict().items():
            origin = find_origin(name, depth)
            found = source.get(origin.name)
            if found is None or found.shape != tensor.shape:
                raise SettingsError(
                    f"a model that grows must differ in its number of layers only, but {name} has shape "
                    f"{tuple(tensor.shape)} and {origin.name} {'is missing' if found is None else tuple(found.shape)}"
                )
            if method == "identity" and origin.is_new and name.endswith(depth.branch_ends):
                tensor.zero_()
            else:
                tensor.copy_(found)


def grow_optimizer(
    old: tuple[nn.Module, torch.optim.Optimizer],
    new: tuple[nn.Module, torch.optim.Optimizer],
    depth: LayerStack,
    method: str,
) -> None:
    """Transfer the optimizer state of each old layer to the new model; stacked copies get a copy of it."""
    (old_module, old_optimizer), (new_module, new_optimizer) = old, new
    parameters = dict(old_module.named_parameters())
    for name, parameter in new_module.named_parameters():
        origin = find_origin(name, depth)
        state = old_optimizer.state.get(parameters[origin.name])
        if state and not (method == "identity" and origin.is_new):
            new_optimizer.state[parameter] = {key: _copy(value) for key, value in state.items()}


def check_growth(growth: Growth, model: Model, sync: Rule, layout: Layout) -> None:
    """Refuse settings with which a model cannot grow.

    Raises:
        ValueError: A setting does not allow growth; the message says which would.
    """
    what = "width" if growth.widths else "depth"
    size = size_of(model)
    first = size.width if growth.widths else size.num_layers
    if first is None:
        raise ValueError(f"growth must be of a model that knows its {what}, such as transformer_lm; leave it out")
    later = list(growth.widths) or [growth.depth_at(step, first) for step in growth.steps]
    pairs = list(pairwise([first, *later]))
    if not growth.widths and any(after <= before for before, after in pairs):
        raise ValueError(f"growth.depths must ascend from the model's {first} layers, but got {later}")
    if growth.widths and any(after <= before or after % before for before, after in pairs):
        raise ValueError(
            f"growth.widths must each be a larger multiple of the one before, from the model's {first} on, but got "
            f"{later}: norms stay the same only if every unit has as many copies"
        )
    if growth.widths and isinstance(sync, EveryStep) and not isinstance(sync.codec, NoCodec):
        raise ValueError(
            f"growth.widths must come without a codec, whose residuals have the old shapes, but got "
            f"{sync.codec.name}; leave one of them out"
        )
    if not sync.keeps_replicas_equal or not sync.runs_optimizer:
        raise ValueError(
            f"growth must come with a sync that keeps replicas equal, but got {sync.name}; take every_step"
        )
    if not layout.is_plain:
        raise ValueError(
            "growth must come with a layout of data alone, since it copies units and layers of whole tensors, but got "
            f"{layout}; grow without the other axes, then start a run of the grown size in this layout with --initial"
        )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
