"""A vision transformer and a ResNet of timm, unchanged, on the handwritten digits of scikit-learn.

    paceline train examples/timm_images.py:vit
    paceline train examples/timm_images.py:resnet

Weights are random and nothing is downloaded. The ResNet's BatchNorm takes its statistics over all workers, so that it
learns what it would in one process.
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

import paceline

SIZE = 32


def build_vit(depth: int = 4, width: int = 64) -> nn.Module:
    """Return a small vision transformer."""
    sizes = {"img_size": SIZE, "patch_size": 8, "depth": depth, "embed_dim": width, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **sizes)


def build_resnet(name: str = "resnet18") -> nn.Module:
    """Return a ResNet, whichever timm knows."""
    return timm.create_model(name, in_chans=1, num_classes=10)


def make_datasets() -> list[Dataset[tuple[torch.Tensor, ...]]]:
    """Return digits to train on, and a tenth held out."""
    digits = load_digits()
    images_NHW = torch.tensor(digits.images, dtype=torch.float32) / 16
    images_NCHW = nn.functional.interpolate(images_NHW[:, None], (SIZE, SIZE))
    return list(random_split(TensorDataset(images_NCHW, torch.tensor(digits.target)), [0.9, 0.1]))


def vit() -> paceline.Run:
    """A vision transformer."""
    return paceline.Run(
        model=build_vit,
        data=make_datasets,
        loss="classification",
        optimizer={"name": "adamw", "learning_rate": 1e-3},
        global_batch=64,
        num_epochs=3,
    )


def resnet() -> paceline.Run:
    """A ResNet, with BatchNorm over all workers."""
    return vit().model_copy(update={"model": paceline.Model.model_validate(build_resnet), "batch_norm": "global"})
