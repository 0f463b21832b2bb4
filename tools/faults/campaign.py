"""The fault campaign: trainings of real processes whose workers are hit, each judged against one that was not.

    python tools/faults/campaign.py --num_runs 300 --directory runs/faults

A run is drawn from a seed: a rule, ranks, phases and kinds of faults. With a directory the campaign goes on where it
was stopped, so that it can be made in pieces (`--time_s`); what came of each run is in its ``outcomes.jsonl``, of which
`--tables` prints tables. With `--only` and `--first` one run is made again.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import warm
from attacks import attack, come_back, damage, read_statuses
from judging import Outcome, is_finished, judge
from links import train_on_hosts
from scenarios import KINDS, OWN_PACE, RULES, SETTINGS, Scenario, draw_all
from tables import tabulate

from paceline.comm.control import ControlAccess
from paceline.elastic.requests import ask
from paceline.errors import PacelineError
from paceline.testing.netlab import netlab_missing

_TIMEOUT_S = 60.0
_LAUNCHER_KILLED = -9
_NUM_SEEDS = 4
_DISK_WORDS = ("disk full", "I/O error")


class Campaign:
    """A campaign in a folder: trainings that were not hit are made once for each rule and number of workers."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed

    def run(self, scenario: Scenario) -> Outcome:
        """Execute a scenario, and judge it; its folder stays if it fails."""
        straights = self._find_straights(scenario)
        folder = self._directory / f"run-{scenario.number}"
        shutil.rmtree(folder, ignore_errors=True)
        outcome = execute(scenario, folder, self._seed)
        try:
            judge(outcome, folder, straights)
        except (PacelineError, OSError, LookupError) as error:
            outcome.problems.append(f"it could not be judged: {type(error).__name__}: {error}")
        if not outcome.problems:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _find_straights(self, scenario: Scenario) -> list[Path]:
        """Return the folders of runs that were not hit: one, or several where they differ from run to run."""
        is_link = scenario.name == "link"
        rule = f"{scenario.rule}-{scenario.num_workers}{'-hosts' * is_link}".replace(", ", "-").replace(" ", "-")
        seeds = range(_NUM_SEEDS if scenario.rule in OWN_PACE else 1)
        folders = [self._directory / f"straight-{rule}-{seed}" for seed in seeds]
        name = "link" if is_link else "none"
        with (self._directory / f"straight-{rule}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes take part
            for seed, folder in zip(seeds, folders, strict=True):
                if not (folder / "done").exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    calm = Scenario(-1, name, scenario.rule, scenario.num_workers, settings={"seed": seed})
                    found = execute(calm, folder, self._seed)
                    if found.problems:
                        raise RuntimeError(f"the undisturbed run must end well, but {found.problems}; see {folder}")
                    (folder / "done").touch()
        return folders


def execute(scenario: Scenario, folder: Path, seed: int) -> Outcome:
    """Train, and hit."""
    outcome, began_s = Outcome(scenario), time.monotonic()
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "recipe.py", folder)
    (folder / "faults.json").write_text(json.dumps([dataclasses.asdict(fault) for fault in scenario.faults]))
    try:
        code = _train(scenario, folder, outcome, random.Random(f"{seed} {scenario.number} {scenario.detail}"))
    except (PacelineError, TimeoutError, OSError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
        code = 0
    if code != 0:
        said = (folder / "output.txt").read_text(errors="replace").splitlines()[-3:]
        outcome.problems.append(f"ended with code {code}: {' / '.join(said)}")
    if (folder / "unpickled").exists():
        outcome.problems.append("a pickle of a stranger was read")
    outcome.wall_s = time.monotonic() - began_s
    return outcome


def _train(scenario: Scenario, folder: Path, outcome: Outcome, chance: random.Random) -> int:
    settings = SETTINGS | RULES[scenario.rule] | scenario.settings
    words = [f"{folder / 'recipe.py'}:run", "--out", str(folder / "run")]
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    if scenario.name == "link":
        code, outcome.num_resumes, problems = train_on_hosts(scenario, folder, [*words, "--go_on"], _TIMEOUT_S)
        outcome.problems += problems
        return code
    launcher = warm.Launcher([*words, "--workers", str(scenario.num_workers)], folder)
    try:
        outcome.problems += _disturb(scenario, folder, chance)
        code = launcher.wait(_TIMEOUT_S)
        if code == _LAUNCHER_KILLED and scenario.settings.get("launcher_timeout_s"):  # workers train on meanwhile
            return _resume(folder, outcome)
    finally:
        is_killed = bool(scenario.faults) and scenario.faults[0].kind == "kill launcher"
        if is_killed and not warm.wait_until_gone(folder / "run"):
            outcome.problems.append("workers outlive their launcher by a minute")
        launcher.close()
    if not _may_resume(scenario, folder, code):
        return code
    if scenario.detail and not is_finished(folder):  # whose newest checkpoint nobody reads any more
        damage(folder / "run", scenario.detail, chance)
        outcome.is_damaged = True
    return _resume(folder, outcome)


def _resume(folder: Path, outcome: Outcome) -> int:
    outcome.num_resumes = 1
    with contextlib.closing(warm.Launcher(["--resume", str(folder / "run")], folder)) as launcher:
        return launcher.wait(_TIMEOUT_S)


def _may_resume(scenario: Scenario, folder: Path, code: int) -> bool:
    """Return whether the training ended in a way after which a person starts it again."""
    if scenario.name in _DISK_WORDS and code == 1:
        said = (folder / "output.txt").read_text(errors="replace")
        return "free space there" in said or "check the disk" in said
    return code == _LAUNCHER_KILLED and scenario.faults[0].kind == "kill launcher"


def _disturb(scenario: Scenario, folder: Path, chance: random.Random) -> list[str]:
    """Do what is done from outside; return what is wrong."""
    run = folder / "run"
    if scenario.sizes:
        for number, size in enumerate(scenario.sizes):
            _wait_for_step(run, 3 + 4 * number)  # two exchanges are left after the last, of rules with intervals
            ask(run, {"target": size})
    if scenario.name == "attack on the control server":
        _wait_for_step(run, 2)
        attack(ControlAccess.load(run / "workers" / "control.json"), folder, chance)
    if scenario.name == "old epoch":
        _wait_for_step(run, 1)
        access = ControlAccess.load(run / "workers" / "control.json")
        statuses = read_statuses(access, [f"w{number}" for number in range(scenario.num_workers)])
        _wait_for_words(run, '"kind":"workers_changed"')
        return come_back(access, statuses)
    return []


def _wait_for_step(run: Path, step: int) -> None:
    _wait_for_words(run, *(f'"step":{number},' for number in range(step, step + 20)))


def _wait_for_words(run: Path, *words: str) -> None:
    deadline_s, log = time.monotonic() + _TIMEOUT_S, run / "events.jsonl"
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        told = [line for line in lines if '"kind":"step_finished"' in line or '"kind":"workers_changed"' in line]
        if any(word in line for line in told for word in words):
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the log must say {words[0]} within {_TIMEOUT_S:g} s, but does not")
        time.sleep(0.02)


def run_campaign(options: argparse.Namespace, directory: Path, job: int) -> None:
    """Make one job's part of the runs that are not in the directory's file yet, and write there what comes of each."""
    path = directory / "outcomes.jsonl"
    done = {one["scenario"]["number"] for one in read_outcomes(path)}
    campaign, began_s = Campaign(directory, options.seed), time.monotonic()
    drawn = draw_all(options.seed, tuple(options.only), options.first)
    for count, scenario in enumerate(itertools.islice(drawn, options.num_runs)):
        if time.monotonic() - began_s > options.time_s:
            return
        if count % options.jobs != job or scenario.number in done:
            continue
        if scenario.name == "link" and (reason := netlab_missing()):
            print(f"run {scenario.number} is left out: {reason}", file=sys.stderr)
        else:
            line = json.dumps(dataclasses.asdict(campaign.run(scenario)))
            with path.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def run_jobs(options: argparse.Namespace, directory: Path) -> bool:
    """Run the campaign in several processes, and return whether all have ended well."""
    warm.warm_up()
    jobs = []
    try:
        for job in range(options.jobs):
            jobs.append(os.fork())
            if not jobs[-1]:
                jobs.clear()
                _be_job(options, directory, job)
        codes = [os.waitpid(pid, 0)[1] for pid in jobs]
        return not any(codes)
    except BaseException:
        for pid in jobs:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
        raise


def _be_job(options: argparse.Namespace, directory: Path, job: int) -> None:
    code = 1
    try:
        run_campaign(options, directory, job)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def read_outcomes(path: Path) -> list[dict[str, Any]]:
    """Return what came of the runs of a campaign."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """Run a campaign, print its tables, and return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="Number of the first run.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of runs at the same time.")
    parser.add_argument("--only", nargs="*", default=[], choices=list(KINDS), help="Kinds of faults.")
    parser.add_argument("--time_s", type=float, default=float("inf"), help="Time after which no run is begun.")
    parser.add_argument("--directory", type=Path, help="Folder for the runs; a temporary one by default.")
    parser.add_argument("--tables", action="store_true", help="Only print the tables of the directory.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and what was started is ended
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        is_whole = options.tables or run_jobs(options, directory)
        outcomes = read_outcomes(directory / "outcomes.jsonl")
    print(tabulate(outcomes))
    return int(not is_whole or any(outcome["problems"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
