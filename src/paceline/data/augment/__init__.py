"""Layer 5: augmentation of samples, the same whoever reads them."""

from paceline.data.augment.base import Augmentation
from paceline.data.augment.colour import Colour
from paceline.data.augment.crop import Crop, RandomResizedCrop
from paceline.data.augment.cutmix import CutMix
from paceline.data.augment.draws import Draws
from paceline.data.augment.erase import Erase
from paceline.data.augment.flip import Flip
from paceline.data.augment.function import FunctionAugmentation
from paceline.data.augment.mixup import Mixup

__all__ = [
    "Augmentation",
    "Colour",
    "Crop",
    "CutMix",
    "Draws",
    "Erase",
    "Flip",
    "FunctionAugmentation",
    "Mixup",
    "RandomResizedCrop",
]
