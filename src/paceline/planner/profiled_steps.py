"""Steps that a profile tells, as measured rows: they correct the prices of all candidates alike."""

from itertools import product

from paceline.errors import SettingsError
from paceline.planner.candidate import Candidate, Division
from paceline.planner.problem import PlanProblem
from paceline.planner.space import Legality
from paceline.simulator.training import Row
from paceline.simulator.training.contract import MeasuredRow
from paceline.simulator.training.profile import Profile
from paceline.simulator.training.profiled import apply_profile, find_misfit

_MICRO_BATCHES = (1, 2, 4)
"""Numbers of micro-batches of the steps."""


def list_profiled(problem: PlanProblem, profile: Profile) -> list[Row]:
    """Return steps of replicas of a whole model, on one worker and on as many as were profiled, as measured rows.

    Raises:
        SettingsError: The profile is of another model, or of other settings.
    """
    legality, rows = Legality(problem), []
    workers = {1, min(profile.num_workers, problem.machines[0].num_ranks)}
    for num_workers, many in product(sorted(workers), _MICRO_BATCHES):
        candidate = Candidate(0, Division(data=num_workers), many, "none", problem.precisions[0])
        if legality.find_refusal(candidate):
            continue
        case = problem.case(candidate)
        if misfit := find_misfit(case, profile):
            raise SettingsError(f"--profile must be of the recipe that is planned, but {misfit}; profile it again")
        step_s = float(apply_profile({"assumed": []}, case, profile)["step_s"])
        rows.append(problem.row_of(candidate).model_copy(update={"measured": MeasuredRow(step_s=step_s)}))
    return rows
