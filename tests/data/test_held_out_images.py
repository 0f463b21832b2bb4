"""Held-out images have the size of the parts that a model is trained on, from their centre."""

import numpy as np
import pytest
import torch

from paceline.data import MapSource
from paceline.data.augment.held_out import open_held_out
from paceline.data.images import Images
from paceline.errors import DataError
from paceline.optim import SGD
from paceline.recipes.resnet import ResNet
from paceline.training import Run
from plain_functions import losses_of, train_here


def read(samples, *augment):
    return open_held_out(MapSource(samples), augment).read(np.arange(len(samples)))


def test_a_crop_of_the_images_own_size_changes_nothing_held_out():
    source = MapSource([torch.zeros(3, 8, 8)])
    assert open_held_out(source, ["flip", "crop", "random_resized_crop", "colour"]) is source


def test_a_crop_takes_the_centre():
    image = torch.arange(64.0).reshape(1, 8, 8)
    found, _ = read([(image, 0)], "flip", {"name": "crop", "size": 4, "padding": 0})
    assert torch.equal(found[0], image[:, 2:6, 2:6])


def test_images_of_other_sizes_than_one_another_make_one_batch():
    images = [(torch.full((3, height, width), 5.0), 1) for height, width in ((20, 40), (64, 17))]
    found, labels = read(images, {"name": "random_resized_crop", "size": 16})
    assert found.shape == (2, 3, 16, 16)
    torch.testing.assert_close(found, torch.full((2, 3, 16, 16), 5.0))
    assert labels.tolist() == [1, 1]


def test_the_shorter_side_is_resized_before_the_centre_is_cut():
    ramp = torch.linspace(0, 1, 56).repeat(1, 28, 1)
    found = read([ramp], {"name": "random_resized_crop", "size": 14})
    assert found[0].mean().item() == pytest.approx(0.5, abs=1e-5), "the middle of the ramp"
    assert found[0, 0, 0, -1].item() - found[0, 0, 0, 0].item() == pytest.approx(13 / 32 * 56 / 55, abs=0.01)


def test_an_image_smaller_than_its_crop_is_refused():
    with pytest.raises(DataError, match="an image must be at least as large as its crop with padding 0, 9 pixels"):
        read([torch.zeros(3, 8, 20)], {"name": "crop", "size": 9, "padding": 0})


def test_a_run_evaluates_on_centres(tmp_path):
    run = Run(
        model=ResNet(depth=18, width=4),
        data=Images(size=12),
        loss="classification",
        optimizer=SGD(learning_rate=0.05),
        global_batch=24,
        num_steps=2,
        evaluate_samples=20,
        augment=[{"name": "crop", "size": 8, "padding": 0}],
    )
    images, _ = run.open_data().held_out.read(np.arange(3))
    whole, _ = Images(size=12).open().held_out.read(np.arange(3))
    assert torch.equal(images, whole[..., 2:10, 2:10])
    train_here(run, tmp_path / "run")
    assert len(losses_of(tmp_path / "run")) == 2
