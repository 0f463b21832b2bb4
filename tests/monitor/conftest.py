from pathlib import Path

import pytest
from story import tell_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A directory with the log of a run of 400 steps that lost a worker at 250 and went on from 200."""
    tell_run(tmp_path / "events.jsonl", total_steps=400)
    return tmp_path
