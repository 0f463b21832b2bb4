"""A slow worker among real processes, from the command line to the report."""

import pytest

from paceline.monitor.events import SharesChanged, SlowWorker
from paceline.monitor.reader import read_log, select

RECIPE = """
from paceline.recipes import transformer_lm
from paceline.testing.slow import Scripted


def run():
    base = transformer_lm.run()
    return base.model_copy(update={"loss": Scripted(objective=base.loss, sample_s=(0.004, 0.016))})
"""

SETTINGS = {
    "shares": "measured",
    "speed_interval": 3,
    "num_steps": 14,
    "global_batch": 20,
    "evaluate_interval": 0,
    "evaluate_samples": 4,
    "loss.objective.sample_tokens": 0,
    "model.width": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 16,
    "data.max_bytes": 100_000,
    "num_threads": 1,
}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_slow_process_gets_less_and_is_named_in_the_report(tmp_path, run_here):
    recipe, run = tmp_path / "slow.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    overrides = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    shown = run_here("train", f"{recipe}:run", "--workers", "2", "--out", str(run), *overrides)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    records = read_log(run / "events.jsonl")
    changes, slow = select(records, SharesChanged), select(records, SlowWorker)
    # 16 and 4 by the script alone, nearer to each other where computing in earnest takes longer.
    assert changes[0].event.shares[0] > changes[0].event.shares[1]
    assert [one.event.slow_rank for one in slow] == [1]
    sentence = "rank 1 computes"
    assert sentence in shown.stdout
    assert sentence in run_here("report", str(run)).stdout
    assert sentence in (run / "report.html").read_text()
