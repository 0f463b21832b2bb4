"""Residual networks of 18 to 152 layers for images of any size and number of channels.

He et al. 2016, in the version called 1.5: the 3x3 convolution of a bottleneck strides, not the 1x1 before it.
Goyal et al. 2017 (the last scale of each block starts at 0); Wu and He 2018 (group norm).

Shapes: B batch, C channels, H and W pixels.
"""

from collections.abc import Callable
from typing import ClassVar, Literal, Self, cast

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.parallel.pipeline import PipelineLayer
from paceline.registry import register
from paceline.training.model import Model

SMALLEST_IMAGENET_STEM = 64
"""Height or width in pixels from which the "auto" stem shrinks the image fourfold, as ImageNet's does."""
MOST_GROUPS = 32

Norm = Callable[[int], nn.BatchNorm2d | nn.GroupNorm]


@register("resnet")
class ResNet(Model):
    """Settings of a residual network over images of ``spec.input_shape`` (channels, height, width)."""

    depth: Literal[18, 34, 50, 101, 152] = 18
    """Number of layers: 18 and 34 in pairs of 3x3 convolutions, more in bottlenecks with four times wider ends."""
    width: int = Field(64, ge=1)
    """Channels of the stem and inside the first of four stages; each next stage doubles them. 64 in the paper."""
    norm: Literal["batch", "group", "frozen_batch"] = "batch"
    """Normalisation. "batch": over a worker's own samples, or over those of all workers with ``batch_norm global``.
    "group": within a sample, up to 32 groups of 2 channels or more. "frozen_batch": running statistics that never
    change; scale and shift are trained."""
    stem: Literal["auto", "small", "imagenet"] = "auto"
    """Stem of the network. "imagenet": 7x7 convolution and pooling, each of stride 2. "small": one 3x3 convolution of
    stride 1. "auto": "small" for images with a side below 64 pixels, else "imagenet"."""
    zero_init_residual: bool = True
    """Whether every block starts as the identity: with 0 as its last norm's scale."""

    def build(self, spec: Spec) -> "ResidualNetwork":
        """Return a new network.

        Raises:
            SettingsError: The data's samples are not images.
        """
        if len(spec.input_shape) != 3:
            raise SettingsError(
                "samples for model resnet must have 3 dims (channels, height, width), but got the shape "
                f"{spec.input_shape}; choose data of images or another model"
            )
        num_channels, height, width = spec.input_shape
        is_small = self.stem == "small" or (self.stem == "auto" and min(height, width) < SMALLEST_IMAGENET_STEM)
        return ResidualNetwork(self, num_channels, spec.num_classes, small_stem=is_small)


class ResidualNetwork(nn.Module):
    """Images to the logits of their classes."""

    def __init__(self, settings: ResNet, num_channels: int, num_classes: int, small_stem: bool):
        super().__init__()
        norm = NORMS[settings.norm]
        block, num_blocks = BLOCKS[settings.depth]
        self.stem = _make_stem(num_channels, settings.width, small_stem, norm)
        self.stages = nn.Sequential()
        channels_in = settings.width
        for i, count in enumerate(num_blocks):
            blocks = nn.Sequential()
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(block(channels_in, settings.width * 2**i, stride, norm))
                channels_in = settings.width * 2**i * block.expansion
            self.stages.append(blocks)
        self.head = nn.Linear(channels_in, num_classes)
        self._initialise(settings.zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, _ResidualBlock) and zero_init_residual:
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        return self._classify(self.stages(self._begin(images_BCHW)))

    def pipeline_layers(self) -> list[PipelineLayer]:
        """Return the layers that a pipeline can split the network into: stem, blocks, head."""
        blocks = [
            f"stages.{i}.{j}" for i, stage in enumerate(self.stages) for j in range(len(cast(nn.Sequential, stage)))
        ]
        return [
            PipelineLayer("stem", ("stem",), self._begin),
            *(PipelineLayer.child(self, name) for name in blocks),
            PipelineLayer("head", ("head",), self._classify),
        ]

    def _begin(self, images_BCHW: Tensor) -> Tensor:
        # Never channels_last: torch 2.13's backward then corrupts the heap on two CPU threads (see docs/LOG.md).
        x_BCHW: Tensor = self.stem(images_BCHW.contiguous())
        return x_BCHW

    def _classify(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(x_BCHW.mean(dim=(2, 3)))
        return logits


class _ResidualBlock(nn.Module):
    """A shortcut plus a branch of convolutions."""

    expansion: ClassVar[int]
    """Output channels of the block, as a multiple of those inside."""

    def __init__(self, branch: nn.Sequential, last_norm: nn.BatchNorm2d | nn.GroupNorm, shortcut: nn.Module):
        super().__init__()
        self.branch = branch
        self.last_norm = last_norm
        self.shortcut = shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the sum after ReLU."""
        return F.relu(self.shortcut(x_BCHW) + self.last_norm(self.branch(x_BCHW)), inplace=True)


class BasicBlock(_ResidualBlock):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm):
        branch = nn.Sequential(
            _conv(channels_in, channels, 3, stride),
            norm(channels),
            nn.ReLU(inplace=True),
            _conv(channels, channels, 3, 1),
        )
        super().__init__(branch, norm(channels), _make_shortcut(channels_in, channels, stride, norm))


class Bottleneck(_ResidualBlock):
    """A 3x3 convolution between two of 1x1, beside a shortcut."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm):
        channels_out = channels * self.expansion
        branch = nn.Sequential(
            _conv(channels_in, channels, 1, 1),
            norm(channels),
            nn.ReLU(inplace=True),
            _conv(channels, channels, 3, stride),
            norm(channels),
            nn.ReLU(inplace=True),
            _conv(channels, channels_out, 1, 1),
        )
        super().__init__(branch, norm(channels_out), _make_shortcut(channels_in, channels_out, stride, norm))


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch norm by running statistics that training never changes; scale and shift are trained."""

    def __init__(self, num_features: int):
        super().__init__(num_features)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever `mode` is."""
        return super().train(False)


def _group_norm(channels: int) -> nn.GroupNorm:
    # A group of one channel would be 0 wherever the image has shrunk to one pixel.
    most = min(MOST_GROUPS, channels // 2)
    return nn.GroupNorm(next((n for n in range(most, 0, -1) if channels % n == 0), 1), channels)


NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm, "frozen_batch": FrozenBatchNorm}
BLOCKS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def _conv(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)


def _make_stem(num_channels: int, width: int, small: bool, norm: Norm) -> nn.Sequential:
    conv = _conv(num_channels, width, 3, 1) if small else _conv(num_channels, width, 7, 2)
    stem = nn.Sequential(conv, norm(width), nn.ReLU(inplace=True))
    return stem if small else stem.append(nn.MaxPool2d(3, stride=2, padding=1))


def _make_shortcut(channels_in: int, channels_out: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(_conv(channels_in, channels_out, 1, stride), norm(channels_out))
