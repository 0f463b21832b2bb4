"""Trained models in stores, by their URL wherever a path is taken."""

import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.find import find_checkpoint
from paceline.errors import CheckpointError, SettingsError
from paceline.exporting import evaluate_run, export, load_model
from paceline.testing.object_server import ObjectServer
from plain_functions import make_points_run, train_here

sys.path.append(str(Path(__file__).parents[1] / "data"))
from store_fixtures import use_endpoint  # beside the tests of stores

RECIPE = "plain_functions:make_run"
STILL = {"name": "sgd", "learning_rate": 1e-30}
"""An optimizer that moves nothing."""


@pytest.fixture(params=["file", "memory", "s3"])
def root(request, tmp_path, monkeypatch):
    """Yield the URL of a store, and keep what is brought from there in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ObjectServer({}).running() as server:
        use_endpoint(monkeypatch, server.endpoint)
        places = {"file": f"file://{tmp_path}/far", "memory": f"memory://{tmp_path.name}", "s3": "s3://bucket/far"}
        yield places[request.param]


@pytest.fixture
def trained(root, tmp_path):
    run = make_points_run(num_steps=4, checkpoint_interval=2, checkpoint_url=f"{root}/run")
    train_here(run, tmp_path / "run", 1, recipe=RECIPE)
    return tmp_path / "run"


def is_same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_model_is_taken_from_the_copies_of_a_run(root, trained, run_here):
    here, far = load_model(trained), load_model(f"{root}/run")
    assert is_same(here, far)
    assert not is_same(here, load_model(f"{root}/run", "2"))
    assert is_same(load_model(f"{root}/run", "2"), load_model(f"{root}/run/step-00000002"))
    assert evaluate_run(f"{root}/run").evaluation.loss == evaluate_run(trained).evaluation.loss
    printed = run_here("evaluate", f"{root}/run")
    assert "step 4" in printed.stdout
    with pytest.raises(CheckpointError, match="3"):
        find_checkpoint(f"{root}/run", "3")
    with pytest.raises(CheckpointError, match="none"):
        find_checkpoint(f"{root}/nothing", "3")


def test_a_model_is_exported_to_an_url_and_another_run_begins_with_it(root, trained, tmp_path, run_here):
    run_here("export", f"{root}/run", "--to", f"{root}/model.safetensors")
    with pytest.raises(SettingsError, match="exist"):
        export(trained, f"{root}/model.safetensors")
    run = make_points_run(num_steps=1, initial=f"{root}/model.safetensors", optimizer=STILL)
    train_here(run, tmp_path / "next", 1, recipe=RECIPE)
    assert is_same(load_model(tmp_path / "next"), load_model(trained))
    run = make_points_run(num_steps=1, initial=f"{root}/run", optimizer=STILL)
    train_here(run, tmp_path / "last", 1, recipe=RECIPE)
    assert is_same(load_model(tmp_path / "last"), load_model(trained))
    with pytest.raises((CheckpointError, SettingsError), match=r"other\.safetensors"):
        make_points_run(initial=f"{root}/other.safetensors").initial.check(load_model(trained))


def test_a_copy_that_is_damaged_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ObjectServer({}).running() as server:
        use_endpoint(monkeypatch, server.endpoint)
        run = make_points_run(num_steps=4, checkpoint_interval=2, checkpoint_url="s3://bucket/run")
        train_here(run, tmp_path / "run", 1, recipe=RECIPE)
        newest = find_checkpoint(tmp_path / "run").path.name
        server.objects.pop(f"bucket/run/{newest}/state.json")
        assert find_checkpoint("s3://bucket/run").step == 2
