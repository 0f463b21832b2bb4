"""Answers that a profile gives, where it is of the row's own model."""

from collections.abc import Sequence
from typing import Any

from paceline.simulator.training.answers import answer_rows, with_interval
from paceline.simulator.training.case import StepCase, make_case
from paceline.simulator.training.contract import Row
from paceline.simulator.training.energy import estimate_energy_j, widen_by_power
from paceline.simulator.training.exchanges import USUAL
from paceline.simulator.training.profile import Profile, spread_of
from paceline.simulator.training.traced_shape import TracedShape


def answer_profiled(rows: Sequence[Row], measured: Sequence[Row], profile: Profile) -> dict[str, Any]:
    """Return the answers to rows as `answer_rows` does, with a profile.

    Rows without device and cluster are of the machine that was profiled. Where the model is the profiled one and only
    the data axis has ranks, times are the profile's; else they follow from the machine's measured speeds.
    """
    machine = {"cluster": profile.cluster.model_dump(mode="json")}
    known = [row.model_copy(update=machine) if row.cluster is None and row.device is None else row for row in rows]
    document = answer_rows(known, measured)
    for index, (given, row) in enumerate(zip(rows, known, strict=True)):
        answer = document["rows"][index]
        if answer["error"] is None and row is not given:
            document["rows"][index] = apply_profile(answer, make_case(row), profile)
    return document


def find_misfit(case: StepCase, profile: Profile) -> str:
    """Return why a profile does not tell the time of a step; empty if it does."""
    model = case.model
    if not isinstance(model, TracedShape) or model.digest != profile.model.digest:
        return f"it is of {profile.model.title} as it was then, and the model or its code is another now"
    if case.num_workers != case.row.num_ranks or case.sharded > 1:
        return "it knows replicas of a whole model, and the layout shares it"
    if case.precision != profile.model.precision:
        return f"it was measured in {profile.model.precision}, and the step is in {case.precision}"
    if case.recompute != "none" or case.is_compiled:
        return "it was measured without recomputation and compiler"
    if case.exchange != USUAL or case.offload != "none":
        return "it was measured with gradients averaged in every step, and nothing offloaded"
    return ""


def apply_profile(answer: dict[str, Any], case: StepCase, profile: Profile) -> dict[str, Any]:
    """Return an answer with the times of a profile, if it tells them."""
    if find_misfit(case, profile):
        return answer
    number = case.num_micro_batches
    terms = profile.predict(case.samples * number, case.num_workers, number)
    step_s = sum(terms.values())
    log_spread = spread_of(profile, case.num_workers)
    energy_j = estimate_energy_j(case, step_s, 1.0 - terms.get("data", 0.0) / step_s)
    others = ["computing of other numbers of workers"] if case.num_workers != profile.num_workers else []
    return {
        **answer,
        **with_interval("step_s", step_s, log_spread),
        **with_interval("energy_j", energy_j, widen_by_power(case, log_spread)),
        "terms": terms,
        "bound": max(terms, key=lambda name: terms[name]),
        "basis": "profile",
        "assumed": [*answer["assumed"], *others],
    }
