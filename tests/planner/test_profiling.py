"""A model that is measured here, alone and by the command."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.prepare import make_run
from paceline.planner import measuring, trace_workload
from paceline.planner.profiling import list_shapes, make_profile
from paceline.simulator.training.profile import Profile

SETTINGS = [("model.width", "32"), ("model.num_layers", "2"), ("data.sequence_length", "32")]
OPTIONS = [word for name, value in SETTINGS for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def traced():
    run = make_run("transformer_lm", SETTINGS)
    return run, trace_workload(run, run.open_data(), on_cpu=True, is_cached=False)


def test_a_worker_measures_every_part(traced, monkeypatch):
    monkeypatch.setattr(measuring, "_MODEL_S", 0.0)
    monkeypatch.setattr(measuring, "_LEAST_S", 0.001)
    monkeypatch.setattr(measuring, "_SQUARES", (16,))
    run, shape = traced
    shapes = list_shapes(shape, 4)
    # Gate and expansion forward, all three maps backward: the most flops.
    assert shapes[0] == (4 * 32, 88, 32)
    measured = measuring.measure_rank(run, 4, 1, shapes)
    json.dumps(measured)
    profile = make_profile({0: measured}, shape, 1)
    assert [(one.rows, one.columns, one.depth) for one in profile.products] == [(16, 16, 16), *shapes]
    model = profile.model
    assert model.samples == (4, 8)
    assert model.digest == shape.digest
    assert model.num_bytes == 4 * shape.num_parameters
    assert min(*model.forward_s, *model.backward_s, model.optimizer_s, profile.launch_s) > 0
    assert [block.name for block in model.blocks] == ["layers.0", "layers.1"]
    for block in model.blocks:
        assert block.num_bytes == 4 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 88)
        assert 0 < block.forward_s < model.forward_s[1] * 10
        assert block.backward_s > 0
    assert profile.links == profile.exchanges == ()
    assert set(profile.predict(4, 1)) == {"forward", "backward", "optimizer"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_command_measures_workers_and_what_is_between_them_and_predictions_take_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, curves = tmp_path / "profile.json", tmp_path / "curves.json"
    result = CliRunner().invoke(app, ["profile", "transformer_lm", "--out", str(out), *OPTIONS])
    assert result.exit_code == 0, result.output + str(result.exception)
    profile = Profile.model_validate_json(out.read_text())
    assert profile.num_workers == 2
    assert len(profile.exchanges) == 8
    assert [link.ranks for link in profile.links] == [(0, 1)]
    command = ["simulate", "training", "transformer_lm", "--profile", str(out), "--ranks", "1,2,4"]
    result = CliRunner().invoke(app, [*command, "--json", str(curves), *OPTIONS])
    assert result.exit_code == 0, result.output + str(result.exception)
    points = json.loads(curves.read_text())["points"]
    assert {point["basis"] for point in points} == {"profile"}
    (two,) = (point for point in points if point["way"] == "strong" and point["num_ranks"] == 2)
    assert two["step_s"][0] == pytest.approx(sum(profile.predict(4, 2).values()))
    wider = CliRunner().invoke(app, [*command, "--model.width", "64"])
    assert "--profile must be of the run" in str(wider.exception)
    document = json.loads(out.read_text())
    document["machine"]["num_cores"] = 1234
    out.write_text(json.dumps(document))
    elsewhere = CliRunner().invoke(app, [*command, *OPTIONS])
    assert "--profile must be of this machine" in str(elsewhere.exception)
