"""The plan for a short loan of a GPU: tests and benchmarks in order of worth, resumable, within 25 minutes.

    python tools/gpu_hour.py             # runs what has not been done at this commit
    python tools/gpu_hour.py --rehearse  # needs no GPU: every command parses, and every test file imports

Rows of benchmarks go to docs/benchmarks/gpu-NAME.json, and what became of each stage to docs/benchmarks/gpu-plan.json,
after each stage: who is cut off loses one stage, and the same command goes on. A stage that has ended at this commit is
not run again, unless it failed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path("docs/benchmarks")
BUDGET_S = 25 * 60
SHORTEST_S = 20
"""Time below which no stage begins."""
TAIL = 4000
"""Characters of a failed stage's output that are kept."""


@dataclass(frozen=True)
class Stage:
    """One command of the plan."""

    name: str
    arguments: tuple[str, ...]
    """Arguments after `python -m pytest -q` or `python -m paceline bench`."""
    limit_s: int
    num_gpus: int = 1
    """Least number of GPUs that it needs."""

    @property
    def is_test(self) -> bool:
        """Whether it is a stage of tests."""
        return self.name.startswith("test")

    @property
    def rows(self) -> Path:
        """File of a benchmark's rows."""
        return RESULTS / f"gpu-{self.name}.json"

    def command(self) -> list[str]:
        """Return the whole command."""
        if self.is_test:
            return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *self.arguments]
        return [sys.executable, "-m", "paceline", "bench", *self.arguments, "--json", str(self.rows)]


def _lm(width: int, num_layers: int, num_heads: int, batch: int) -> tuple[str, ...]:
    model = ("--model.width", str(width), "--model.num_layers", str(num_layers), "--model.num_heads", str(num_heads))
    return ("throughput", *model, "--sequence_length", "1024", "--batch", str(batch), "--workers.num_workers", "1")


ALONE = '["none", "bf16", "micro-batches", "recompute selective", "recompute full", "offload activations", '
ALONE += '"offload optimizer", "offload both", "sgd", "adafactor", "adamw_8bit"]'
"""Techniques of `bench memory` for one worker."""

PLAN = (
    Stage("test-cuda", ("tests/gpu/test_cuda.py",), 180),
    Stage("test-codecs", ("tests/gpu/test_cuda_dense_kernels.py", "tests/gpu/test_cuda_top_k.py"), 240),
    Stage("test-energy", ("tests/gpu/test_cuda_energy.py",), 60),
    Stage("test-rules", ("tests/sync/test_rules_on_a_device.py",), 180),
    Stage("throughput-small", _lm(384, 7, 6, 32), 150),
    Stage("codecs", ("codecs", "--device", "cuda"), 90),
    Stage("throughput-124m", _lm(768, 12, 12, 16), 200),
    Stage("memory", ("memory", "--workers.num_workers", "1", "--techniques", ALONE), 200),
    Stage("throughput-350m", _lm(1024, 24, 16, 8), 200),
    Stage("test-benchmarks", ("tests/benchmarks/test_benchmarks.py",), 60),
    Stage("exposed", ("exposed", "--sides", '["none", "bf16", "int8", "one_bit", "top_k"]'), 200, num_gpus=2),
    Stage("throughput-ddp", (*_lm(768, 12, 12, 16)[:-1], "2"), 200, num_gpus=2),
)


def main() -> int:
    """Run or rehearse the plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="check every command without running it")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all stages")
    chosen = parser.parse_args()
    if chosen.rehearse:
        problems = rehearse(PLAN)
        print("\n".join(problems) or f"all {len(PLAN)} stages are ready to run")
        return 1 if problems else 0
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        print(
            "make gpu needs a CUDA device, and here is none: nothing was run. `make gpu-rehearsal` checks the plan "
            "without one."
        )
        return 1
    return run(PLAN, num_gpus, torch.cuda.get_device_name(), chosen.budget)


def rehearse(plan: Sequence[Stage]) -> list[str]:
    """Return what is wrong with the commands of a plan, in words."""
    tests = [name for stage in plan if stage.is_test for name in stage.arguments]
    code, collected = collect(tests)
    problems = [f"pytest does not collect: {collected[-TAIL:]}"] if code else []
    problems += [f"no test of {name} is marked gpu" for name in tests if f"{name}::" not in collected]
    return problems + [problem for stage in plan if not stage.is_test for problem in _find_wrong(stage)]


def collect(tests: Sequence[str]) -> tuple[int, str]:
    """Import test files, and return pytest's exit code and its list of those marked gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--collect-only", *tests]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return ended.returncode, ended.stdout


def _find_wrong(stage: Stage) -> list[str]:
    """Return what is wrong with the settings of a benchmark."""
    from paceline.benchmarks import find_benchmark
    from paceline.cli.overrides import apply_overrides, parse_pairs
    from paceline.errors import PacelineError

    name, *given = stage.arguments
    try:
        apply_overrides(find_benchmark(name)(), list(parse_pairs(given)))
    except PacelineError as error:
        return [f"stage {stage.name}: {error}"]
    return []


def run(plan: Sequence[Stage], num_gpus: int, device: str, budget_s: float) -> int:
    """Run what is left of a plan; return how many stages failed."""
    began_s = time.monotonic()
    commit = _git("rev-parse", "--short", "HEAD")
    state = _load(ROOT / RESULTS / "gpu-plan.json", commit, device)
    for stage in plan:
        if state["stages"].get(stage.name, {}).get("outcome") == "done":
            continue
        left_s = budget_s - (time.monotonic() - began_s)
        if stage.num_gpus > num_gpus:
            outcome: dict[str, Any] = {"outcome": "left out", "why": f"needs {stage.num_gpus} GPUs, here: {num_gpus}"}
        elif left_s < SHORTEST_S:
            print(f"{budget_s:g} s are over before {stage.name}; run the same command again to go on from here")
            break
        else:
            outcome = run_stage(stage, min(stage.limit_s, left_s))
        state["stages"][stage.name] = outcome
        (ROOT / RESULTS / "gpu-plan.json").write_text(json.dumps(state, indent=2) + "\n")
        print(f"{stage.name}: {outcome['outcome']} {outcome.get('why', '')}".rstrip(), flush=True)
    return sum(outcome["outcome"] == "failed" for outcome in state["stages"].values())


def run_stage(stage: Stage, limit_s: float) -> dict[str, Any]:
    """Run one stage, and return what became of it."""
    (ROOT / stage.rows).unlink(missing_ok=True)
    began_s = time.monotonic()
    try:
        ended = subprocess.run(
            stage.command(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        output, why = ended.stdout, "" if ended.returncode == 0 else f"exit code {ended.returncode}"
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        why = f"did not end within {limit_s:.0f} s"
    took = {"duration_s": round(time.monotonic() - began_s, 1), "summary": output.strip().splitlines()[-1:]}
    return {"outcome": "failed", "why": why, "output": output[-TAIL:]} | took if why else {"outcome": "done"} | took


def _load(path: Path, commit: str, device: str) -> dict[str, Any]:
    """Return the state of the plan: that of an earlier run, if it was of this commit and device."""
    fresh: dict[str, Any] = {"commit": commit, "device": device, "stages": {}}
    state = json.loads(path.read_text()) if path.exists() else fresh
    return state if (state["commit"], state["device"]) == (commit, device) else fresh


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
