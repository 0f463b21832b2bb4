"""The fault campaign: trainings of real processes whose workers are hit, each judged against one that was not.

    python tools/faults/campaign.py --num_runs 300 --markdown table.md

A run is drawn from a seed: a rule, ranks, phases and kinds of faults. Of every_step with virtual workers the final
weights must be those of the undisturbed run, bit for bit; of the other rules each sample must count once, and the loss
must be that of the undisturbed run within a margin.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.monitor.events import Evaluated, Restarted, RunFinished, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select, summarise

PHASES = ("data", "forward", "backward", "reduce", "update", "evaluate", "snapshot", "persist", "commit")
"""Phases of a step and of a checkpoint."""
RECOVERY_PHASES = ("vote", "heal")
RULES: dict[str, dict[str, str]] = {
    "every_step, exact": {"sync": "every_step", "num_virtual_workers": "12"},
    "every_step": {"sync": "every_step"},
    "every_step, one_bit": {"sync": "every_step", "sync.codec": "one_bit"},
    "every_step, top_k": {"sync": "every_step", "sync.codec": "top_k"},
    "local_sgd": {"sync": "local_sgd", "sync.period": "4"},
    "diloco": {"sync": "diloco", "sync.period": "4"},
    "dpsgd": {"sync": "dpsgd"},
    "asgd": {"sync": "asgd"},
}
_NUM_STEPS, _BATCH = 40, 12
_SETTINGS = {
    "num_steps": _NUM_STEPS,
    "global_batch": _BATCH,
    "checkpoint_interval": 8,
    "evaluate_interval": 10,
    "evaluate_samples": 16,
    "num_threads": 1,
    "schedule.warmup_steps": 2,
    "loss.sample_tokens": 0,
    "model.width": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 32,
    "data.max_bytes": 300_000,
}
_TIMEOUT_S = 180.0
_LOSS_MARGIN = 0.1
"""Largest difference of held-out losses, in nats: those of four seeds differ by about as much."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank; -1 for the first that comes."""

    number: int
    kind: str
    rank: int
    step: int
    phase: str


@dataclass(frozen=True)
class Scenario:
    """A training and what happens to it."""

    name: str
    rule: str
    num_workers: int
    faults: tuple[Fault, ...] = ()
    launcher_dies: bool = False
    sizes: tuple[int, ...] = ()
    """Numbers of workers that are asked for, one after the other."""


@dataclass
class Outcome:
    """What came of it."""

    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    num_struck: int = 0
    num_changes: int = 0
    num_restarts: int = 0
    num_again: int = 0
    """Updates that were done and done again."""
    pauses_s: list[float] = field(default_factory=list)
    """Time from each fault to the next update."""


def draw(seed: int, number: int) -> Scenario:
    """Return a scenario."""
    chance = random.Random(f"{seed} {number}")
    name = chance.choices(
        ("kill", "kill two at once", "kill during recovery", "stop", "sleep", "hold", "launcher", "resize"),
        weights=(60, 8, 10, 3, 3, 3, 5, 8),
    )[0]
    rule = chance.choice(list(RULES)) if name.startswith("kill") else "every_step, exact"
    size = chance.choice((3, 3, 4))
    step = chance.randrange(2, _NUM_STEPS - 8)
    first, second = chance.sample(range(size), 2)
    phase = chance.choice(PHASES)
    kind = name if name in ("stop", "sleep", "hold") else "kill"
    if name in ("stop", "sleep", "hold"):
        phase = chance.choice(("forward", "backward", "update"))
    if phase in ("snapshot", "persist", "commit"):
        first = 0
    faults = [Fault(0, kind, first, step, phase)]
    if name == "kill two at once":
        faults.append(Fault(1, kind, second, step, chance.choice(PHASES[:5])))
    if name == "kill during recovery":
        faults.append(Fault(1, kind, -1, step, chance.choice(RECOVERY_PHASES)))
    if name == "launcher":
        return Scenario(name, rule, size, launcher_dies=True)
    if name == "resize":
        return Scenario(name, rule, 4, sizes=(3, 2, 5, 4))
    return Scenario(name, rule, size, tuple(faults))


def execute(scenario: Scenario, directory: Path) -> Outcome:
    """Train, hit, and judge by the log and the last checkpoint."""
    outcome = Outcome(scenario)
    faults = directory / "faults"
    faults.mkdir(parents=True)
    (faults / "faults.json").write_text(json.dumps([asdict(fault) for fault in scenario.faults]))
    with _training(scenario, directory, ()) as process:
        if scenario.launcher_dies:
            _wait_for_step(directory / "run", 12)
            process.kill()
            process.wait()
            _wait_until_gone(directory / "run")
        _resize(scenario, directory / "run")
        code = _finish(process)
    if scenario.launcher_dies:
        with _training(scenario, directory, ("--resume", str(directory / "run"))) as process:
            code = _finish(process)
    if code != 0:
        said = (directory / "output.txt").read_text(errors="replace").splitlines()[-3:]
        outcome.problems.append(f"ended with code {code}: {' / '.join(said)}")
        return outcome
    _read_log(outcome, directory)
    return outcome


def judge(outcome: Outcome, directory: Path, straight: Path) -> None:
    """Compare with the run that was not hit."""
    if outcome.problems:
        return
    here, there = digest_weights(directory / "run"), digest_weights(straight / "run")
    if "exact" in outcome.scenario.rule and here != there:
        outcome.problems.append("weights differ from those of the undisturbed run")
    mine, theirs = (_final_loss(path / "run") for path in (directory, straight))
    if abs(mine - theirs) > _LOSS_MARGIN:
        outcome.problems.append(f"held-out loss {mine:.3f}, undisturbed {theirs:.3f}")


