"""The plan of a recipe: its model traced, its settings kept, and what is shown checked as training would check it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.cli.overrides import apply_overrides
from paceline.cli.plan_measure import make_measure
from paceline.cli.prepare import absolute_recipe, make_run
from paceline.compression import NoCodec
from paceline.errors import PacelineError, SettingsError
from paceline.memory import find_recomputable
from paceline.planner.candidate import Candidate, Division, Machines
from paceline.planner.inexact import Inexact
from paceline.planner.measured import measure_best
from paceline.planner.plan_file import fingerprint, to_text
from paceline.planner.planning import Planned, Trial, make_plan
from paceline.planner.problem import Limits, PlanProblem
from paceline.planner.profiled_steps import list_profiled
from paceline.planner.workload import trace_workload
from paceline.replica.coded_steps import refuse_steps
from paceline.simulator.training import Row
from paceline.simulator.training.answers import find_posterior
from paceline.simulator.training.case import OPTIMIZERS
from paceline.simulator.training.contract import read_row
from paceline.simulator.training.profile import Profile
from paceline.sync import EveryStep
from paceline.topology import Site
from paceline.topology.layout import Layout
from paceline.training.compiling import NO_COMPILER
from paceline.training.layout_rehearsal import estimate_layout
from paceline.training.rehearsal import RehearsalError, check_workers, choose_blocks, find_outline, guarded

if TYPE_CHECKING:
    from paceline.data.base import Splits
    from paceline.training.run import Run

_CPU = torch.device("cpu")
_MOST_REHEARSED = 8
"""Ranks of a replica up to which a candidate is rehearsed, on tensors without contents, before it is shown."""


def plan_recipe(
    recipe: str,
    overrides: list[tuple[str, str]],
    fields: Mapping[str, Any],
    machines: tuple[Machines, ...],
    limits: Limits,
    site: Site,
    measured: list[Row],
    profile: Profile | None = None,
    allows_inexact: bool = False,
    num_measured: int = 0,
) -> tuple[str, Planned, str]:
    """Plan a recipe.

    Args:
        recipe: Name or path of it.
        overrides: Settings of the command line.
        fields: Fields of a row of the contract that are given beside the model.
        machines: Machines on offer.
        limits: Limits of the run.
        site: Place of the machines.
        measured: Measured rows, which correct the prices.
        profile: Profile of the recipe on the machines.
        allows_inexact: Whether ways that change what is learnt compete too.
        num_measured: Number of best candidates that are trained on this machine for seconds, to choose by that.

    Returns:
        The recipe with its whole path, the plan, and the digest of what it leaves as it is.

    Raises:
        SettingsError: The recipe, its rule, or a setting cannot be planned; or nothing fits.
    """
    prepared = prepare(recipe, overrides, fields, machines, limits, site, allows_inexact)
    run, problem, trial = prepared.run, prepared.problem, prepared.trial
    if profile is not None:
        measured = [*measured, *list_profiled(problem, profile)]
    planned = make_plan(problem, find_posterior(measured), trial, profile)
    if num_measured:
        measure = make_measure(prepared.recipe, overrides, run)
        planned = measure_best(planned, num_measured, trial, measure, profile)
    return prepared.recipe, planned, prepared.digest(planned.candidate)


@dataclass(frozen=True)
class PlannableRecipe:
    """A recipe that is ready to be planned.

    Args:
        recipe: Whole path of it.
        run: Run of it.
        problem: Problem of planning it.
        trial: Judgement of training itself on a candidate.
    """

    recipe: str
    run: "Run"
    problem: PlanProblem
    trial: Trial

    def digest(self, candidate: Candidate) -> str:
        """Return the digest of what a plan leaves as it is."""
        return fingerprint(apply_candidate(self.run, candidate))


def prepare(
    recipe: str,
    overrides: list[tuple[str, str]],
    fields: Mapping[str, Any],
    machines: tuple[Machines, ...],
    limits: Limits,
    site: Site,
    allows_inexact: bool,
) -> PlannableRecipe:
    """Return a recipe that is ready to be planned: its model is traced, and its settings are checked.

    Args:
        recipe: Name or path of it.
        overrides: Settings of the command line.
        fields: Fields of a row of the contract that are given beside the model.
        machines: Machines on offer.
        limits: Limits of the run.
        site: Place of the machines.
        allows_inexact: Whether ways that change what is learnt compete too.

    Raises:
        SettingsError: The recipe, its rule, or a setting cannot be planned.
    """
    run = make_run(recipe, overrides)
    _check_rule(run)
    splits = run.open_data()
    on_cpu = all(one.cluster.device is not None and one.cluster.device.is_host for one in machines)
    shape = trace_workload(run, splits, on_cpu=on_cpu)
    row = read_row(
        {
            "id": "plan",
            "num_ranks": 1,
            "is_compiled": run.compiler != NO_COMPILER,
            "optimizer": run.optimizer.name if run.optimizer.name in OPTIMIZERS else "function",
            **fields,
            "model": shape.model_dump(mode="json"),
        },
        "--row",
    )
    num_steps = run.count_steps(splits)
    module = find_outline(run, splits)
    inexact = _list_inexact(run, module, num_steps) if allows_inexact else None
    has_blocks = bool(find_recomputable(module))
    problem = PlanProblem(
        row, run.global_batch, machines, (run.precision,), num_steps, limits, site, inexact, has_blocks
    )
    return PlannableRecipe(absolute_recipe(recipe), run, problem, _make_trial(run, splits))


def _list_inexact(run: "Run", module: nn.Module, num_steps: int) -> Inexact:
    """Return the ways that a run may take although they change what is learnt."""
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    refused = refuse_steps(parameters, run.precision, run.landing, Layout())
    return Inexact(tuple(one.shape for one in parameters.values()), run.optimizer.name, num_steps, refused)


def apply_candidate(run: "Run", candidate: Candidate) -> "Run":
    """Return a run with the settings of a candidate.

    Raises:
        SettingsError: The candidate does not fit the run's other settings.
    """
    return apply_overrides(run, [(path, to_text(value)) for path, value in candidate.list_overrides().items()])


def _check_rule(run: "Run") -> None:
    if not (isinstance(run.sync, EveryStep) and isinstance(run.sync.codec, NoCodec)):
        raise SettingsError(
            f"sync must be every_step without a codec to be planned, which prices exact ways only, but got {run.sync}; "
            "plan with --sync every_step"
        )


def _make_trial(run: "Run", splits: "Splits") -> Trial:
    """Return what training says of a candidate: its checks of settings and model, and a rehearsal of few ranks."""
    rehearsed: dict[Candidate, str] = {}

    def find_refusal(candidate: Candidate) -> str:
        try:
            planned = apply_candidate(run, candidate)
            check_workers(planned, candidate.division.num_workers, splits)
        except PacelineError as error:
            return " ".join(str(error).split())
        least = replace(candidate, division=_reduce(candidate.division))
        if least not in rehearsed:
            rehearsed[least] = _rehearse(run, least, splits)
        return rehearsed[least]

    return find_refusal


def _reduce(division: Division) -> Division:
    """Return the fewest ranks that divide a model as those of a division do."""
    return replace(division, data=1, sharded=min(2, division.sharded))


def _rehearse(run: "Run", candidate: Candidate, splits: "Splits") -> str:
    """Return why ranks that share a model would refuse their parts of it; empty if they would not, or cannot tell."""
    division = candidate.division
    if division.num_ranks > _MOST_REHEARSED or division.ranks_of_worker == 1:  # shards of any model can be made
        return ""
    if run.memory.offload != "none":  # which rehearsals of layouts leave out
        return ""
    batch = max(candidate.num_micro_batches, division.num_workers, 2)
    try:
        planned = apply_candidate(run.model_copy(update={"global_batch": batch * division.num_workers}), candidate)
        choices = choose_blocks(planned, splits, division.num_workers, _CPU)
        guarded(lambda: estimate_layout(planned, splits, division.num_ranks, choices, _CPU))
    except RehearsalError as error:
        if error.__cause__ is None:  # it cannot be told before ranks start
            return ""
        # The whole model did run so, or there were no plan: it is this division of it that does not.
        return f"a rehearsal of its ranks raises {type(error.__cause__).__name__}: {error.__cause__}".partition("\n")[0]
    except PacelineError as error:
        return " ".join(str(error).split())
    return ""
