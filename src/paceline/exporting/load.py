"""Loading the trained model of a run into this process."""

from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint import Checkpoint
from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.weights import Weights, load_weights
from paceline.data.base import Spec
from paceline.errors import CheckpointError, SettingsError
from paceline.launch.worker import load_run
from paceline.training.model import ModelSize, resize
from paceline.training.run import Run
from paceline.training.run_file import RunFile


def load_model(run: str | Path, checkpoint: str = "newest", *, averaged: bool | None = None) -> nn.Module:
    """Return the trained model of a run, built as the run builds it, on the CPU, in evaluation mode.

    For any rule and layout it is the whole model, with the consensus of all workers. Neither workers nor the run's data
    are needed.

    Args:
        run: Directory of the run, or of one of its checkpoints; or the run's `checkpoint_url`.
        checkpoint: ``newest`` for the newest valid one, ``best`` for the one that `keep_best` kept, or the step after
            which it was saved.
        averaged: Whether to load the moving averages of parameters; by default if the run has them, since it evaluates
            those.

    Raises:
        CheckpointError: There is no such checkpoint, or it does not fit the model that the run builds by now.
        SettingsError: The checkpoint is of your own loop, which alone knows the model; or it has no averages.
    """
    found = find_checkpoint(run, checkpoint)
    return load_checkpoint_model(found, Weights.of_checkpoint(found, averaged=averaged))


def load_checkpoint_model(checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    """Return the model in a checkpoint of a run, with its `weights`; see `load_model`."""
    module = _build(checkpoint)
    load_weights(module, weights)
    return module.eval()


def load_checkpoint_run(checkpoint: Checkpoint) -> Run:
    """Return the run that a checkpoint is of, as it was when it was saved.

    Raises:
        SettingsError: The checkpoint is of your own loop, or the recipe is gone.
    """
    document = checkpoint.read_document()
    if "run" not in document:
        raise SettingsError(
            f"a checkpoint must be of a run for its model to be built, but {checkpoint.path} is of a loop of your own; "
            "export a file of safetensors and load it into the model that you build, or call "
            "paceline.export(replica, ...) there"
        )
    return load_run(RunFile(recipe=document["recipe"], num_workers=1, run=document["run"]))


def _build(checkpoint: Checkpoint) -> nn.Module:
    document = checkpoint.read_document()
    if "run" in document and "spec" not in document:
        raise CheckpointError(
            f"a checkpoint must say what its model is built for, but {checkpoint.path} is of an earlier version of "
            "Paceline; export a file of safetensors and load it into the model that you build"
        )
    run = load_checkpoint_run(checkpoint)
    model = resize(run.model, ModelSize(document["num_layers"], document.get("width")))
    spec = Spec(document["spec"]["num_classes"], tuple(document["spec"]["input_shape"]))
    with torch.random.fork_rng(devices=[]):  # the random weights are replaced
        return model.build(spec)
