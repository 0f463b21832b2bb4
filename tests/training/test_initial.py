"""Runs that start from weights that were trained before."""

import shutil

import pytest
import torch

from paceline.checkpoint.weights import open_weights
from paceline.cli.overrides import apply_overrides
from paceline.cli.prepare import prepare_new, prepare_resumed
from paceline.errors import CheckpointError, SettingsError
from paceline.exporting import export
from paceline.monitor.events import Warned
from paceline.optim import SGD
from paceline.training import Run
from paceline.training.initial import InitialWeights
from paceline.training.run_file import RunFile
from plain_functions import build_deeper, build_linear, losses_of, make_points_run, parameters_of, read, train_here

RECIPE = "plain_functions:make_points_run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, with what was exported of it."""
    folder = tmp_path_factory.mktemp("trained")
    train_here(make_points_run(num_steps=3), folder / "run", recipe=RECIPE)
    export(folder / "run", folder / "model.safetensors")
    torch.save({f"module.{name}": t for name, t in build_linear().state_dict().items()}, folder / "foreign.pt")
    return folder


def make_still(**changes):
    """A run whose parameters stay as they are."""
    return make_points_run(**({"optimizer": SGD(learning_rate=1e-30), "num_steps": 1} | changes))


@pytest.mark.parametrize("source", ["model.safetensors", "run", "run/checkpoints"])
@pytest.mark.parametrize("sync", ["every_step", "diloco"])
def test_a_run_starts_from_weights(trained, tmp_path, source, sync):
    expected = parameters_of(trained / "run")
    train_here(make_still(initial=trained / source, sync=sync, seed=5), tmp_path, 2)
    found = parameters_of(tmp_path)
    for name in build_linear().state_dict():
        # DiLoCo's outer step rounds.
        assert torch.allclose(found[f"model/{name}"], expected[f"model/{name}"], rtol=1e-12, atol=1e-15), name


def test_a_run_that_goes_on_does_not_need_them(trained, tmp_path):
    """Nor is it set back to them."""
    shutil.copytree(trained, tmp_path / "copy")
    run = make_points_run(initial=str(tmp_path / "copy" / "model.safetensors"), num_steps=4)
    train_here(run, tmp_path / "straight")
    train_here(run.model_copy(update={"num_steps": 2}), tmp_path / "resumed")
    shutil.rmtree(tmp_path / "copy")
    train_here(Run.model_validate(run.model_dump(mode="json")), tmp_path / "resumed")
    assert losses_of(tmp_path / "resumed")[:2] == losses_of(tmp_path / "straight")[:2]
    assert not torch.equal(
        parameters_of(tmp_path / "resumed")["model/0.weight"], parameters_of(trained / "run")["model/0.weight"]
    )


def test_weights_that_do_not_fit_are_refused_before_anything_starts(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained)
    options = [("model.arguments.width", "7"), ("initial", "model.safetensors")]
    with pytest.raises(CheckpointError, match=r"of another shape: 0\.weight \(5, 4\) instead of \(7, 4\).*"):
        prepare_new(RECIPE, 1, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match=r"none\.safetensors must be readable, but: No such file"):
        prepare_new(RECIPE, 1, tmp_path / "new", [("initial", "none.safetensors")])


def test_what_does_not_fit_may_be_left_new(trained, tmp_path):
    """With a warning in the log."""
    initial = InitialWeights(path=str(trained / "run"), strict=False)
    run = make_still(model=build_deeper, initial=initial)
    train_here(run, tmp_path, 2)
    [message] = [record.event.message for record in read(tmp_path, Warned) if "initial" in record.event.message]
    assert message == "initial weights do not fit the model in all, the rest is new; missing: 3.weight, 3.bias"
    expected = open_weights(trained / "run")
    assert torch.allclose(parameters_of(tmp_path)["model/0.weight"], expected.read("0.weight"), rtol=1e-12)


def test_a_state_dict_of_ddp_is_taken_and_told(trained, tmp_path):
    initial = InitialWeights(path=str(trained / "foreign.pt"))
    initial.check(build_linear())
    train_here(make_still(initial=initial), tmp_path)
    [message] = [record.event.message for record in read(tmp_path, Warned) if "initial" in record.event.message]
    assert message == "initial weights are taken without the prefix module. of their names"
    expected = torch.load(trained / "foreign.pt")["module.0.weight"]
    assert torch.allclose(parameters_of(tmp_path)["model/0.weight"], expected, rtol=1e-12)


def test_a_run_that_goes_on_refuses_other_weights(trained, tmp_path, monkeypatch):
    """It would not use them. Those that it began with, or none, are no change."""
    run = make_points_run(num_steps=2)
    train_here(run, tmp_path, recipe=RECIPE)
    RunFile(recipe=RECIPE, num_workers=1, run=run.model_dump(mode="json")).save(tmp_path)
    more = [("num_steps", "3")]
    with pytest.raises(SettingsError, match=r"must go on with its own weights, but got --initial .*model\.safetensors"):
        prepare_resumed(tmp_path, None, [*more, ("initial", str(trained / "model.safetensors"))])
    assert prepare_resumed(tmp_path, None, [*more, ("initial", "none")])[1].run["num_steps"] == 3
    shutil.rmtree(tmp_path / "checkpoints")
    changed = prepare_resumed(tmp_path, None, [("initial", str(trained / "model.safetensors"))])[1]
    assert changed.run["initial"]["path"] == str(trained / "model.safetensors"), "nothing is trained yet"


def test_they_are_settings_of_the_command_line(trained, monkeypatch):
    """Whose path is found from anywhere later."""
    monkeypatch.chdir(trained)
    run = apply_overrides(make_points_run(), [("initial.strict", "false"), ("initial", "run")])
    assert run.initial == InitialWeights(path=str(trained / "run"), strict=False)
    assert apply_overrides(run, [("initial", "none")]).initial is None
