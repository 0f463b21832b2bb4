"""A rank's shard of a worker's model, and its exchanges with the other ranks of that worker."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.comm.streams import send_to
from paceline.comm.torch_group import is_lost_peer
from paceline.data.batch import Batch
from paceline.errors import CommunicationError, PacelineError, SettingsError
from paceline.parallel.context import full_sequences, split_batch
from paceline.parallel.fully_sharded import set_gradient_sync
from paceline.parallel.gather_watch import GatherWatch
from paceline.parallel.gradient_use import GradientUse, UseOfStep
from paceline.parallel.local import list_gathered, local, wrap
from paceline.parallel.loss_graph import FormerParameters
from paceline.parallel.mesh import Mesh
from paceline.parallel.mismatch import explain_failure, report_failure
from paceline.parallel.parameter_use import ParameterUse, advise_sample
from paceline.parallel.pipeline import Pipeline
from paceline.parallel.pipeline.gradient_norm import let_norms_span_stages
from paceline.parallel.reduce_scatter import CodedReduceScatter
from paceline.parallel.tensor import TensorSplit
from paceline.parallel.token_exchange import TokenExchange
from paceline.topology.layout import Axis, Layout

_SPLITTING: tuple[Axis, ...] = ("tensor", "expert")
"""Axes whose ranks have some parameters in common, and parts of others."""


class ModelShard:
    """A rank's shard of a worker's model: all of it, unless a layout splits it over ranks.

    The ranks of one worker are its *model-parallel group*: they sum loss and weight and agree on overflow among
    themselves before the workers do, and only one of them counts each element of a gradient in a norm. `sharded`
    ranks that share parameters (ZeRO stages 2 and 3) count as one worker here, whose samples are those of all.

    Args:
        group: Ranks that hold this same shard, each for its own samples: gradients are summed over them.
        layout: Layout of all ranks.
        mesh: Mesh of the layout, with this rank's coordinates; None if every rank holds a whole model.
        module: Module of this rank.
        pipeline: Pipeline that runs the model, if its layers are on several ranks.
        tensor_split: Split of the matrices, if they are split.
        reduce_scatter: Codec that sums gradients over the sharded axis, if there is one.
        experts: Exchanges of tokens with the ranks that share the experts.
        former: Parameters that the module had before the layout.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout | None = None,
        mesh: Mesh | None = None,
        *,
        module: nn.Module | None = None,
        pipeline: Pipeline | None = None,
        tensor_split: TensorSplit | None = None,
        reduce_scatter: CodedReduceScatter | None = None,
        experts: Sequence[TokenExchange] = (),
        has_sample: bool = False,
        former: FormerParameters | None = None,
    ) -> None:
        self.group = group
        self.mesh = mesh
        self.module = module if module is not None else nn.Module()
        self.layout = layout or Layout()
        self.pipeline = pipeline
        self.reduce_scatter = reduce_scatter
        self._tensor_split = tensor_split
        self._experts = experts
        self._former = former
        if former is not None:
            former.forget(self.module)
        self._gathers_blocks = self.layout.shards_parameters and pipeline is None
        self._tied_groups: dict[str, Group] = {}
        self.world = mesh.world if mesh is not None else group
        """Group of all ranks."""
        self.model_parallel_group: Group = LocalGroup(device=group.device, epoch=group.epoch)
        """Ranks of this worker."""
        self.data_parallel_group = group
        """Ranks that take different samples."""
        self.statistics_group = group
        """Ranks with the same layers as this one that see other samples, or other tokens of them."""
        self.expert_group: Group | None = None
        """Ranks that share the experts and have all else in common; None without an expert axis."""
        if mesh is not None:
            sharded: tuple[Axis, ...] = ("sharded",) if self.layout.shards_parameters else ()
            expert: tuple[Axis, ...] = ("expert",) if self.layout.expert > 1 else ()
            self.model_parallel_group = mesh.group(*sharded, *expert, "tensor", "pipeline")
            self.data_parallel_group = mesh.group("data", "sharded", *expert)
            if sharded or expert:
                self.statistics_group = mesh.group("data", "sharded", *expert, "context")
            self.expert_group = mesh.group("expert") if expert else None
            self._tied_groups = self._find_tied_groups(mesh)
        self.parameter_use: ParameterUse | None = None
        """Search of losses for parameters of which this rank has a part."""
        if self.layout.tensor > 1 or self.layout.expert > 1 or self.layout.shards_parameters:
            self.parameter_use = ParameterUse(self.module, self.layout, has_sample=has_sample)
        if pipeline is not None:
            pipeline.check_loss = self.check_loss
            let_norms_span_stages(self.module, self.gradient_norm)
        self._use: GradientUse | None = None
        self.has_whole_gradients = False
        """Whether the gradients of parameters without dims are summed over the sharded axis in this step."""
        self._watch: GatherWatch | None = None
        if mesh is not None and self.layout.shards_parameters:
            modules = [self.module] if pipeline is None else pipeline.stages
            advice = (
                f"{advise_sample(has_sample, 'choices are')}, let every rank call all of them (times 0 where not "
                "chosen), or set Layout(zero_stage=1)"
            )
            self._use = GradientUse(self.module, modules, mesh.group("sharded"), advice, reduce_scatter)
            if mesh.store is not None and mesh.size("sharded") > 1 and self.world.device.type == "cpu":
                is_summed = reduce_scatter is None
                self._watch = GatherWatch(self.module, modules, mesh, sums_gradients=is_summed, advice=advice)

    def stand_alone(self, alone: Group) -> None:
        """Replace the groups of a whole model's shard by that of this rank alone, which stands for all from now on."""
        assert self.mesh is None
        self.group = self.world = self.data_parallel_group = self.statistics_group = alone

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds a whole model, and can run it alone."""
        return self.mesh is None or (self.model_parallel_group.size == 1 and self.mesh.size("context") == 1)

    @property
    def cuts_tokens(self) -> bool:
        """Whether each rank of the tensor axis has its own tokens between blocks."""
        return self._tensor_split is not None and self._tensor_split.cuts_tokens

    @contextmanager
    def replicated_inputs(self) -> Iterator[bool]:
        """While active, every rank may call the module on the same whole samples; yields whether it can."""
        with full_sequences(self.module):
            yield self.pipeline is None

    @property
    def random_stream(self) -> tuple[int, ...]:
        """Seed part of this rank: ranks that compute the same draw the same random numbers."""
        if self.mesh is None:
            return (self.data_parallel_group.rank,)
        place = self.mesh.coordinate("tensor") if self.cuts_tokens else 0
        stage = self.mesh.coordinate("pipeline")
        return (self.data_parallel_group.rank, self.mesh.coordinate("context"), place, stage)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts: it does on one rank of those that compute the same."""
        if self.mesh is None:
            return True
        is_last = self.pipeline is None or self.pipeline.place == self.pipeline.last_place
        return is_last and self.mesh.coordinate("tensor") == 0

    def counts_in_norm(self, name: str, parameter: Tensor) -> bool:
        """Return whether this rank's elements of a parameter count in a norm."""
        if self.mesh is None:
            return True
        holders = self.pipeline.shared.get(name) if self.pipeline is not None else None
        if self.pipeline is not None and holders and self.pipeline.place != min(holders):
            return False
        if self.layout.shards_parameters and self.mesh.coordinate("sharded") and not is_split(parameter, "sharded"):
            return False
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            return all(
                # Not is_shard(): it is false for the placement of FSDP's parts of a part.
                not placement.is_replicate() or parameter.device_mesh.get_local_rank(axis) == 0
                for axis, placement in zip(names, parameter.placements, strict=True)
            )
        return self.mesh.coordinate("tensor") == 0

    def reduce_step_scalars(
        self, weight: float, loss: Tensor, stop: bool
    ) -> tuple[float | Tensor, Tensor, bool | Tensor]:
        """Return the sums over this worker's ranks of weight and loss, and whether one of them must stop.

        On a GPU all are 0-dim tensors there if there are several ranks: backward begins without waiting for them.

        Args:
            weight: Weight of this rank's samples.
            loss: Sum of their losses, each times its weight; 0-dim.
            stop: Whether this rank was asked to stop.

        Raises:
            MismatchError: Ranks that share parameters gathered different blocks of them.
        """
        if self.model_parallel_group.size == 1:
            return weight, loss, stop
        values = torch.zeros(5, dtype=torch.float64, device=self.world.device)
        if self.counts_loss:
            values[0], values[1] = weight, loss
        values[2] = float(stop)
        is_read = self.pipeline is None and self.world.device.type == "cpu"
        use: GradientUse | None = self._use if is_read else None
        if use is not None:  # on a GPU the host would wait for the sums
            values[3:] = torch.tensor(use.order(), dtype=torch.float64)
        self.sum_over_model_parallel(values, "step of a worker")
        if self.world.device.type == "cpu":
            if use is not None:
                use.check_order(values[3:].tolist(), self.model_parallel_group)
            return float(values[0]), values[1], bool(values[2])
        return values[0], values[1], values[2] > 0

    def split_context(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch: a part of each sequence, if a context axis splits them."""
        if self.mesh is None or self.mesh.size("context") == 1:
            return batch
        return replace(batch, data=split_batch(batch.data, self.mesh))

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context that forward and backward run in; without it logits are gathered in full."""
        if self._tensor_split is None or self.pipeline is not None:
            return nullcontext()
        return self._tensor_split.parallel_loss()

    def evaluation_context(self) -> AbstractContextManager[None]:
        """Return the context of evaluation: a loss may combine parameters with its own tensors, as in training."""
        return implicit_replication() if self._tensor_split is not None else nullcontext()

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose use of parameters is the model's own, not the loss's."""
        return self.parameter_use.forward() if self.parameter_use is not None else nullcontext()

    def check_loss(self, loss: Tensor, first: int = 0) -> None:
        """Raise `SettingsError` if a loss uses itself what would be weighted wrongly, such as parts of parameters.

        Args:
            loss: The loss.
            first: Number of the first operation that may be the loss's.
        """
        if self._former is not None:
            self._former.check(loss, self.layout)
        if self.parameter_use is not None:
            self.parameter_use.check(loss, first=first)

    def explain(self, error: BaseException) -> PacelineError | None:
        """Return what an error of torch means that comes from parts of parameters or a lost connection, or None.

        Other ranks are told of any other error, which will cost them their connections.
        """
        found = self.parameter_use.explain(error) if self.parameter_use is not None else None
        if found is not None or self.mesh is None or self.pipeline is not None:  # which tells others itself
            return found
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            lost = f"rank {self.world.rank} of {self.world.size} lost others of its layout"
            return explain_failure(error, self.mesh, lost)
        if not isinstance(error, CommunicationError | SystemExit | KeyboardInterrupt):
            report_failure(error, self.mesh)
        return None

    def begin_backward(self, *, last: bool) -> None:
        """Prepare a backward pass; only the `last` of a step sums gradients over the sharded axis."""
        if self._gathers_blocks:
            set_gradient_sync(self.module, last, keep_gathered=self.layout.zero_stage == 2)

    @property
    def repeats_blocks(self) -> bool:
        """Whether the next backward may make gradients of a sharded block several times, as it ran forward so often."""
        return self._use is not None and self._use.repeats_blocks

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self._use is not None:
            self._use.end_backward()

    def list_replicated(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[Group, list[str]]]:
        """Return the parameters that ranks of this worker replicate, with the group of these ranks."""
        common: dict[Group, list[str]] = {}
        sharded: tuple[Axis, ...] = ("sharded",) if self.layout.shards_parameters else ()
        for axis in (*_SPLITTING, *sharded):
            if self.mesh is not None and self.mesh.size(axis) > 1:
                whole = [name for name, parameter in parameters.items() if not is_split(parameter, axis)]
                common[self.mesh.group(axis)] = whole
        for name, group in self._tied_groups.items():
            common[group] = [*common.get(group, []), name]
        return list(common.items())

    def sum_over_model_parallel(self, values: Tensor, name: str) -> None:
        """Replace `values` by their sum over the ranks of this worker."""
        if self.model_parallel_group.size > 1:
            with self._watch.explaining() if self._watch is not None else nullcontext():
                self.model_parallel_group.all_reduce(values, name=name).wait()

    def gradient_norm(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the worker's model, 0-dim, float64."""
        counted = [local(p.grad) for n, p in parameters.items() if p.grad is not None and self.counts_in_norm(n, p)]
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if counted:
            norms = torch._foreach_norm(counted)
            squares = torch.stack([norm.double() for norm in norms]).square().sum()
        self.sum_over_model_parallel(squares, "squared norm")
        return squares.sqrt()

    def reduce_tied_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of parameters with copies on several pipeline stages; after backward, on all of them."""
        for name, group in self._tied_groups.items():
            if (gradient := parameters[name].grad) is None:
                gradient = parameters[name].grad = torch.zeros_like(parameters[name])
            group.all_reduce(local(gradient), name=f"gradient of {name}").wait()

    def clear_unused_gradients(
        self, parameters: Mapping[str, nn.Parameter], replicas: Group, *, checks_finite: bool
    ) -> UseOfStep:
        """Take off the zeros that ranks which share a parameter have summed where none of them used it.

        Before, gradients of parameters that all of these ranks have whole, those without dims, are summed over them.

        Args:
            parameters: Parameters that require gradients, by name.
            replicas: Ranks over which the step sums the gradients of this shard.
            checks_finite: Whether to say what is not finite of what a codec has summed.
        """
        if self._use is None:
            return UseOfStep([], 0, 0)
        assert self.mesh is not None
        matrices = self.mesh.group("tensor") if self.reduce_scatter is not None else None
        use = self._use.exchange(replicas, matrices, checks_finite=checks_finite)
        self._sum_whole_gradients(parameters)
        self.has_whole_gradients = False
        for name in use.unused:
            parameters[name].grad = None
        return use

    def complete_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter the gradient of all ranks of this worker; ranks may still have parts of sums."""
        for parameter in parameters.values():
            parameter.grad = summed_gradient(parameter)
        self._sum_whole_gradients(parameters)

    def _sum_whole_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum, once a step, the gradients of parameters that all `sharded` ranks have whole: those without dims.

        Where no rank has one, as the training loop has set it to None, it stays so.
        """
        whole = [] if self._use is None else [p for p in parameters.values() if not is_split(p, "sharded")]
        if not whole or self.has_whole_gradients:
            return
        assert self.mesh is not None
        self.has_whole_gradients = True
        held = [torch.zeros_like(local(one)) if one.grad is None else local(one.grad) for one in whole]
        counts = torch.tensor([float(one.grad is not None) for one in whole], dtype=torch.float64)
        values = torch.cat([torch.stack([one.double() for one in held]), send_to(held[0].device, counts)])
        self.mesh.group("sharded").all_reduce(values, name="gradients of parameters without dims").wait()
        for parameter, gradient, value, count in zip(whole, held, *values.chunk(2), strict=True):
            gradient.copy_(value)
            if parameter.grad is None and count:  # only then is the count read: the host waits for a GPU
                parameter.grad = wrap(parameter, gradient)

    def take_sent_bytes(self) -> int:
        """Return the bytes of tokens that this rank has sent to experts since the last call."""
        return sum(exchange.take_sent_bytes() for exchange in self._experts)

    def close(self) -> None:
        """Close the groups, the pipeline and the mesh of the shard."""
        if self.reduce_scatter is not None:
            self.reduce_scatter.close()
        if self in self.world.membership.shards:
            self.world.membership.shards.remove(self)
            self.world.membership.reading = None
        if self.mesh is not None:
            self.mesh.close()

    def describe(self) -> dict[str, Any]:
        """Return how the model is split, as JSON: the same on every rank, for any number of workers."""
        plan = self._tensor_split.plan if self._tensor_split is not None else None
        given: Mapping[str, str] | None = None
        if plan is not None:
            given = plan.styles if plan.patterns is None else plan.patterns
        return {
            "sharded": self.layout.sharded if self.layout.shards_parameters else 1,
            "tensor": self.layout.tensor,
            "tensor_plan": dict(given) if given is not None else None,
            "stages": self.pipeline.describe() if self.pipeline is not None else None,
        } | ({"expert": self.layout.expert} if self.expert_group is not None else {})

    def _find_tied_groups(self, mesh: Mesh) -> dict[str, Group]:
        """Return the group of ranks that hold a copy of a parameter, by its name, if this rank is one of several."""
        groups: dict[tuple[int, ...], Group] = {}
        groups_by_name = {}
        shared = self.pipeline.shared if self.pipeline is not None else {}
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        for name, places in shared.items():
            if self.pipeline is None or self.pipeline.place not in places or name not in trained:
                continue
            ranks = tuple(mesh.ranks("pipeline")[place] for place in places)
            if ranks not in groups:
                groups[ranks] = mesh.subgroup(ranks, "stages that share parameters")
            groups_by_name[name] = groups[ranks]
        return groups_by_name


def summed_gradient(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient; if ranks hold partial sums of it, as under sequence parallelism, their sum."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient


def is_split(parameter: Tensor, axis: Axis) -> bool:
    """Whether the ranks of an axis hold different elements of a parameter."""
    if not isinstance(parameter, DTensor) or axis not in (parameter.device_mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[(parameter.device_mesh.mesh_dim_names or ()).index(axis)].is_replicate()


class ParameterPlaces:
    """Where the trained parameters of a module are, by which one is missed that another has taken the place of.

    Args:
        module: The model, before it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._gathered = {id(held.sharded_param): held for part in module.modules() for held in list_gathered(part)}
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._places = self._find_places()

    def check(self) -> None:
        """Raise `SettingsError` if a trained parameter is the optimizer's, but not the module's any more."""
        if all(there.get(key) is one or self._is_form(there.get(key), one) for there, key, one in self._places):
            return
        here = list(self._module.parameters())
        known = set(map(id, here))
        for name, parameter in self._trained.items():
            if id(parameter) not in known and not any(self._is_form(one, parameter) for one in here):
                raise replaced_parameter(name, "replaced or removed")
        self._places = self._find_places()  # other modules hold them, such as one around a block

    def _find_places(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the dict and the key of each trained parameter, and of each module around one."""
        parameters = set(self._trained.values())
        places: list[tuple[dict[str, Any], str, Any]] = []
        for part in self._module.modules():
            places += [(part._parameters, key, one) for key, one in part._parameters.items() if one in parameters]
            children = [(key, one) for key, one in part._modules.items() if one is not None]
            places += [
                (part._modules, key, one) for key, one in children if not parameters.isdisjoint(one.parameters())
            ]
        return places

    def _is_form(self, found: Any, parameter: Any) -> bool:
        """Return whether what is found is what a parameter is gathered into for forward."""
        held = self._gathered.get(id(parameter))
        return held is not None and found is not None and found is getattr(held, "_unsharded_param", None)


def replaced_parameter(name: str, change: str) -> SettingsError:
    """Return the error of a parameter that is not the one that the replica was made with."""
    return SettingsError(
        f"parameters must stay those that the Replica was made with, but {name} was {change} since; change the "
        "model first, then make the optimizer and the Replica, or give a parameter other values in place (copy_)"
    )
