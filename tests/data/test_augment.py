"""Augmentation: its definition, and the same pixels whoever reads."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import Dataset, TensorDataset

from paceline import Loader
from paceline.comm.local_group import LocalGroup
from paceline.data.augment import Augmentation, Colour, Crop, CutMix, Draws, Erase, Flip, Mixup, RandomResizedCrop
from paceline.data.augment.augmenter import draw_for
from paceline.data.augment.base import Samples
from paceline.data.base import Spec
from paceline.errors import DataError, SettingsError

NUM = 4000
EVERYTHING = ["flip", {"name": "crop", "padding": 2}, "random_resized_crop", "erase", "colour", "mixup", "cutmix"]


def make_draws(num=NUM, *, seed=0, epoch=0, operation=0):
    return draw_for(seed, operation, np.full(num, epoch), np.arange(num))


def make_samples(images, labels=None, num_classes=4):
    num = len(images)
    labels = torch.arange(num) % num_classes if labels is None else labels
    return Samples((images, labels), np.arange(num) ^ 1, Spec(num_classes))


def augment(operation, images, **changes):
    return operation.apply(make_samples(images, **changes), make_draws(len(images))).tree


def ramp(num=NUM, channels=1, size=8):
    """Images whose pixel at row r and column c is 10 r + c."""
    grid = torch.arange(size)[:, None] * 10.0 + torch.arange(size)
    return grid.repeat(num, channels, 1, 1)


# Random numbers


def test_numbers_of_a_sample_do_not_depend_on_those_drawn_beside_it():
    whole, part = make_draws(10), draw_for(0, 0, np.zeros(3, np.int64), np.array([7, 2, 2]))
    rows = [7, 2, 2]
    for draw in (Draws.uniform, Draws.words, lambda d: d.beta(0.3), lambda d: d.grid(4), Draws.uniform):
        assert np.array_equal(draw(whole)[rows], draw(part))


def test_seed_epoch_sample_and_operation_all_change_the_numbers():
    first = make_draws(NUM).uniform()
    for other in (make_draws(seed=1), make_draws(epoch=1), make_draws(operation=1)):
        drawn = other.uniform()
        assert not (drawn == first).any()
        assert abs(np.corrcoef(drawn, first)[0, 1]) < 0.06
    assert len(set(first)) == NUM


@pytest.mark.parametrize("concentration", [0.02, 0.2, 1.0, 4.0])
def test_beta_has_its_mean_and_variance(concentration):
    drawn = make_draws(40_000).beta(concentration)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    variance = 1 / (4 * (2 * concentration + 1))
    assert drawn.mean() == pytest.approx(0.5, abs=5 * (variance / 40_000) ** 0.5)
    assert drawn.var() == pytest.approx(variance, rel=0.03)


def test_uniform_fills_its_range_evenly():
    counts, _ = np.histogram(make_draws(40_000).uniform(2, 4), bins=20, range=(2, 4))
    assert ((counts - 2000) ** 2 / 2000).sum() < 45  # chi-squared with 19 degrees of freedom: 1 of 1,000 is above 43.8


# Operations, each against its definition


@pytest.mark.parametrize(
    "operation",
    [
        Flip(horizontal=0),
        Crop(padding=0),
        RandomResizedCrop(scale=(1, 1), ratio=(1, 1)),
        Erase(probability=0),
        Colour(brightness=0, contrast=0, saturation=0),
    ],
)
def test_without_change_the_images_stay(operation):
    images = torch.rand(20, 3, 8, 8) * 2 - 1
    changed, labels = augment(operation, images)
    torch.testing.assert_close(changed, images, rtol=0, atol=1e-6)
    assert torch.equal(labels, torch.arange(20) % 4)


def test_flip_mirrors_the_asked_part():
    images = ramp()
    changed, _ = augment(Flip(horizontal=0.5, vertical=0.1), images)
    horizontal = changed[:, 0, 4, 0] % 10 == 7
    vertical = changed[:, 0, 0, 0] >= 70
    assert horizontal.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert vertical.float().mean().item() == pytest.approx(0.1, abs=0.02)
    both = (horizontal & vertical).nonzero()[0].item()
    assert torch.equal(changed[both], images[0].flip(-1, -2))
    assert torch.equal(images, ramp()), "the data itself is not changed"


def test_crop_takes_every_place_alike_and_fills():
    changed, _ = augment(Crop(padding=2, fill=-5), ramp())
    left = (changed[:, 0, 4] == -5).int()
    offsets = torch.where(left[:, 0] == 1, -left.sum(1), left.sum(1))
    counts = torch.stack([(offsets == offset).sum() for offset in range(-2, 3)])
    assert counts.sum() == NUM
    assert (counts - NUM / 5).abs().max() < 5 * (NUM / 5) ** 0.5
    small, _ = augment(Crop(size=3, padding=0), ramp(50))
    assert small.shape == (50, 1, 3, 3)
    assert torch.equal(small - small[:, :, :1, :1], ramp(50, size=3))


def test_a_crop_larger_than_the_image_is_refused():
    with pytest.raises(DataError, match="at least as large as its crop with padding 0, 9 pixels, but got 8 x 8"):
        augment(Crop(size=9, padding=0), ramp(2))


def test_random_resized_crop_has_areas_and_ratios_as_defined():
    from paceline.data.augment.crop import draw_boxes

    boxes = draw_boxes(make_draws(), np.full((NUM, 2), 1000), (0.2, 0.5), (0.5, 2.0))
    top, left, height, width = boxes.T
    area, ratio = height * width / 1e6, np.log(width / height)
    assert area.min() > 0.199
    assert area.max() < 0.501
    assert area.mean() == pytest.approx(0.35, abs=0.006)
    assert area.var() == pytest.approx(0.3**2 / 12, rel=0.06)
    assert ratio.mean() == pytest.approx(0, abs=0.03)
    assert ratio.var() == pytest.approx(np.log(4) ** 2 / 12, rel=0.06)
    assert (top / (1000 - height)).mean() == pytest.approx(0.5, abs=0.03)
    assert (left + width).max() <= 1000


def test_resized_crops_keep_values_and_types():
    flat, _ = augment(RandomResizedCrop(size=5), torch.full((4, 3, 9, 7), 0.25))
    torch.testing.assert_close(flat, torch.full((4, 3, 5, 5), 0.25))
    as_bytes, _ = augment(RandomResizedCrop(), torch.full((4, 3, 8, 8), 200, dtype=torch.uint8))
    assert as_bytes.dtype == torch.uint8
    assert as_bytes.unique().tolist() == [200]


def test_erase_overwrites_areas_as_defined():
    images = torch.ones(NUM, 1, 40, 40)
    changed, _ = augment(Erase(probability=0.25, scale=(0.1, 0.3), fill=7.0), images)
    area = (changed == 7).float().mean(dim=(1, 2, 3))
    assert (area > 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert area[area > 0].mean().item() == pytest.approx(0.2, abs=0.01)
    noise, _ = augment(Erase(probability=1, fill="noise"), images)
    erased = noise[noise != 1]
    assert erased.mean().item() == pytest.approx(0, abs=0.01)
    assert erased.var().item() == pytest.approx(4 / 12, rel=0.02)


def test_colour_changes_brightness_by_a_uniform_factor():
    grey = torch.full((NUM, 3, 2, 2), 50 / 255)
    changed, _ = augment(Colour(brightness=0.5, contrast=0, saturation=0, value_range=(0, 1)), grey)
    factors = changed[:, 0, 0, 0] / (50 / 255)
    assert factors.mean().item() == pytest.approx(1, abs=0.02)
    assert factors.var().item() == pytest.approx(1 / 12, rel=0.06)
    as_bytes, _ = augment(Colour(brightness=0.5, contrast=0, saturation=0), (grey * 255).round().to(torch.uint8))
    assert (as_bytes.float() - changed * 255).abs().max() <= 0.5001


def test_colour_leaves_greys_grey_and_contrast_keeps_the_mean():
    images = torch.rand(50, 1, 6, 6).expand(-1, 3, -1, -1) * 0.2 + 0.4
    changed, _ = augment(Colour(brightness=0, contrast=0, hue=0.5, value_range=(0, 1)), images)
    torch.testing.assert_close(changed, images, rtol=0, atol=2e-3)  # the matrix of YIQ has four digits
    changed, _ = augment(Colour(brightness=0, saturation=0, value_range=(0, 1)), images)
    torch.testing.assert_close(changed.mean((1, 2, 3)), images.mean((1, 2, 3)))
    ratio = changed.std((1, 2, 3)) / images.std((1, 2, 3))
    assert ratio.min() >= 0.599
    assert ratio.max() <= 1.401


def test_mixup_blends_images_and_labels_alike():
    values = torch.arange(NUM).float() % 2
    images, labels = augment(Mixup(alpha=0.4), values.reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3), labels=values.long())
    torch.testing.assert_close(labels.sum(1), torch.ones(NUM))
    torch.testing.assert_close(labels[:, 1], images[:, 0, 0, 0])
    own = torch.where(values == 1, labels[:, 1], labels[:, 0])
    assert own.mean().item() == pytest.approx(0.5, abs=0.03)
    assert own.var().item() == pytest.approx(1 / (4 * 1.8), rel=0.06)


def test_cutmix_labels_follow_the_area():
    values = torch.arange(NUM).float() % 2
    images, labels = augment(CutMix(), values.reshape(-1, 1, 1, 1).expand(-1, 3, 10, 10), labels=values.long())
    torch.testing.assert_close(labels[:, 1], images.mean((1, 2, 3)))
    assert ((images == 0) | (images == 1)).all()
    assert (
        0.5 < torch.where(values == 1, labels[:, 1], labels[:, 0]).mean() < 0.75
    )  # 1/2 but for what the edge cuts off


def test_mixing_in_proportion_to_its_probability():
    values = torch.arange(NUM).float() % 2
    _, labels = augment(Mixup(probability=0.3), values.reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2), labels=values.long())
    assert (labels.max(1).values < 1).float().mean().item() == pytest.approx(0.3, abs=0.08)  # some parts round to 1


def test_labels_that_cannot_be_mixed_are_refused():
    with pytest.raises(DataError, match=r"number of classes must be known to mixup, .* give num_classes"):
        Mixup().apply(Samples((ramp(2), torch.tensor([0, 1])), np.array([1, 0]), Spec()), make_draws(2))
    with pytest.raises(DataError, match="must be numbers of classes, but got float32"):
        augment(Mixup(), ramp(2), labels=torch.rand(2))
    with pytest.raises(DataError, match="from 0 to below 4 for cutmix, but got 0 to 9"):
        augment(CutMix(), ramp(2), labels=torch.tensor([0, 9]))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "random_resized_crop", "scale": (0.5, 0.2)},
        {"name": "erase", "ratio": (0, 1)},
        {"name": "flip", "horizontal": 2},
    ],
)
def test_settings_without_sense_are_refused(settings):
    with pytest.raises(ValidationError):
        Augmentation.model_validate(settings)


# Leaves


@dataclass
class Scan:
    image: torch.Tensor
    mask: torch.Tensor


class Scans(Dataset):
    """Images of unequal sizes with their masks; a mask is ten times its image's first channel."""

    def __init__(self, unequal=True):
        self._unequal = unequal

    def __len__(self):
        return 12

    def __getitem__(self, index):
        size = 8 + (index % 3 if self._unequal else 0)
        values = torch.arange(size * size).reshape(size, size) + index
        return {"scan": Scan(values.float().repeat(3, 1, 1), values * 10), "label": index % 4}


