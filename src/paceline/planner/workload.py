"""What any model does in a step, as the numbers of a `TracedShape`: traced without contents, once for each model."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.comm.group import Group
from paceline.data.base import Splits
from paceline.data.batch import Batch, list_tensors, map_tensors
from paceline.data.order import Interval
from paceline.errors import PacelineError
from paceline.memory import copy_without_contents, counting, find_recomputable
from paceline.memory.absent_group import AbsentGroup, absent_world
from paceline.memory.rehearsal import UnknownValues
from paceline.memory.settings import Memory
from paceline.optim import SGD
from paceline.parallel.local import local
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.parallel.tensor import full_tensor
from paceline.parallel.tensor_plan import TensorPlan
from paceline.planner.digest import digest_workload, load_trace, save_trace
from paceline.planner.fitting import fit_places
from paceline.planner.recorder import WithoutAttentionDropout, WorkloadRecorder
from paceline.planner.trace import FIRST, LAST, TIED, WorkloadTrace
from paceline.simulator.training import TracedShape
from paceline.topology.layout import Layout
from paceline.training.layout_rehearsal import find_rehearsed_plan
from paceline.training.rehearsal import Forward, find_outline, guarded
from paceline.training.run import Run

SAMPLES = (2, 4)
"""Samples of the micro-batches that are traced; BatchNorm cannot train on one."""
_TENSOR_SIZES = (2, 3, 5, 7)
_CPU = torch.device("cpu")


def trace_workload(run: Run, splits: Splits, *, on_cpu: bool = False, is_cached: bool = True) -> TracedShape:
    """Return what the model of a run does in a step, as numbers that grow with samples and divide among tensor ranks.

    The model, its loss and their backward run on tensors without contents for two numbers of samples, and once more as
    the first of two tensor ranks (or three, five, seven), if its matrices can be shared. Precision, recomputation,
    layout and micro-batches of the run do not matter: those are a row's.

    Args:
        run: The run.
        splits: Training and held-out data, of which one sample's shapes matter.
        on_cpu: Whether attention runs as on a processor, where dropping weights takes several kernels.
        is_cached: Whether an earlier trace of the same model, code and sample serves.

    Raises:
        RehearsalError: The model cannot run without contents.
    """
    plain = run.model_copy(
        update={"optimizer": SGD(), "precision": "fp32", "memory": Memory(), "layout": Layout(), "num_micro_batches": 1}
    )
    original = guarded(lambda: find_outline(plain, splits))
    digest = digest_workload(plain, splits, original, on_cpu=on_cpu)
    known = load_trace(digest) if is_cached else None
    if known is not None:
        return known
    shape = guarded(lambda: _trace(plain, splits, original, digest, on_cpu))
    if is_cached:
        save_trace(shape)
    return shape


def _trace(run: Run, splits: Splits, original: nn.Module, digest: str, on_cpu: bool) -> TracedShape:
    blocks = list(find_recomputable(original))
    tracer = _Tracer(run, splits, original, blocks, on_cpu)
    one, two = (tracer.trace(samples) for samples in SAMPLES)
    shared, refusal = _trace_shared(tracer)
    inputs = Batch(splits.train.read_first(), 1, Interval(0, 1)).inputs
    first = list_tensors(inputs)[0]
    fitted, notes = fit_places(one, two, shared)
    is_image = first.is_floating_point() and first.dim() == 4
    is_text = not first.is_floating_point() and first.dim() > 1
    return TracedShape(
        title=type(original).__name__,
        digest=digest,
        tokens=int(first.shape[1]) if is_text else None,
        image=tuple(first.shape[1:]) if is_image else None,
        attention="fused" if any(place.is_fused for place in two.places.values()) else "eager",
        **fitted,
        tensor_refusal=refusal,
        cuts_tokens=shared is not None and shared.cuts_tokens,
        uncounted=tuple(dict.fromkeys((*two.uncounted, *notes))),
    )


def _trace_shared(tracer: "_Tracer") -> tuple[WorkloadTrace | None, str]:
    """Return the trace of the first of a few tensor ranks, or why there is none."""
    refusal = ""
    for size in _TENSOR_SIZES:
        try:
            plan = find_rehearsed_plan(tracer.run.model_copy(update={"layout": Layout(tensor=size)}), tracer.splits)
            return tracer.trace(SAMPLES[1], size, plan), ""
        except PacelineError as error:
            refusal = refusal or " ".join(str(error).split())
        except Exception as error:  # of code of the user's that does not run on a part
            refusal = refusal or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None, refusal


class _Tracer:
    """A run whose micro-batches are traced."""

    def __init__(self, run: Run, splits: Splits, original: nn.Module, blocks: Sequence[str], on_cpu: bool) -> None:
        self.run, self.splits = run, splits
        self._original, self._blocks, self._on_cpu = original, blocks, on_cpu
        self._sample = splits.train.read_first()  # with values: data may be made as it is read

    def trace(self, samples: int, tensor: int = 1, plan: TensorPlan | Mapping[str, str] | None = None) -> WorkloadTrace:
        """Return what a micro-batch does on the first of some tensor ranks.

        Raises:
            SettingsError: The model does not fit that many.
        """
        with ExitStack() as stack:
            world: Group = AbsentGroup(0, 1, _CPU)
            if tensor > 1:
                world = stack.enter_context(absent_world(0, tensor))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(UnknownValues())  # type: ignore[no-untyped-call]
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # training will warn
            if not self._on_cpu:
                stack.enter_context(WithoutAttentionDropout())
            return self._run(samples, tensor, plan, world)

    def _run(
        self, samples: int, tensor: int, plan: TensorPlan | Mapping[str, str] | None, world: Group
    ) -> WorkloadTrace:
        sample = map_tensors(torch.empty_like, self._sample)
        with _CPU:
            module = copy_without_contents(self._original)
        layout = Layout(tensor=tensor)
        module = parallelize(
            module,
            layout,
            group=world,
            tensor_plan=plan,
            sample=self.run.loss.inputs_of(Batch(sample, 1, Interval(0, 1))),
        )
        shard = find_shard(module, world)
        blocks = {name: module.get_submodule(name) for name in self._blocks} or {"": module}
        recorder = WorkloadRecorder(module, blocks)
        data = map_tensors(lambda leaf: leaf.new_empty(samples, *leaf.shape[1:]), sample)
        batch = Batch(data, samples, Interval(0, self.run.global_batch))
        optimizer = self.run.optimizer.build(module)
        with counting(module, optimizer, "cpu") as tracker, recorder.recording(tracker), shard.forward_context():
            forward = Forward(module, "fp32", "cpu", shard.forward_pass)
            loss = self.run.loss.loss(forward, batch).mean
            shard.begin_backward(last=True)
            full_tensor(loss).backward()
        shard.close()
        return WorkloadTrace(
            samples, tensor, recorder.places, _count_parameters(module, blocks, recorder), recorder.working_bytes,
            shard.cuts_tokens, tuple(recorder.uncounted),
        )  # fmt: skip


def _count_parameters(module: nn.Module, blocks: Mapping[str, nn.Module], recorder: WorkloadRecorder) -> dict[str, int]:
    """Return the parameters of each block, and of what is before the first and after the last; tied ones count once."""
    owners = {id(p): name for name in recorder.places if name in blocks for p in blocks[name].parameters()}
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                owner = owners.get(id(parameter), FIRST if name in recorder.before else LAST)
                found[owner] = found.get(owner, 0) + local(parameter).numel()
                if owner == FIRST and local(parameter).untyped_storage()._cdata in recorder.after:
                    found[TIED] = found.get(TIED, 0) + local(parameter).numel()
    return found
