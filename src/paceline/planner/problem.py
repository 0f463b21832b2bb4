"""What is to be planned: a model's step, the machines on offer, and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from paceline.errors import SettingsError
from paceline.parallel.pipeline.orders import OrderName
from paceline.planner.candidate import Candidate, Machines
from paceline.planner.inexact import Inexact
from paceline.simulator.training import Row, StepCase, make_case
from paceline.simulator.training.contract import LayoutRow, Order, PipelineRow
from paceline.simulator.training.description import describe
from paceline.simulator.training.exchanges import USUAL, GradientExchange
from paceline.topology import Precision, Site
from paceline.training.legality import ModelSizes

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Size of the buckets of gradients on GPUs, where a run gives none."""


@dataclass(frozen=True)
class Limits:
    """What a plan must keep; None: no limit. Those of a whole run need `PlanProblem.num_steps`.

    Args:
        within_s: Time of the run.
        budget: Money that it costs.
        energy_j: Energy that all hosts use.
        currency: Currency of the money; empty: that of the prices.
    """

    within_s: float | None = None
    budget: float | None = None
    energy_j: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        """Refuse limits that nothing can keep."""
        for name, value in (("within", self.within_s), ("budget", self.budget), ("energy", self.energy_j)):
            if value is not None and not value > 0:
                raise SettingsError(f"--{name} must be more than 0, but got {value:g}; leave it out for no limit")

    @property
    def is_of_run(self) -> bool:
        """Whether there is any."""
        return (self.within_s, self.budget, self.energy_j) != (None, None, None)


