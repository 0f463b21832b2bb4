"""Rehearsal of a run's step to estimate its memory, and the run's savings of memory."""

import contextlib
import heapq
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.join import default_device
from paceline.data import Loader
from paceline.data.base import Spec, Splits
from paceline.data.batch import Batch, map_tensors
from paceline.data.division import check_shares
from paceline.data.order import Interval, apportion
from paceline.errors import PacelineError, SettingsError
from paceline.memory import (
    ActivationOffload,
    Choice,
    OffloadedOptimizer,
    ParameterOffload,
    StepDescription,
    copy_without_contents,
    find_recomputable,
    guess_device,
    plan,
    recompute,
)
from paceline.memory.absent_group import AbsentGroup
from paceline.memory.rehearsal import UnknownValues
from paceline.optim import SGD
from paceline.parallel.batch_norm import is_too_few_values, too_few_samples
from paceline.parallel.parallelize import check_model, check_tokens
from paceline.replica.attributes import find_attribute
from paceline.replica.checks import Precision
from paceline.replica.optimizer_step import autocast
from paceline.training.compiling import check_compiler
from paceline.training.legality import check_counts
from paceline.training.model import Model, resize, size_of
from paceline.training.run import Run

T = TypeVar("T")

_MAX_BOUNDARIES = 1000
"""Number of boundaries for which sizes of micro-batches are listed before a run."""
_LOUD = ("torch._subclasses.fake_tensor", "torch.distributed.pipelining.schedules")
"""Logs of torch that print the stack of each error, also of ours, or a whole schedule."""


class RehearsalError(SettingsError):
    """The model cannot run on tensors without contents."""


def save_activations(run: Run, module: nn.Module, splits: Splits, num_workers: int, device: torch.device) -> None:
    """Apply the run's `memory` settings to the activations of `module`: recompute or offload them.

    Args:
        run: The run.
        module: Whole model, before ranks share it.
        splits: Training and held-out data.
        num_workers: Number of workers among which a global batch is divided.
        device: Device of the training.

    Raises:
        SettingsError: The settings do not suit the model or the device, or the budget is too small.
    """
    computing = default_device() if run.memory.offloads_parameters else device
    check_device(run, computing)
    if run.memory.offloads_parameters and device.type != "cpu":
        raise SettingsError(
            f"workers must join on the CPU for memory.offload parameters, but they are on {device}; say "
            "--memory.offload parameters beside --resume too"
        )
    recompute(module, choose_blocks(run, splits, num_workers, device, module))
    if run.memory.offloads_activations:
        ActivationOffload(module)
    if run.memory.offloads_parameters:
        ParameterOffload(module, computing)