@pytest.mark.parametrize("unequal", [True, False])
def test_image_and_mask_are_cut_alike_whether_sizes_are_equal_or_not(unequal):
    leaves = ("scan.image", "scan.mask")
    operations = [Crop(size=6, padding=0, leaves=leaves), Flip(leaves=leaves)]
    for batch in Loader(Scans(unequal), 5, num_epochs=1, augment=operations, group=LocalGroup.create(1)[0]):
        image, mask = batch.data["scan"].image, batch.data["scan"].mask
        assert image.shape[1:] == (3, 6, 6)
        assert torch.equal(image[:, 0] * 10, mask.float())


def test_a_leaf_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(DataError, match=r"got 'scan.picture' .*known: scan.image, scan.mask, label"):
        next(iter(Loader(Scans(), 2, augment=[Flip(leaves=("scan.picture",))], group=LocalGroup.create(1)[0])))
    pair = TensorDataset(torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, 8, 8))
    with pytest.raises(DataError, match=r"must be named unless one tensor of a sample has three dims.*but got 0, 1"):
        next(iter(Loader(pair, 2, augment=["flip"], group=LocalGroup.create(1)[0])))


# The same pixels whoever reads


def make_images(num=50):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(num, 3, 12, 12, generator=generator), torch.arange(num) % 4)


