"""Curves of a run over ranks: what they must be whatever the numbers are."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.prepare import make_run
from paceline.errors import SettingsError
from paceline.planner import trace_workload
from paceline.planner.scaling import predict_scaling
from paceline.simulator.training.answers import find_posterior
from paceline.topology import Cluster
from paceline.topology.presets import DGXH100

SETTINGS = [("model.width", "64"), ("model.num_layers", "2"), ("data.sequence_length", "64"), ("precision", "bf16")]


@pytest.fixture(scope="module")
def shape():
    run = make_run("transformer_lm", SETTINGS)
    return trace_workload(run, run.open_data(), is_cached=False)


def predict(shape, num_ranks, *overrides):
    run = make_run("transformer_lm", [*SETTINGS, ("global_batch", "64"), *overrides])
    cluster = Cluster.model_validate("dgx_h100")
    return predict_scaling(run, shape, 100, cluster, num_ranks, find_posterior(()))


def test_time_is_that_of_one_rank_over_ranks_and_efficiency(shape):
    scaling = predict(shape, (2, 4, 8, 16, 64))
    assert scaling.num_samples == 6400
    for point in scaling.points:
        assert point.time_s == pytest.approx(scaling.alone_s / point.num_ranks / point.efficiency[0])
        assert point.batch_per_rank * point.num_ranks == point.global_batch
        assert point.efficiency[1] < point.efficiency[0] < point.efficiency[2]
        assert point.step_s[1] < point.step_s[0] < point.step_s[2]
        energy_j, low, high = point.energy_j
        assert low < energy_j < high
        watts = energy_j / point.time_s
        device, host = DGXH100().device, DGXH100().host
        idle = point.num_ranks * device.idle_w + point.num_hosts * host.idle_w
        assert idle < watts < point.num_ranks * device.load_w + point.num_hosts * host.load_w
    weak, strong = ([point for point in scaling.points if point.way == way] for way in ("weak", "strong"))
    assert [point.global_batch for point in weak] == [64, 128, 256, 512, 2048]
    assert {point.global_batch for point in strong} == {64}
    assert weak[0].step_s == strong[0].step_s
    for points in (weak, strong):  # more replicas never gain
        efficiencies = [point.efficiency[0] for point in points]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert strong[-1].efficiency < weak[-1].efficiency
    assert [point.num_hosts for point in weak] == [1, 1, 1, 2, 8]


def test_on_the_fewest_ranks_both_ways_take_the_same_step_where_workers_have_uneven_samples(shape):
    weak, strong = predict(shape, (8,), ("global_batch", "42")).points
    assert (weak.global_batch, strong.global_batch) == (48, 42)  # the others wait for the workers with six
    assert weak.step_s == strong.step_s


def test_one_rank_is_the_measure_of_all(shape):
    scaling = predict(shape, (1,))
    assert [point.efficiency[0] for point in scaling.points] == pytest.approx([1.0, 1.0])
    assert scaling.points[0].efficiency[1:] == pytest.approx((1.0, 1.0), abs=0.1)


def test_other_axes_stay_and_what_has_no_samples_is_left_out(shape):
    scaling = predict(shape, (8, 128, 102_400), ("layout.tensor", "4"), ("layout.pipeline", "2"))
    weak = [point for point in scaling.points if point.way == "weak"]
    assert [point.global_batch for point in weak] == [64, 64 * 16, 64 * 12_800]
    assert weak[0].bound in ("launch", "bubble", "tensor")
    assert "global_batch must be at least" in scaling.refusals["strong", 102_400]
    assert ("strong", 128) not in scaling.refusals


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("sync", "diloco", "every_step"),
        ("sync.codec", "one_bit", "without a codec"),
        ("layout.data", "4", "layout.data"),
    ],
)
def test_what_is_not_priced_is_refused(shape, setting, value, words):
    with pytest.raises(SettingsError, match=words):
        predict(shape, (4, 8), (setting, value))


def test_an_order_without_a_price_is_refused(shape):
    with pytest.raises(SettingsError, match=r"pipeline.order must be .* to be priced, but got layer_wise"):
        predict(shape, (4, 8), ("layout.pipeline", "2"), ("pipeline.order", "layer_wise"))


def test_the_command_prints_both_ways_and_writes_json_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    out, picture = tmp_path / "curves.json", tmp_path / "curves.svg"
    options = [word for name, value in SETTINGS for word in (f"--{name}", value)]
    command = ["simulate", "training", "transformer_lm", "--cluster", "dgx_a100", "--cluster.bandwidth", "25gbit"]
    arguments = [*command, "--ranks", "8:100", "--json", str(out), "--picture", str(picture), "--global_batch", "64"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output + str(result.exception)
    document = json.loads(out.read_text())
    assert [point["num_ranks"] for point in document["points"] if point["way"] == "weak"] == [8, 16, 32, 64, 100]
    assert [each["num_ranks"] for each in document["refused"]] == [100]
    assert "weak scaling" in result.output
    assert "strong scaling leaves out 100 ranks" in result.output
    assert picture.read_text().startswith("<?xml")
    slower = document["points"][-1]["step_s"][0]
    fast = CliRunner().invoke(
        app, ["simulate", "training", "transformer_lm", "--ranks", "64", "--json", str(tmp_path / "f.json"),
              "--global_batch", "64", *options]
    )  # fmt: skip
    assert fast.exit_code == 0, fast.output
    assert json.loads((tmp_path / "f.json").read_text())["points"][-1]["step_s"][0] < slower


def test_a_recipe_goes_with_training_alone():
    result = CliRunner().invoke(app, ["simulate", "all-reduce", "transformer_lm"])
    assert "a recipe must be with training" in str(result.exception)
    result = CliRunner().invoke(app, ["simulate", "ownership", "transformer_lm"])
    assert "a recipe must be with training, but got transformer_lm with ownership" in str(result.exception)
    result = CliRunner().invoke(app, ["simulate", "training"])
    assert "--spec must be given where training has no recipe" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["failures", "--picture", "new.png"], "--picture must be with a collective or a recipe, but got failures"),
        (["training", "--spec", "in.json", "--picture", "new.png"], "but got training without a recipe; leave it out"),
        (["training", "--spec", "in.json", "--cluster", "dgx_h100"], "settings must be with a recipe, but got --clu"),
    ],
)
def test_what_nobody_would_read_is_refused(arguments, message):
    assert message in str(CliRunner().invoke(app, ["simulate", *arguments]).exception)