def save_optimizer(run: Run, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer, with its state in CPU memory if the run's `memory` says so."""
    if run.memory.offloads_optimizer:
        OffloadedOptimizer(optimizer)
    return optimizer


def check_device(run: Run, device: torch.device) -> None:
    """Refuse to offload from CPUs, whose memory has everything already."""
    if run.memory.offload != "none" and device.type == "cpu":
        raise SettingsError(
            f"memory.offload must be none on CPUs, whose memory is where it would go, but got {run.memory.offload}; "
            "take --memory.recompute, more --num_micro_batches or a leaner --optimizer"
        )


def choose_blocks(
    run: Run, splits: Splits, num_workers: int, device: torch.device, module: nn.Module | None = None
) -> dict[str, Choice]:
    """Return the parts of each block to recompute; for a budget, planned with a rehearsal of the step.

    Args:
        run: The run.
        splits: Training and held-out data.
        num_workers: Number of workers among which a global batch is divided.
        device: Device of the training.
        module: Model of the run, if it has been built.
    """
    wanted = run.memory.recompute
    if wanted == "none":
        return {}
    module = outline(run.model, splits) if module is None else module
    blocks = list(find_recomputable(module))
    if not blocks:
        raise SettingsError(
            f"memory.recompute must be none for a model without blocks, but got {wanted}; put its repeated parts into "
            "an nn.ModuleList or nn.Sequential"
        )
    if wanted == "full" or wanted == "selective":
        return dict.fromkeys(blocks, wanted)
    # Activations do not depend on the optimizer, and a worker must not cache optimizer tensors without contents.
    step = describe_step(run.model_copy(update={"optimizer": SGD()}), splits, num_workers, device, module)
    return guarded(lambda: plan(step, blocks, wanted))


def describe_step(
    run: Run,
    splits: Splits,
    num_workers: int,
    device: torch.device,
    module: nn.Module | None = None,
    *,
    num_samples: int | None = None,
) -> StepDescription:
    """Return the description of the run's step on the worker with the largest share, for a rehearsal.

    The rehearsal chooses the blocks to recompute, the run's `memory` all else. A model that grows is rehearsed at its
    final depth.

    Args:
        run: The run.
        splits: Training and held-out data.
        num_workers: Number of workers among which a global batch is divided.
        device: Device of the training.
        module: Model of the run, if it has been built.
        num_samples: Samples of a micro-batch; by default those of the largest share.
    """
    num_samples = num_samples or count_samples(run, num_workers)
    sample = splits.train.read_first()
    original = find_outline(run, splits) if module is None or run.growth.steps else module

    def build(choices: Mapping[str, Choice]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = copy_without_contents(original)
        recompute(module, choices)
        if run.memory.offloads_activations:
            ActivationOffload(module)
        return module, save_optimizer(run, run.optimizer.build(module))

    def loss(module: nn.Module) -> Tensor:
        data = map_tensors(
            lambda tensor: torch.empty(num_samples, *tensor.shape[1:], dtype=tensor.dtype, device=device), sample
        )
        batch = Batch(data, num_samples, Interval(0, run.global_batch))
        return run.loss.loss(Forward(module, run.precision, device.type), batch).mean

    num_parts = -(-run.count_parts(num_workers) // num_workers)
    num_reducing = len(run.sync.reduce_ranks(AbsentGroup(0, num_workers, device), run.count_steps(splits)))
    return StepDescription(
        build=build,
        loss=loss,
        device=device,
        num_micro_batches=num_parts,
        is_exchanged=num_reducing > 1 or run.num_virtual_workers is not None,
        num_partial_sums=num_parts.bit_length() - 1 if run.num_virtual_workers is not None else 0,
        clip_norm=run.clip_norm,
    )


def count_samples(run: Run, num_workers: int) -> int:
    """Return the samples of a micro-batch of the worker with the largest share."""
    if run.num_virtual_workers is not None:
        return max(1, -(-run.global_batch // run.num_virtual_workers))
    shares = apportion(run.global_batch, check_shares(run.fixed_shares, num_workers))
    return max(1, -(-max(shares) // run.num_micro_batches))


def find_outline(run: Run, splits: Splits) -> nn.Module:
    """Return the run's model, at its final size, without contents; see `outline`."""
    model = run.model
    if run.growth.steps:
        model = resize(model, run.growth.size_at(run.count_steps(splits), size_of(model)))
    return outline(model, splits)


def check_shards(run: Run, splits: Splits) -> None:
    """Refuse a model that the run's layout cannot divide, before its ranks start.

    Raises:
        SettingsError: The model does not fit the layout.
    """
    if run.layout.is_plain:
        return
    with contextlib.suppress(RehearsalError):  # its ranks will tell
        check_model(outline(run.model, splits), run.layout, tensor_plan=run.tensor_plan, pipeline=run.pipeline)
    if run.layout.context > 1 and splits.train.spec.input_shape:
        check_tokens(torch.empty(1, *splits.train.spec.input_shape, device="meta"), run.layout)


def check_workers(run: Run, num_workers: int, splits: Splits | None = None) -> Splits:
    """Check at once what every worker would refuse later, and return the data.

    Args:
        run: The run.
        num_workers: Number of its workers.
        splits: Training and held-out data, if they are open.

    Raises:
        SettingsError: Workers, global batch and shares do not fit, or the compiler is missing; the model does not fit
            the layout; a function lacks an argument; or steps cannot be counted.
        DataError: The data cannot be opened.
    """
    check_counts(run.layout, num_workers, run.global_batch)
    check_shares(run.fixed_shares, num_workers)
    check_compiler(run.compiler, guess_device(num_workers * run.layout.ranks_of_worker))
    run.check_functions()
    splits = splits or run.open_data()
    run.count_steps(splits)
    check_shards(run, splits)
    return splits


def check_batch_norm_sizes(run: Run, splits: Splits, loader: Loader) -> None:
    """Refuse a run with a micro-batch of one sample, if a BatchNorm layer cannot train on one.

    A model that cannot run without contents is not checked.

    Args:
        run: The run.
        splits: Training and held-out data.
        loader: Loader at the position where training continues.

    Raises:
        SettingsError: There is such a micro-batch; the message says what to do.
    """
    num_steps = run.count_steps(splits)
    boundaries = _list_boundaries(run, loader, num_steps) if run.sync.is_asynchronous else []
    own, joint = loader.list_sizes([*boundaries, num_steps], is_asynchronous=run.sync.is_asynchronous)
    sizes = joint if run.batch_norm == "global" else own
    if run.layout.pipeline > 1:
        sizes = {size // run.pipeline.count_micro_batches(size, run.layout.pipeline) for size in sizes}
    if 1 not in sizes:
        return
    with contextlib.suppress(RehearsalError):
        # With any optimizer.
        described = describe_step(
            run.model_copy(update={"optimizer": SGD()}), splits, 1, torch.device("cpu"), num_samples=1
        )
        if not guarded(lambda: _takes_batch(described)):
            raise too_few_samples(loader.order.num_samples, run.global_batch, run.batch_norm)


def _list_boundaries(run: Run, loader: Loader, num_steps: int) -> list[int]:
    """Return the next steps before which workers that run at their own pace synchronise: the first ones of a long run.

    Sizes repeat with the epochs and intervals, so that later ones seldom add any.
    """
    here = loader.order.step_of(loader.position, run.global_batch)
    assert run.checkpoint_interval != "auto", "workers at their own pace know where they meet"
    wanted = (run.evaluate_interval, run.checkpoint_interval, run.peer_memory.interval)
    intervals = [interval for interval in wanted if interval]
    steps = [range((here // interval + 1) * interval, num_steps, interval) for interval in intervals]
    return list(itertools.islice(heapq.merge(*steps), _MAX_BOUNDARIES))


def guarded(rehearsing: Callable[[], T]) -> T:
    """Return the result of a rehearsal.

    Raises:
        RehearsalError: The model cannot be rehearsed; the message says why.
    """
    logs = [logging.getLogger(name) for name in _LOUD]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        return rehearsing()
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise RehearsalError(
            "the model must run on tensors without contents (torch's FakeTensorMode) for its memory to be known before "
            f"it is trained, but it raises {type(error).__name__}: {_first_line(error)}; give no budget to "
            "--memory.recompute, and silence this by --memory.check false"
        ) from error
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _takes_batch(step: StepDescription) -> bool:
    """Return whether BatchNorm layers can train on the batch of `step`."""
    with FakeTensorMode(allow_non_fake_inputs=True), UnknownValues(), step.device:  # type: ignore[no-untyped-call]
        module, _ = step.build({})
        if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            return True
        try:
            step.loss(module)
        except ValueError as error:
            if is_too_few_values(error):
                return False
            raise
    return True


def outline(model: Model, splits: Splits) -> nn.Module:
    """Return the model without contents, on the meta device.

    It is built there. One that cannot be, such as one that reads trained weights (`from_pretrained`), is built as it is
    to be trained, once, and let go of.

    Raises:
        RehearsalError: The model cannot be built in this process, such as one that asks for its rank.
    """
    try:
        return _outline(model.model_dump_json(), splits.train.spec)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        raise RehearsalError(
            "the model must be built in this process too for its memory to be known before it is trained, but it "
            f"raises {type(error).__name__}: {_first_line(error)}; silence this by --memory.check false"
        ) from error


@lru_cache(maxsize=4)
def _outline(settings: str, spec: Spec) -> nn.Module:
    model = Model.model_validate_json(settings)
    with contextlib.suppress(Exception), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that are not read; it is built again to be trained
        return model.build(spec)
    module = model.build(spec)
    with torch.device("meta"):
        return copy_without_contents(module)


@dataclass(frozen=True)
class Forward:
    """A module that is called like a replica."""

    module: nn.Module
    precision: Precision
    device: str
    forward_pass: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the module's forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward in the precision."""
        with self.forward_pass():
            return self._run(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return find_attribute(self, name, self._run)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with autocast(self.precision, self.device):
            return function(*args, **kwargs)
