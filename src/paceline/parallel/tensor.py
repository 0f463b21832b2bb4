"""Matrices, heads and vocabulary that the ranks of the tensor axis share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from paceline.parallel.activations import Activations
from paceline.parallel.mesh import Mesh
from paceline.parallel.own_forward import note_split
from paceline.parallel.tensor_plan import TensorPlan, TiedHead, list_blocks, place, register_styles
from paceline.parallel.tensor_styles import apply

__all__ = ["TensorSplit", "TiedHead", "full_tensor", "register_styles", "split"]


class TensorSplit:
    """Result of `split` for a module.

    Args:
        plan: Plan of the whole model.
        activations: Distribution of activations; None with one rank along the axis.
    """

    def __init__(self, plan: TensorPlan, activations: Activations | None) -> None:
        self.plan = plan
        self._activations = activations

    @property
    def cuts_tokens(self) -> bool:
        """Whether each rank has its own tokens between blocks, so that dropout must draw differently on each.

        If false, dropout must draw the same on all ranks along the axis.
        """
        return self._activations is not None and self._activations.cuts_tokens

    @contextmanager
    def parallel_loss(self) -> Iterator[None]:
        """While active, logits stay split over the vocabulary, and the cross entropy uses the parts (Shoeybi 2019).

        Run both forward and backward inside. Three numbers a token are exchanged instead of its logits. Loss and
        metrics are DTensors: see `full_tensor`. Torch supports no label smoothing here. Outside, the module returns all
        logits as a plain tensor on every rank, for any loss.
        """
        if self._activations is None:
            yield
            return
        self._activations.keeps_logits_cut = True
        try:
            with loss_parallel(), implicit_replication():
                yield
        finally:
            self._activations.keeps_logits_cut = False


def full_tensor(value: Tensor) -> Tensor:
    """Return all of a DTensor as a plain tensor; collective, differentiable. Other tensors are returned unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def split(module: nn.Module, mesh: Mesh, plan: TensorPlan) -> TensorSplit:
    """Split a module's matrices over the ranks of the tensor axis, in place.

    Megatron-LM (Shoeybi 2019), with split tokens between blocks if a style is ``sequence`` (Korthikanti 2022).
    Parameters become DTensors on ``mesh.device_mesh["tensor"]``, split or replicated, with the values of the axis'
    first rank; modules see their part as a plain tensor, and compute as on one rank. Names of parameters stay.
    Gradients of replicated parameters that see a part of the activations are `Partial`: still to be summed over the
    axis. With one rank the module does not change.

    Per block of columns and rows each rank sends, times (n-1)/n, the activations ``(batch, tokens, width)`` twice in
    forward and twice in backward. Tensors gathered for a block are kept until backward, as in DTensor's own styles;
    Korthikanti gathers them again. Whether the split module computes what the whole one did is not checked here: see
    `SplitCheck`.

    Args:
        module: Module to split, the same on every rank of the axis; not yet given to an optimizer, compiled or sharded.
            It may be a pipeline's stage of the model.
        mesh: Mesh of the layout.
        plan: Plan of the whole model.
    """
    if mesh.size("tensor") == 1:
        return TensorSplit(plan, None)
    held = plan.of_stage(module)
    activations = Activations(mesh.device_mesh["tensor"], cuts_tokens=plan.cuts_tokens)
    distribute(module, place(module, held.styles), activations.device_mesh)
    note_split(module)
    blocks = list_blocks(held.styles)
    for name, part in list(module.named_modules()):
        apply(
            held.styles.get(name, "replicate"),
            part,
            activations,
            is_in_block=name.startswith(blocks),
            attributes=held.attributes.get(name, {}),
        )
    return TensorSplit(plan, activations)


def distribute(module: nn.Module, placements: Mapping[int, Placement], device_mesh: DeviceMesh) -> None:
    """Replace all parameters by DTensors on a mesh of one axis, with the values of its first rank.

    Args:
        module: Module, changed in place.
        placements: Placement of each parameter, by its `id`.
        device_mesh: The mesh.
    """
    distributed: dict[int, nn.Parameter] = {}
    originals: list[nn.Parameter] = []  # keeps their ids unique while they are keys
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            key = id(parameter)
            if key not in distributed:
                tensor = distribute_tensor(
                    parameter,
                    device_mesh,
                    [placements[key]],
                    src_data_rank=None if parameter.is_meta else 0,
                )
                distributed[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                originals.append(parameter)
            part.register_parameter(name, distributed[key])
