"""Images that stay bytes until they are a batch, and threads that decode one micro-batch together."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import Loader
from paceline.comm.local_group import LocalGroup
from paceline.data import Images, Source
from paceline.data.augment import Crop, Flip

Image = pytest.importorskip("PIL.Image")

SIZE, CROP = 16, 11
MOVES = [Crop(size=CROP, padding=0), Flip(vertical=0.3)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder: Path = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(24):
        place = folder / "ab"[number % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 18, 3), dtype=np.uint8)).save(place / f"{number}.jpg")
    source = Images(path=folder, size=SIZE, held_out_fraction=0.1).open().train
    assert isinstance(source, Source)
    return source


class Floats(Source):
    """The same images, which are batches of floats before anything changes them."""

    def __init__(self, source):
        self.spec, self._source = source.spec, source

    def __len__(self):
        return len(self._source)

    def read(self, indices):
        return self._source.read(indices)


def read_all(source, **options):
    loader = Loader(source, 6, group=LocalGroup.create(1)[0], num_epochs=2, **options)
    batches = [batch.data for batch in loader]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def test_no_samples_are_an_empty_batch(images):
    pixels, labels = images.read(np.arange(0))
    assert (pixels.shape, pixels.dtype) == ((0, 3, SIZE, SIZE), torch.float32)
    assert (labels.shape, labels.dtype) == ((0,), torch.int64)


def test_every_byte_becomes_the_float_that_torch_computes(images):
    every = torch.arange(256, dtype=torch.uint8).expand(3, 2, 256)
    found, labels = images.collate([(every, torch.tensor(1)), (every.flip(-1), torch.tensor(0))])
    assert torch.equal(found[0], every.float().div_(127.5).sub_(1))
    assert torch.equal(found[1], found[0].flip(-1))
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    "augment",
    [[], MOVES, [Flip()], [*MOVES, "colour"], [Crop(padding=2), "flip"], ["flip", "mixup"], ["random_resized_crop"]],
    ids=str,
)
def test_pixels_are_those_of_floats_that_are_changed(images, augment):
    found, expected = read_all(images, augment=augment), read_all(Floats(images), augment=augment)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    "options", [{"num_threads": 2}, {"num_threads": 9}, *({"num_processes": number} for number in (1, 2, 4))], ids=str
)
@pytest.mark.parametrize("augment", [MOVES, [*MOVES, "cutmix"]], ids=str)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_pixels_are_the_same_whoever_reads(images, augment, options):
    found, expected = read_all(images, augment=augment, **options), read_all(images, augment=augment)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


class Numbers(Source):
    """Samples that are their own index, decoded one by one."""

    is_thread_safe = decodes_samples = True

    def __init__(self, meeting=None, broken=()):
        self._meeting, self._broken = meeting, broken

    def __len__(self):
        return 12

    def read(self, indices):
        return self.collate(self.decode(indices))

    def decode(self, fetched, seeds=None):
        if self._meeting is not None:
            self._meeting.wait(30)
        for index in fetched:
            if index in self._broken:
                raise OSError(f"sample {index} is broken")
        return [int(index) for index in fetched]

    def collate(self, samples):
        return torch.tensor(samples)


def test_threads_decode_one_micro_batch_together():
    source = Numbers(threading.Barrier(3))  # which breaks unless three decode at once
    loader = Loader(source, 12, group=LocalGroup.create(1)[0], num_epochs=1, shuffle=False, num_threads=3)
    assert [batch.data.tolist() for batch in loader] == [list(range(12))]


def test_the_first_of_several_errors_of_a_micro_batch_reaches_the_loop():
    loader = Loader(Numbers(broken=(4, 11)), 12, group=LocalGroup.create(1)[0], shuffle=False, num_threads=3)
    with pytest.raises(OSError, match="sample 4 is broken"):
        next(iter(loader))
