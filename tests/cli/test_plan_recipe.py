"""What training says of a plan's candidates, before they are shown."""

import pytest

from paceline.cli.plan_recipe import _rehearse
from paceline.cli.prepare import make_run
from paceline.planner.candidate import Candidate, Division

SMALL = {
    "model.width": "16",
    "model.num_layers": "4",
    "model.num_heads": "2",
    "data.sequence_length": "8",
    "data.max_bytes": "20000",
    "num_steps": "2",
    "loss.sample_tokens": "0",
    "schedule.warmup_steps": "1",
}


@pytest.mark.parametrize(
    ("recompute", "refusal"),
    [pytest.param("full", "", marks=pytest.mark.slow), ("selective", "a rehearsal of its ranks raises ")],
)
def test_a_candidate_whose_ranks_crash_in_a_rehearsal_is_refused_and_torch_prints_nothing(recompute, refusal, capfd):
    run = make_run("transformer_lm", list(SMALL.items()))
    division = Division(pipeline=4, order="zero_bubble")
    candidate = Candidate(0, division, 4, recompute, "fp32")
    found = _rehearse(run, candidate, run.open_data())
    assert found.startswith(refusal)
    assert bool(found) == bool(refusal)
    assert "\n" not in found
    assert "schedule" not in capfd.readouterr().err.lower()
