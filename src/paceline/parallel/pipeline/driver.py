"""A model run as a pipeline: this rank's stages of it, and the step of a worker through all ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.torch_group import is_lost_peer
from paceline.data.batch import list_tensors, map_tensors, select
from paceline.errors import PacelineError, SettingsError
from paceline.parallel.loss_graph import check_kept
from paceline.parallel.mesh import Mesh
from paceline.parallel.mismatch import explain_failure, report_failure
from paceline.parallel.parameter_use import next_operation
from paceline.parallel.pipeline.absent import Tracking, computing_loss, find_missing
from paceline.parallel.pipeline.costs import cut
from paceline.parallel.pipeline.forward import Description, ForwardPass
from paceline.parallel.pipeline.layers import PipelineLayer, find_modules, find_owned, keep_only, list_paths
from paceline.parallel.pipeline.orders import ChunkLoss, TorchSchedule
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.parallel.pipeline.stages import Stage, Value, as_tuple
from paceline.parallel.pipeline.step_trial import StepTrial
from paceline.parallel.pipeline.times import Clock, PipelineTimes, TimedStage
from paceline.parallel.pipeline.traced import adopt_shapes, check_same_layers, find_layers, list_opened
from paceline.parallel.trial import restored, training

_MAX_KEPT = 4
"""Number of micro-batch shapes whose receive buffers are kept."""


class Pipeline:
    """Some stages of a model, on each rank along the pipeline axis.

    A step's gradients are complete in each `grad` when `run` has returned, and are sums, not means.
    Hooks on accumulated gradients fire once per micro-batch, or never if backward is split.

    Args:
        module: Whole model, with the same values on every rank. It is split in place: tensors of other ranks are
            removed, all others keep their names.
        mesh: Mesh of the layout.
        settings: Order of work and cuts.
        sample: Inputs of the model for at least one sample: a tensor, several, or a mapping by name. A model that does
            not list its layers is run on them to find these.
        peers: Ranks that gather parameters of stages together with this one, or share their experts: all run them
            equally often.
        num_samples: Samples of a micro-batch, for which the costs of layers are found.

    Raises:
        SettingsError: The model cannot be split like this.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        settings: PipelineSettings,
        sample: Any,
        peers: Group | None = None,
        num_samples: int = 1,
    ) -> None:
        self.settings = settings
        self.num_ranks = mesh.size("pipeline")
        self.place = mesh.coordinate("pipeline")
        self._mesh = mesh
        self._group = mesh.process_group("pipeline")
        self._device = mesh.world.device
        self._clock = Clock(self._device)
        self._peers = peers
        self._whole: tuple[nn.Module, Any, Callable[[Tensor], Tensor]] | None = None
        self._made: dict[tuple[Any, ...], _Made] = {}
        self._loss: Callable[[Any, Tensor], Tensor] | None = None
        self._num_losses = 0
        layers = find_layers(module, settings.sequence, sample)
        check_same_layers(layers, mesh)
        places = cut(module, layers, settings, mesh, tuple(list_tensors(sample)), num_samples)
        self.layers_of_stages = [[layers[i] for i in held] for held in places]
        """Layers of each stage of the whole pipeline."""
        self.num_stages = len(self.layers_of_stages)
        if peers is not None and mesh.size("expert") == 1:  # ranks that share experts gather nothing
            self._check_gatherable(module)
        self.shared = self._find_shared(module)
        """Names of the parameters and buffers that several ranks hold a copy of, with the positions of these ranks on
        the pipeline axis. Gradients of such a parameter must be summed over them."""
        mine = self._layers_at(self.place)
        keep_only(module, find_owned(module, mine), list_paths(mine), list_opened(layers))
        self.module = module
        """This rank's part of the model, under the names of the whole."""
        self.stages = [
            Stage(
                module,
                layers,
                index,
                splits_backward=settings.behaviour.splits_backward,
                is_last=index == self.num_stages - 1,
            )
            for index, layers in enumerate(self.layers_of_stages)
            if self._place_of(index) == self.place
        ]
        """Stages of this rank."""
        self.check_loss: Callable[[Tensor, int], None] = lambda loss, first: None
        """Function that refuses losses which use what this rank has a part of, given their first operation's number."""
        self.times: PipelineTimes | None = None
        """Times of the last timed step."""

    @property
    def last_place(self) -> int:
        """Position on the pipeline axis of the rank with the last stage, and so with outputs and losses."""
        return self._place_of(self.num_stages - 1)

    def run(self, inputs: Value, data: Any, loss: ChunkLoss, *, timed: bool = False) -> list[Tensor]:
        """Run a worker's samples forward and backward, and return the loss of each micro-batch, if this rank has it.

        Every rank of the pipeline calls it with the same samples. Gradients are added to `grad`. Autocast
        around it applies to forward and loss; backward runs without it, in the dtypes of forward.

        Args:
            inputs: Inputs of the first stage: a tensor, or several, with the batch dim first.
            data: Tensors of the same number of samples, in any nesting, of which the loss gets those of a micro-batch.
            loss: Function from the output and the data of one micro-batch to the value that backward starts from: a
                sum.
            timed: Whether to fill `times`. On a GPU the host then waits once before the step and once after it.

        Raises:
            CommunicationError: Another rank is gone, or did not answer in time.
            MismatchError: Ranks of an axis ran different operations.
        """
        inputs = as_tuple(inputs)
        made = self._make(inputs)
        num_samples = len(inputs[0])
        is_last = self.place == self.last_place
        losses: list[Tensor] | None = [] if is_last else None
        self._num_losses = 0

        def loss_of(output: Any, places: Tensor) -> Tensor:  # of the micro-batches in their order
            first = self._num_losses * len(places)
            return loss(output, select(data, slice(first, first + len(places)), num_samples))

        self._loss = loss_of
        if timed:
            self._clock.start()
        with self._explaining("a step"):
            made.schedule.step(
                *(inputs if self.place == self._place_of(0) else ()),
                target=torch.arange(num_samples) if is_last else None,
                losses=losses,
                return_outputs=False,
            )
        self._loss = None
        if timed:
            self.times = self._collect(made.num_micro_batches)
        return [one.detach() for one in losses or []]

    def evaluate(self, inputs: Value) -> Any:
        """Return the model's output for `inputs` on the rank of the last stage, None on others; no gradients.

        Every rank of the pipeline calls it with the same samples. The training mode of modules does not change.
        """
        inputs = as_tuple(inputs)
        num_micro_batches = self.settings.count_micro_batches(math.gcd(*self._gather_counts(inputs)), self.num_ranks)
        with self._explaining("an evaluation"):
            outputs = self._forward().run(list(zip(*(one.chunk(num_micro_batches) for one in inputs), strict=True)))
        if not outputs:
            return None
        parts = zip(*map(list_tensors, outputs), strict=True)
        return map_tensors(lambda _: _join(next(parts)), outputs[0])

    def try_step(self, inputs: Value) -> None:
        """Raise `SettingsError` on all ranks of the world if a stage of some cannot run on the inputs; see `StepTrial`.

        Every rank calls it, before its modules are split or sharded.
        """
        trial = StepTrial(self.stages, self._forward(), self.num_stages, self._mesh.world)
        with self._explaining("a trial"), restored(self.module), training(self.module):
            trial.run(as_tuple(inputs))

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors that this rank receives into, which live from step to step."""
        return [tensor for made in self._made.values() for stage in made.stages for tensor in stage.buffers]

    def stand_alone(self, whole: nn.Module, sample: Any, cut: Callable[[Tensor], Tensor]) -> None:
        """Rehearse without other ranks: what stages send is found on this rank, and peers have as many samples.

        Args:
            whole: Whole model, not split.
            sample: Inputs of the model, as the constructor takes them.
            cut: Function from a tensor between stages of the whole model to that between those of the split one.
        """
        self._whole, self._peers = (whole, sample, cut), None

    def describe(self) -> list[list[str]]:
        """Return, for each stage, its rank's position on the pipeline axis and its layers, as JSON."""
        return [
            [str(self._place_of(index)), *(layer.name for layer in layers)]
            for index, layers in enumerate(self.layers_of_stages)
        ]

    def close(self) -> None:
        """Free all buffers."""
        self._made.clear()

    def _place_of(self, stage: int) -> int:
        return self.settings.behaviour.place(stage, self.num_ranks)

    def _layers_at(self, place: int) -> list[PipelineLayer]:
        stages = enumerate(self.layers_of_stages)
        return [layer for index, layers in stages if self._place_of(index) == place for layer in layers]

    def _find_shared(self, module: nn.Module) -> dict[str, list[int]]:
        owned = [find_owned(module, self._layers_at(place)) for place in range(self.num_ranks)]
        for place, tensors in enumerate(owned):
            if not any(tensor.requires_grad for tensor in tensors):
                names = ", ".join(layer.name for layer in self._layers_at(place))
                raise SettingsError(
                    f"each rank of a pipeline must have parameters to train, but position {place} of {self.num_ranks} "
                    f"has none in {names}; give the pipeline other cuts (--pipeline.cuts), or take fewer ranks"
                )
        named = [*module.named_parameters(), *module.named_buffers()]
        places = {name: [i for i, tensors in enumerate(owned) if tensor in tensors] for name, tensor in named}
        return {name: holders for name, holders in places.items() if len(holders) > 1}

    def _check_gatherable(self, module: nn.Module) -> None:
        """Refuse parameters of two stages of a rank, or of a module of which both have some: FSDP gathers modules."""
        holders: dict[tuple[Tensor, int], int] = {}
        for stage, layers in enumerate(self.layers_of_stages):
            place = self._place_of(stage)
            inside = {parameter for held in find_modules(module, layers).values() for parameter in held.parameters()}
            inside &= find_owned(module, self._layers_at(place))
            for name, parameter in module.named_parameters():
                if parameter in inside and holders.setdefault((parameter, place), stage) != stage:
                    raise SettingsError(
                        f"a sharded parameter of a pipeline must be of one stage of a rank, but {name} is of two; take "
                        "an order with one stage a rank (1f1b), or Layout(zero_stage=1) (--layout.zero_stage 1)"
                    )

    def _forward(self) -> ForwardPass:
        return ForwardPass(self.stages, self.num_stages, self.settings.behaviour, self._group)

    def _make(self, inputs: tuple[Tensor, ...]) -> "_Made":
        """Return torch's schedule for such inputs; the first time, a micro-batch runs forward to find the shapes."""
        counts = self._gather_counts(inputs)
        num_micro_batches = self.settings.count_micro_batches(math.gcd(*counts), self.num_ranks)
        num_samples = len(inputs[0])
        chunk: tuple[Tensor, ...] = select(inputs, slice(num_samples // num_micro_batches), num_samples)
        key = (*counts, *((one.shape, one.dtype) for one in chunk))  # a key new to one of the peers is new to all
        made = self._made.pop(key, None)
        if made is None:
            descriptions = self._describe_stages(chunk)
            while len(self._made) >= _MAX_KEPT:
                del self._made[next(iter(self._made))]
            stages = [self._make_stage(stage, *descriptions[stage.index]) for stage in self.stages]
            schedule = self.settings.behaviour.make(stages, num_micro_batches, self._compute_loss)
            made = _Made(schedule, num_micro_batches, stages)
        self._made[key] = made  # the newest last
        return made

    def _describe_stages(self, chunk: tuple[Tensor, ...]) -> dict[int, tuple[Description, Description]]:
        """Return what this rank's stages take and give for a micro-batch, which runs forward."""
        if self._whole is None:
            trial = self._forward()
            with self._explaining("a trial"), restored(self.module):
                trial.run([chunk])
            return trial.descriptions
        whole, sample, cut = self._whole
        layers = {layer.name: layer for layer in find_layers(whole, self.settings.sequence, sample)}
        last = self.num_stages - 1
        stages = [
            Stage(whole, [layers[one.name] for one in held], index, splits_backward=False, is_last=index == last)
            for index, held in enumerate(self.layers_of_stages)
        ]
        alone = dist.new_group([dist.get_rank()])
        trial = ForwardPass(stages, self.num_stages, self.settings.behaviour, alone)
        trial.run([chunk])
        for mine, theirs in zip(self.layers_of_stages, stages, strict=True):
            adopt_shapes(mine, theirs.layers)
        sent = {index: tuple(map(cut, gives)) for index, (_, gives) in trial.descriptions.items()}
        first, output = trial.descriptions[0][0], trial.descriptions[last][1]
        return {index: (sent[index - 1] if index else first, sent[index] if index < last else output) for index in sent}

    def _gather_counts(self, inputs: tuple[Tensor, ...]) -> list[int]:
        """Return the number of samples of each peer."""
        if self._peers is None or self._peers.size == 1:
            return [len(inputs[0])]
        counts, mine = torch.zeros(self._peers.size, 1, dtype=torch.int64), torch.tensor([len(inputs[0])])
        # In host memory: to read it, the host need not wait for a GPU.
        self._peers.on_cpu().all_gather(counts, mine, name="samples of a pipeline").wait()
        return [number for (number,) in counts.tolist()]

    def _make_stage(self, stage: Stage, takes: Description, gives: Description) -> TimedStage:
        return TimedStage(
            stage,
            stage.index,
            self.num_stages,
            self._device,
            input_args=takes,
            output_args=gives,
            group=self._group,
            clock=self._clock,
        )

    def _compute_loss(self, output: Value, places: Tensor) -> Tensor:
        assert self._loss is not None
        first, output = next_operation(), self.stages[-1].rebuild(output)
        with self._clock.watch("forward", self.num_stages - 1, self._num_losses), Tracking(), computing_loss():
            loss = self._loss(output, places)
        if missing := find_missing(loss):
            raise SettingsError(
                f"the loss of a pipeline must use what its last stage has, but it comes from {missing}; compute it "
                "from the output and the batch, or set Layout(pipeline=1) (--layout.pipeline 1)"
            )
        check_kept(loss, list_tensors(output), first, self.module)
        self.check_loss(loss, first)
        self._num_losses += 1
        return loss if loss._base is None else loss.clone()  # a split backward detaches it in place

    def _collect(self, num_micro_batches: int) -> PipelineTimes:
        settings = self.settings
        return PipelineTimes(
            order=settings.order,
            ranks=self._mesh.ranks("pipeline"),
            num_micro_batches=num_micro_batches,
            stages_per_rank=settings.num_local_stages,
            formula=settings.behaviour.bubble(self.num_ranks, settings.num_local_stages, num_micro_batches),
            spans=self._clock.stop(),
        )

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if (refusal := _find_refusal(error)) is not None:
                report_failure(refusal, self._mesh)
                raise refusal from refusal.__cause__
            if not is_lost_peer(error):
                report_failure(_find_origin(error), self._mesh)
                raise
            reports = f"{what} of the pipeline lost a rank: position {self.place} of {self.num_ranks} reports"
            raise explain_failure(error, self._mesh, reports) from error
        except Exception as error:
            report_failure(error, self._mesh)
            raise


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor of all samples from those of micro-batches; of one without samples, such as a loss, the mean."""
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts)).mean(0)


def _find_refusal(error: BaseException) -> PacelineError | None:
    """Return the error of ours that torch's schedule has wrapped in one of its own, if any."""
    cause = error.__cause__
    return cause if cause is None or isinstance(cause, PacelineError) else _find_refusal(cause)


def _find_origin(error: BaseException) -> BaseException:
    """Return the error that torch's schedule has wrapped in one of its own, or the error itself."""
    return error if error.__cause__ is None else _find_origin(error.__cause__)


@dataclass(frozen=True)
class _Made:
    schedule: TorchSchedule
    num_micro_batches: int
    stages: list[TimedStage]