@dataclass(frozen=True)
class PlanProblem:
    """What is to be planned.

    Args:
        row: Step of the model, as a row of the contract; what candidates vary in it is not read.
        global_batch: Samples of a step, which no candidate changes.
        machines: Machines on offer.
        precisions: Precisions of the forward pass to consider.
        num_steps: Steps of the run; None: not known.
        limits: Limits of the run.
        site: Place of the machines, whose electricity has carbon.
        inexact: Ways that change what is learnt; None: exact ones alone.
        has_blocks: Whether the model has blocks, which can be recomputed.
    """

    row: Row
    global_batch: int
    machines: tuple[Machines, ...]
    precisions: tuple[str, ...]
    num_steps: int | None = None
    limits: Limits = field(default_factory=Limits)
    site: Site = field(default_factory=Site)
    inexact: Inexact | None = None
    has_blocks: bool = True

    def __post_init__(self) -> None:
        """Refuse limits that cannot be judged."""
        if self.limits.is_of_run and self.num_steps is None:
            raise SettingsError("--num_steps must be given with a limit of the whole run, but is not; give it")
        if self.limits.budget is not None and not self.has_prices:
            unknown = ", ".join(one.name for one in self.machines if one.price_per_hour is None)
            raise SettingsError(f"--budget must go with a price of each cluster, but {unknown} has none; give --price")
        if self.has_prices and len(self._currencies) > 1:
            raise SettingsError(
                f"--budget and prices must be in one currency, but are in {' and '.join(self._currencies)}; "
                "give --budget or --price in the other"
            )

    @property
    def _currencies(self) -> list[str]:
        names = [self.limits.currency, *(machines.currency for machines in self.machines)]
        return sorted({name.lower() for name in names if name})

    @property
    def currency(self) -> str:
        """Unit of money: that of the budget or of the table of prices, or else words for it."""
        return next(iter(self._currencies), "the price's currency")

    @property
    def has_prices(self) -> bool:
        """Whether the price of every cluster is known."""
        return all(machines.price_per_hour is not None for machines in self.machines)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model that axes must divide."""
        case = self.base(0, 1, self.precisions[0])
        return ModelSizes(case.model.num_blocks, case.model.divided, case.tokens if case.model.attends else 0)

    def base(self, machines: int, num_ranks: int, precision: str) -> StepCase:
        """Return the case of that many ranks of a plain layout, of which those of candidates are made."""
        key = (machines, num_ranks, precision)
        if key not in self._bases:
            wanted = self.machines[machines]
            row = self.row.model_copy(
                update={
                    "id": "",
                    "cluster": wanted.cluster.model_dump(),
                    "device": wanted.cluster.model_dump()["device"],
                    "num_ranks": num_ranks,
                    "layout": LayoutRow(data=num_ranks, sharded=1, zero_stage=3, context=1, tensor=1, pipeline=1),
                    "pipeline": None,
                    "micro_batch": 1.0,
                    "global_batch": float(max(self.global_batch, num_ranks)),  # each candidate brings its own
                    "precision": precision,
                    "recompute": "none",
                }
            )
            self._bases[key] = make_case(row)
        return self._bases[key]

    @cached_property
    def _bases(self) -> dict[tuple[int, int, str], StepCase]:
        return {}

    def case(self, candidate: Candidate) -> StepCase:
        """Return the step of a candidate."""
        division = candidate.division
        base = self.base(candidate.machines, division.num_ranks, candidate.precision)
        return replace(
            base,
            data=division.data,
            sharded=division.sharded,
            zero_stage=division.zero_stage,
            context=division.context,
            tensor=division.tensor,
            pipeline=division.pipeline,
            sequence_parallel=division.tensor > 1 and self._cuts_tokens,
            order=name_order(division.order, division.stages_per_rank),
            stages_per_rank=division.stages_per_rank,
            micro_batch=self.samples_of(candidate) / candidate.num_micro_batches,
            global_batch=float(self.samples_of(candidate) * division.num_workers),
            recompute=candidate.recompute,
            offload=candidate.offload,
            exchange=self._find_exchange(candidate),
        )

    @cached_property
    def num_parameters(self) -> float:
        """Number of the model's parameters."""
        return describe(self.base(0, 1, self.precisions[0])).stage_parameters

    def _find_exchange(self, candidate: Candidate) -> GradientExchange:
        """Return what replicas exchange, beside what is usual."""
        if candidate.way is not None:
            assert self.inexact is not None
            return self.inexact.exchange(candidate.way, candidate.division.num_workers)
        if candidate.bucket_bytes is None:
            return USUAL
        usual, number = (
            max(2, ceil(4 * self.num_parameters / size)) for size in (DEFAULT_BUCKET_BYTES, candidate.bucket_bytes)
        )
        # What fewer messages save is counted like what is counted of the usual ones: once for all buckets.
        messages = number / usual if number < usual else 1.0 + number - usual
        return GradientExchange(messages=messages, parts=number / usual)

    @cached_property
    def _cuts_tokens(self) -> bool:
        """Whether tensor ranks share tokens between matrices: as the model was traced, or as the row says."""
        settled = self.base(0, 1, self.precisions[0]).model.fixed.get("sequence_parallel")
        return bool(self.row.sequence_parallel) if settled is None else bool(settled)

    def samples_of(self, candidate: Candidate) -> int:
        """Return the samples of the worker with most of a step: the others wait for it."""
        return -(-self.global_batch // candidate.division.num_workers)

    def has_row(self, candidate: Candidate) -> bool:
        """Return whether rows of the contract can say all of a candidate: no offloading, buckets or codecs."""
        return candidate.offload == "none" and candidate.bucket_bytes is None and candidate.way is None

    def row_of(self, candidate: Candidate) -> Row:
        """Return the step of a candidate as a row of the contract, whose answer is what is planned with."""
        case, division = self.case(candidate), candidate.division
        axes: Mapping[str, int] = {name: getattr(division, name) for name in LayoutRow.model_fields}
        pipes = division.pipeline > 1
        return case.row.model_copy(
            update={
                "id": candidate.describe(),
                "layout": LayoutRow(**axes),  # type: ignore[arg-type]
                "sequence_parallel": case.sequence_parallel,
                "pipeline": PipelineRow(order=case.order, stages_per_rank=case.stages_per_rank) if pipes else None,  # type: ignore[arg-type]
                "micro_batch": case.micro_batch,
                "global_batch": case.global_batch,
                "recompute": case.recompute,
            }
        )


def choose_precision(machines: tuple[Machines, ...]) -> Precision:
    """Return the narrowest usual precision that every device has: bf16, fp16 or fp32; fp8 is never proposed."""
    devices = [one.cluster.device for one in machines if one.cluster.device is not None]
    usual: tuple[Precision, ...] = ("bf16", "fp16")
    return next((name for name in usual if all(name in device.peak_flops for device in devices)), "fp32")


def name_order(order: OrderName, stages_per_rank: int) -> Order:
    """Return the name that rows have for an order of a pipeline.

    Raises:
        SettingsError: The order has no price.
    """
    if order == "zero_bubble" and stages_per_rank > 1:
        return "interleaved_zero_bubble"
    if order in ("zero_bubble", "gpipe", "interleaved", "1f1b"):
        return order
    raise SettingsError(
        f"pipeline.order must be gpipe, 1f1b, interleaved or zero_bubble to be priced, but got {order}; take one"
    )