def read(*, num_workers=1, resume_at=None, augment=(), dataset=None, batch=12, epochs=2, **options):
    """Return each global batch, put together from all workers."""
    dataset = make_images() if dataset is None else dataset
    augment = augment or [
        {**each, "num_classes": 4} if each["name"] in ("mixup", "cutmix") else each for each in named()
    ]

    def work(group):
        loader = Loader(dataset, batch, num_epochs=epochs, group=group, augment=augment, seed=5, **options)
        taken = []
        for one in loader:
            taken.append((one.interval.start, group.rank, [tensor[: one.num_samples].clone() for tensor in one.data]))
            if resume_at is not None and len(taken) == resume_at:
                break
        if resume_at is not None:
            resumed = Loader(dataset, batch, num_epochs=epochs, group=group, augment=augment, seed=5, **options)
            resumed.load_state_dict(loader.state_dict())
            taken += [
                (one.interval.start, group.rank, [t[: one.num_samples].clone() for t in one.data]) for one in resumed
            ]
        return taken

    parts = sorted((part for worker in LocalGroup.run(num_workers, work) for part in worker), key=lambda part: part[:2])
    return [torch.cat([part[2][leaf] for part in parts]) for leaf in range(2)]


def named():
    return [each if isinstance(each, dict) else {"name": each} for each in EVERYTHING]


