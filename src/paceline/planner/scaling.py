"""A run on more and more ranks, predicted: T(n) = T(1) / (n E(n)), as its batch grows with them and as it does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

import numpy as np

from paceline.compression import NoCodec
from paceline.errors import PacelineError, SettingsError
from paceline.planner.problem import name_order
from paceline.simulator.training import Description, Row, TracedShape, describe, make_case
from paceline.simulator.training.answers import QUANTILE, answer_described
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.case import OPTIMIZERS, explain_refusal
from paceline.simulator.training.contract import LayoutRow, PipelineRow
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.profile import Profile, spread_of
from paceline.simulator.training.profiled import apply_profile, find_misfit
from paceline.sync import EveryStep
from paceline.topology import Cluster
from paceline.topology.cluster import Floats
from paceline.topology.layout import Layout
from paceline.training.compiling import NO_COMPILER
from paceline.training.run import Run

Way = Literal["weak", "strong"]


@dataclass(frozen=True)
class ScalingPoint:
    """A run on a number of ranks.

    Args:
        way: Whether each worker keeps its samples (weak), or the global batch stays (strong).
        num_ranks: Number of ranks.
        num_hosts: Number of their hosts.
        global_batch: Samples of a step.
        batch_per_rank: Samples of a step for each rank.
        step_s: Seconds of a step, with the ends of its 90 % interval.
        time_s: Seconds of as many samples as the run has: T(n).
        energy_j: Energy of all hosts for these, with the ends of its 90 % interval; 0 where their power is not known.
        efficiency: E(n), with the ends of its 90 % interval: what is uncertain of one rank and of many alike cancels.
        bound: Largest term of a step.
        memory_bytes: Memory of the fullest rank, and its upper end.
        fits: Whether a device has that.
        basis: Source of the prediction: specification, published, calibrated or profile.
        assumed: Names of what nothing said.
    """

    way: Way
    num_ranks: int
    num_hosts: int
    global_batch: int
    batch_per_rank: float
    step_s: tuple[float, float, float]
    time_s: float
    energy_j: tuple[float, float, float]
    efficiency: tuple[float, float, float]
    bound: str
    memory_bytes: tuple[float, float]
    fits: bool
    basis: str
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class RunScaling:
    """Curves of a run.

    Args:
        num_samples: Samples of the whole run.
        alone_s: Seconds that one rank alone would take for them, if it had the memory: T(1).
        points: Points, of both ways.
        refusals: Reason of each way and number of ranks that has none.
    """

    num_samples: int
    alone_s: float
    points: tuple[ScalingPoint, ...]
    refusals: dict[tuple[Way, int], str]


def predict_scaling(
    run: Run,
    shape: TracedShape,
    num_steps: int,
    cluster: Cluster,
    num_ranks: Sequence[int],
    posterior: Posterior,
    profile: Profile | None = None,
) -> RunScaling:
    """Return the curves of a run over numbers of ranks.

    Other axes of the layout stay; the data axis takes the ranks. On the fewest ranks both ways are one and the same:
    the run's own global batch. A lone rank takes one worker's samples of that a step, in the same micro-batches.

    Args:
        run: The run.
        shape: Trace of its model.
        num_steps: Steps of it.
        cluster: Cluster of the ranks.
        num_ranks: Numbers of ranks.
        posterior: Estimate of the parameters of steps, with its uncertainty.
        profile: Profile of the model on this cluster, if there is one: times are then measured ones.

    Raises:
        SettingsError: The profile is of another model or way to train, or the run cannot be priced, on any of these.
    """
    _check(run)
    fewest = max(min(num_ranks), run.layout.ranks_of_worker * run.layout.workers_of_replica)
    of_worker = -(-run.global_batch // max(1, fewest // run.layout.ranks_of_worker))  # of the one with most
    micro_batch = _micro_batch(run, of_worker)
    base = _Base(run, shape, cluster, micro_batch)
    described: list[tuple[Way, int, Description]] = []
    refusals: dict[tuple[Way, int], str] = {}
    for number in num_ranks:
        for way in ("weak", "strong"):
            try:
                described.append((way, number, base.describe(number, of_worker if way == "weak" else None)))
            except PacelineError as error:
                refusals[way, number] = explain_refusal(error)
    if not described:
        raise SettingsError(next(iter(refusals.values())))
    alone = base.describe_alone(of_worker)
    steps = [alone, *(description for _, _, description in described)]
    answers = answer_described(steps, posterior)
    spreads = _ratio_spreads(steps, posterior)
    if profile is not None:
        if misfit := find_misfit(alone.case, profile) or find_misfit(steps[-1].case, profile):
            raise SettingsError(f"--profile must be of the run, but {misfit}; profile it anew, or leave it out")
        answers = [apply_profile(answer, step.case, profile) for answer, step in zip(answers, steps, strict=True)]
        spreads = np.array([spread_of(profile, step.case.num_workers) for step in steps])
    num_samples = num_steps * run.global_batch
    rate = of_worker / answers[0]["step_s"]
    points = []
    for index, (way, number, description) in enumerate(described, start=1):
        answer, case = answers[index], description.case
        samples = of_worker * case.num_workers if way == "weak" else run.global_batch
        efficiency = samples / answer["step_s"] / (number * rate)
        width = exp(QUANTILE * float(spreads[index]))
        high = answer["memory_bytes_high"]
        points.append(
            ScalingPoint(
                way=way,
                num_ranks=number,
                num_hosts=case.num_hosts,
                global_batch=samples,
                batch_per_rank=samples / number,
                step_s=_with_ends(answer, "step_s", 1.0),
                time_s=num_samples / samples * answer["step_s"],
                energy_j=_with_ends(answer, "energy_j", num_samples / samples),
                efficiency=(efficiency, efficiency / width, efficiency * width),
                bound=answer["bound"],
                memory_bytes=(answer["memory_bytes"], high),
                fits=high <= case.device.memory_bytes,
                basis=answer["basis"],
                assumed=tuple(answer["assumed"]),
            )
        )
    return RunScaling(num_samples, num_samples / rate, tuple(points), refusals)


def _with_ends(answer: Mapping[str, float], name: str, factor: float) -> tuple[float, float, float]:
    """Return a number of an answer and the ends of its interval, multiplied."""
    return answer[name] * factor, answer[f"{name}_low"] * factor, answer[f"{name}_high"] * factor


def _check(run: Run) -> None:
    if not (isinstance(run.sync, EveryStep) and isinstance(run.sync.codec, NoCodec)):
        raise SettingsError(
            f"sync must be every_step without a codec to be predicted, but got {run.sync.name}; take --sync every_step"
        )
    if run.layout.expert > 1:
        raise SettingsError("layout.expert must be 1 to be predicted, which prices no experts; leave it out")
    if run.layout.data is not None:
        raise SettingsError(
            f"layout.data must be left out, since the ranks decide it, but got {run.layout.data}; give --ranks"
        )
    if run.layout.pipeline > 1:
        name_order(run.pipeline.order, run.pipeline.num_local_stages)


def _micro_batch(run: Run, samples: int) -> int:
    """Return the samples of a micro-batch of a worker with that many."""
    if run.layout.pipeline > 1:
        return samples // run.pipeline.count_micro_batches(samples, run.layout.pipeline)
    return -(-samples // run.num_micro_batches)


class _Base:
    """What all rows of a run have in common."""

    def __init__(self, run: Run, shape: TracedShape, cluster: Cluster, micro_batch: int) -> None:
        self._run, self._micro_batch = run, micro_batch
        recompute = run.memory.recompute
        self._row = Row(
            id="run",
            model=shape.model_dump(mode="json"),
            cluster=cluster.model_dump(mode="json"),
            device=None if cluster.device is None else cluster.device.model_dump(mode="json"),
            num_ranks=1,
            precision=run.precision,
            recompute=recompute if recompute in ("none", "full", "selective") else "full",
            is_compiled=run.compiler != NO_COMPILER,
            optimizer=run.optimizer.name if run.optimizer.name in OPTIMIZERS else "function",
        )

    def describe(self, num_ranks: int, of_worker: int | None) -> Description:
        """Return the step of that many ranks, each worker with its samples, or its share of the run's global batch.

        Raises:
            SettingsError: The layout does not fit the ranks, or there are fewer samples than workers.
        """
        run, layout = self._run, self._run.layout
        axes = layout.resolve(num_ranks)
        workers = axes.size("data", "sharded")
        if of_worker is None and workers > run.global_batch:
            raise SettingsError(
                f"global_batch must be at least the number of workers, but got {run.global_batch} for {workers} "
                "workers; raise --global_batch"
            )
        samples = of_worker or -(-run.global_batch // workers)
        micro_batch = min(samples, self._micro_batch)
        if layout.pipeline > 1:
            micro_batch = _micro_batch(run, samples)
        return self._describe(layout, axes.size("data"), num_ranks, samples * workers, micro_batch)

    def describe_alone(self, samples: int) -> Description:
        """Return the step of one rank with that many samples."""
        return self._describe(Layout(), 1, 1, samples, self._micro_batch)

    def _describe(self, layout: Layout, data: int, num_ranks: int, samples: int, micro_batch: int) -> Description:
        chunks = self._run.pipeline.num_local_stages
        row = self._row.model_copy(
            update={
                "num_ranks": num_ranks,
                "layout": LayoutRow(
                    data=data,
                    sharded=layout.sharded,
                    zero_stage=layout.zero_stage,
                    context=layout.context,
                    tensor=layout.tensor,
                    pipeline=layout.pipeline,
                ),
                "pipeline": PipelineRow(order=name_order(self._run.pipeline.order, chunks), stages_per_rank=chunks)
                if layout.pipeline > 1
                else None,
                "micro_batch": float(micro_batch),
                "global_batch": float(samples),
            }
        )
        return describe(make_case(row))


def _ratio_spreads(steps: Sequence[Description], posterior: Posterior) -> Floats:
    """Return the standard deviation of the logarithm of the ratio of the first step to each."""
    joint = posterior.covary(make_batch(steps), Features(steps))
    own = np.diag(joint)
    return np.asarray(np.sqrt(np.maximum(own + own[0] - 2 * joint[0], 0.0)))