def digest_weights(directory: Path) -> str:
    """Return a digest of the parameters in the newest checkpoint."""
    checkpoint = Checkpoint.open(CheckpointStore(directory / "checkpoints").list_checkpoints()[0])
    found = hashlib.sha256()
    for name in sorted(checkpoint.list_tensors()):
        if name.startswith("model/"):
            found.update(checkpoint.read(name).numpy().tobytes())
    return found.hexdigest()


def _read_log(outcome: Outcome, directory: Path) -> None:
    records = read_log(directory / "run" / "events.jsonl")
    if len(select(records, RunFinished)) != 1:
        outcome.problems.append(f"finished {len(select(records, RunFinished))} times")
    outcome.num_changes = len(select(records, WorkersChanged))
    outcome.num_restarts = len(select(records, Restarted))
    told = select(records, StepFinished)
    outcome.num_again = len(told) - len({record.step for record in told})
    counted = {record.step: record.event.position for record in summarise(records).steps}
    if outcome.scenario.rule != "asgd" and counted != {step: _BATCH * step for step in range(1, _NUM_STEPS + 1)}:
        outcome.problems.append("not each sample counts once")
    for path in sorted((directory / "faults").glob("struck-*")):
        outcome.num_struck += 1
        struck_s = json.loads(path.read_text())["unix_s"]
        times = [struck_s, *(record.unix_s for record in told if record.unix_s > struck_s)]
        outcome.pauses_s.append(max((b - a for a, b in itertools.pairwise(times)), default=0.0))


@contextlib.contextmanager
def _training(scenario: Scenario, directory: Path, resumed: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    settings = _SETTINGS | RULES[scenario.rule]
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    where = resumed or (
        f"{Path(__file__).parent / 'recipe.py'}:run",
        "--workers",
        str(scenario.num_workers),
        "--out",
        str(directory / "run"),
        *words,
    )
    environment = os.environ | {"FAULTS": str(directory / "faults"), "OMP_NUM_THREADS": "1"}
    with (directory / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *where],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _finish(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 124


def _resize(scenario: Scenario, run: Path) -> None:
    for number, size in enumerate(scenario.sizes):
        _wait_for_step(run, 6 + 7 * number)
        command = [sys.executable, "-m", "paceline", "scale", str(run), str(size)]
        subprocess.run(command, check=True, capture_output=True)


def _wait_for_step(run: Path, step: int) -> None:
    deadline_s = time.monotonic() + 60
    log = run / "events.jsonl"
    while not log.exists() or max((one.step for one in read_log(log)), default=-1) < step:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"step {step} must come within a minute, but did not")
        time.sleep(0.05)


def _wait_until_gone(run: Path) -> None:
    """Wait until the workers have saved and ended: their launcher is gone."""
    for _ in range(600):
        links = [Path(f"/proc/{folder.name}/fd/1") for folder in Path("/proc").glob("[0-9]*")]
        alive = 0
        for link in links:
            with contextlib.suppress(OSError):
                alive += link.readlink().is_relative_to(run)
        if not alive:
            return
        time.sleep(0.1)


def _final_loss(run: Path) -> float:
    return select(read_log(run / "events.jsonl"), Evaluated)[-1].event.loss


def tabulate(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table by kind of fault and rule."""
    lines = [
        "| fault | rule | runs | faults | restarts | updates done again | median pause | longest pause | failed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    key = lambda outcome: (outcome.scenario.name, outcome.scenario.rule)  # noqa: E731
    for (fault, rule), group in itertools.groupby(sorted(outcomes, key=key), key):
        found = list(group)
        pauses = [pause for one in found for pause in one.pauses_s]
        shown = f"{median(pauses):.2f} s | {max(pauses):.2f} s" if pauses else " | "
        sums = (sum(getattr(one, name) for one in found) for name in ("num_struck", "num_restarts", "num_again"))
        counts = (len(found), *sums)
        failed = sum(bool(one.problems) for one in found)
        lines.append(f"| {fault} | {rule} | {' | '.join(map(str, counts))} | {shown} | {failed} |")
    return "\n".join(lines)


def run_campaign(seed: int, num_runs: int, directory: Path, names: Sequence[str] = ()) -> list[Outcome]:
    """Execute scenarios, and return what came of them; a folder that failed stays."""
    straight: dict[tuple[str, int], Path] = {}
    outcomes = []
    drawn = (draw(seed, number) for number in itertools.count())
    chosen = itertools.islice((one for one in drawn if not names or one.name in names), num_runs)
    for number, scenario in enumerate(chosen):
        key = scenario.rule, scenario.num_workers
        if key not in straight:
            straight[key] = directory / f"straight-{len(straight)}"
            calm = execute(Scenario("none", *key), straight[key])
            if calm.problems:
                raise RuntimeError(f"the undisturbed run must end well, but {calm.problems}")
        folder = directory / f"run-{number}"
        outcome = execute(scenario, folder)
        judge(outcome, folder, straight[key])
        outcomes.append(outcome)
        print(json.dumps({"number": number, **asdict(outcome)}), flush=True)
    return outcomes


def main() -> int:
    """Run a campaign, print its table, and return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="Names of faults.")
    parser.add_argument("--directory", type=Path, help="Folder for the runs; a temporary one by default.")
    parser.add_argument("--markdown", type=Path, help="New file for the table.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = run_campaign(options.seed, options.num_runs, options.directory or Path(temporary), options.only)
    table = tabulate(outcomes)
    print(table)
    if options.markdown is not None:
        with options.markdown.open("x") as file:
            file.write(table + "\n")
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