@pytest.fixture(scope="module")
def plain():
    return read()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "options",
    [
        {"num_processes": 1},
        {"num_processes": 2},
        {"num_processes": 4},
        {"num_processes": "auto"},
        {"num_threads": 3},
        {"num_workers": 2},
        {"num_workers": 3},
        {"num_workers": 4, "num_micro_batches": 2},
        {"num_workers": 2, "shares": (3.0, 1.0)},
        {"resume_at": 5},
        {"resume_at": 3, "num_workers": 2},
        {"prefetch": 0, "read_ahead_bytes": 1},
    ],
    ids=str,
)
def test_the_same_pixels_and_labels_whoever_reads(plain, options):
    found = read(**options)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_epochs_differ_and_other_seeds_too(plain):
    images = read(augment=["flip"], shuffle=False)[0]
    assert not torch.equal(images[:50], images[50:])
    assert torch.equal(read(augment=[Flip(horizontal=0)], shuffle=False)[0][:50], make_images().tensors[0])


def draw_from_all(sample):
    image, label = sample
    return image + torch.rand(()) + float(np.random.rand()) + random.random(), label


def draw_from_its_own(sample, generator, scale=1.0):
    image, label = sample
    return image + scale * torch.rand((), generator=generator), label


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("function", [draw_from_all, draw_from_its_own, lambda sample: draw_from_all(sample)])
def test_any_callable_gets_random_numbers_of_the_sample(function):
    plain = read(augment=[function, "flip"])
    first = make_images().tensors[0]
    assert not torch.equal(plain[0][:50].sort(0).values, first.sort(0).values)
    assert all(torch.equal(a, b) for a, b in zip(plain, read(augment=[function, "flip"], num_processes=2), strict=True))
    assert torch.equal(plain[0], read(augment=[function, "flip"], num_workers=2, resume_at=2)[0])


def test_a_function_of_a_run_is_called_with_its_arguments_and_leaves():
    operation = Augmentation.model_validate(
        {"name": "function", "path": draw_from_its_own, "arguments": {"scale": 0.0}}
    )
    assert torch.equal(read(augment=[operation], shuffle=False, epochs=1)[0], make_images().tensors[0])
    assert Augmentation.model_validate(operation.model_dump()) == operation
    halved = Augmentation.model_validate({"name": "function", "path": halve, "leaves": ["0"]})
    assert torch.equal(read(augment=[halved], shuffle=False, epochs=1)[0], make_images().tensors[0] / 2)


def halve(image):
    return image / 2


def test_an_iterable_data_set_is_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(2)])

    with pytest.raises(SettingsError, match="augment must be left out for an iterable data set"):
        Loader(Endless(), 1, augment=["flip"], group=LocalGroup.create(1)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nope", "augment: .*nope.*known: "),
        ({"name": "crop", "padding": -1}, "augment: padding must be greater than or equal to 0, but got -1"),
        (3, "augment: augmentation must be .*, but got 3"),
    ],
)
def test_an_operation_that_cannot_be_is_an_error_of_a_loader(given, message):
    with pytest.raises(SettingsError, match=message):
        Loader(torch.zeros(4, 3, 8, 8), 2, augment=[given])
