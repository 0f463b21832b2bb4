"""`paceline trace` and what `paceline report` says of communication, as a person would call them."""

import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.report import report
from paceline.cli.trace import trace
from paceline.errors import SettingsError
from paceline.monitor import BucketExchanged, EventLog, StepTimed

app = typer.Typer()
app.command()(trace)
app.command()(report)


def log_step(run: Path, rank: int) -> None:
    with EventLog(run / "events.jsonl", run="mine", rank=rank) as log:
        log.write(
            BucketExchanged(
                bucket=0,
                first_parameter="weight",
                num_parameters=1,
                num_bytes=4000,
                wire_bytes=2000,
                ready_s=0.02,
                began_s=0.02,
                ended_s=0.06,
                landed_s=0.06,
                waited_s=0.01,
            ),
            step=1,
        )
        log.write(
            StepTimed(
                began_unix_s=time.time(),
                forward_ended_s=0.01,
                backward_began_s=0.01,
                backward_ended_s=0.05,
                optimizer_began_s=0.06,
                optimizer_ended_s=0.08,
                duration_s=0.08,
                waited_s=0.01,
            ),
            step=1,
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank in (0, 1):
        log_step(tmp_path, rank)
    return tmp_path


def test_a_trace_goes_where_it_is_asked_to_go(run: Path) -> None:
    out = run / "elsewhere.json"
    result = CliRunner().invoke(app, ["trace", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 sampled steps" in result.output
    assert {event["pid"] for event in json.loads(out.read_text())["traceEvents"]} == {0, 1}


def test_without_out_it_goes_beside_the_log_and_only_once(run: Path) -> None:
    assert CliRunner().invoke(app, ["trace", str(run)]).exit_code == 0
    first = (run / "trace.json").read_bytes()
    result = CliRunner().invoke(app, ["trace", str(run)])
    assert isinstance(result.exception, SettingsError)
    assert (run / "trace.json").read_bytes() == first


def test_a_report_says_what_was_hidden(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "A typical step of rank 0 takes 80 ms: 70 ms computing, and 10 ms (12%) waiting" in said
    assert "The exchange takes 40 ms, of which 30 ms (75%) are hidden behind computing." in said
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
