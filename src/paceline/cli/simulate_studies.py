"""`paceline simulate failures` and `paceline simulate ownership`: studies whose options are their settings."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from paceline.registry import Settings
    from paceline.simulator.failures import Answer, FailureStudy

STUDIES = ("failures", "ownership")
"""Words for `paceline simulate` that are studies."""


def find_study(name: str) -> "Settings":
    """Return the default settings of a study."""
    from paceline.simulator.failures import FailureStudy
    from paceline.simulator.ownership import Ownership

    return FailureStudy() if name == "failures" else Ownership()


def simulate_study(name: str, arguments: Sequence[str], json_file: Path | None) -> None:
    """Run a study with the settings of the command line; print it, and write `json_file`.

    Raises:
        SettingsError: A setting is unknown, wrong or missing, or the file exists.
    """
    from paceline.cli.overrides import apply_overrides, parse_pairs
    from paceline.simulator.failures import FailureStudy
    from paceline.simulator.ownership import Ownership

    if json_file is not None and json_file.exists():
        raise SettingsError(f"--json must be a new file, but {json_file} exists; choose another")
    study = apply_overrides(find_study(name), parse_pairs(arguments))
    if isinstance(study, Ownership):
        answer = study.compare()
        document: Any = {**asdict(answer), "settings": study.model_dump(mode="json")}
        for line in answer.describe():
            typer.echo(line)
    else:
        assert isinstance(study, FailureStudy)
        answers = study.answer_all()
        document = {
            "settings": study.model_dump(mode="json"),
            "answers": [_replace_infinity(asdict(one)) for one in answers],
        }
        _print_answers(study, answers)
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _replace_infinity(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with None for an interval that never ends."""
    return {key: None if isinstance(value, float) and isinf(value) else value for key, value in fields.items()}


def _print_answers(study: "FailureStudy", answers: "Sequence[Answer]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "mechanism", "save", "interval", "Young", "Daly", "goodput", "mean", "median", "95 % within", "events",
        "late", "on demand", "cost, mean", "95 % below", box=None,
    )  # fmt: skip
    for answer in answers:
        money = (
            ("-", "-") if answer.money is None else (_amount(answer.money, answer), _amount(answer.money_p95, answer))
        )
        table.add_row(
            answer.mechanism,
            _time(answer.save_s),
            _time(answer.interval_s),
            f"{_time(answer.interval_young_s)} ({answer.young_excess:+.1%})",
            f"{_time(answer.interval_daly_s)} ({answer.daly_excess:+.1%})",
            f"{answer.goodput:.1%}",
            _time(answer.mean_s),
            _time(answer.quantiles_s["p50"]),
            _time(answer.quantiles_s["p95"]),
            f"{answer.num_failures + answer.num_preemptions:.3g}",
            f"{answer.late_share:.1%}" if study.deadline_hours is not None else "-",
            f"{answer.on_demand_share:.0%}",
            *money,
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table, markup=False)
    for line in _list_assumptions(study, answers):
        typer.echo(line)


def _amount(value: float | None, answer: "Answer") -> str:
    return f"{value:,.0f} {answer.currency}"


def _time(value_s: float) -> str:
    from paceline.monitor.formatting import duration

    return "never" if isinf(value_s) else duration(value_s)


def _list_assumptions(study: "FailureStudy", answers: "Sequence[Answer]") -> list[str]:
    work = (
        f"{study.num_steps:,} steps of {study.step_s:g} s = {_time(study.work_s)} of work on {study.num_hosts:,} hosts"
    )
    processes = []
    for word, process in (("failure", study.failures), ("preemption", study.preemptions)):
        gap_s = process.mean_gap_s(study.num_hosts)
        if not isinf(gap_s):
            processes.append(f"a {word} every {_time(gap_s)} on average ({process.name})")
    events = ", ".join(processes) or "no failures"
    lines = [
        f"{work}; {events}; each stops all hosts; {study.num_trials:,} trials, seed {study.seed}",
        "Young, Daly: interval by closed form, and how much longer a run then takes than with the best that was tried",
    ]
    on_demand, spot, currency = study.find_prices()
    if on_demand is not None:
        kinds = f"{on_demand:g} {currency} an hour a host on demand"
        lines.append(
            f"cost: {kinds}{'' if spot is None else f', {spot:g} spot'}; hosts that nobody offers are not paid"
        )
    price = study.find_price()
    if price is not None and (old := price.warn_of_age()):
        lines.append(f"warning: {old}")
    stuck = [answer.mechanism for answer in answers if answer.ended_share < 1]
    if stuck:
        lines.append(f"warning: with {', '.join(stuck)} some trials had not ended after 50 times the work")
    best = answers[0]
    if best.overrides:
        settings = " ".join(f"--{path} {value}" for path, value in best.overrides.items())
        lines.append(f"for {best.mechanism}: paceline train ... {settings}")
    return lines
