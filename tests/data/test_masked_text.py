import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data import Data, MaskedText, Text
from paceline.data.base import Source, Spec
from paceline.data.masked_text import NOT_ASKED, MaskedSource

SEQUENCE_LENGTH = 40
NUM_ASKED = 6  # 15 of 100 tokens


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(np.random.default_rng(0).integers(256, size=30_000, dtype=np.uint8).tobytes())
    return path


def open_masked(path: Path, **settings: object) -> Source:
    chosen = {"path": path, "sequence_length": SEQUENCE_LENGTH, **settings}
    return MaskedText.model_validate(chosen).open().train


def read_all(source: Source) -> tuple[Tensor, Tensor]:
    return source.read(np.arange(len(source), dtype=np.int64))


def test_it_is_text_with_eight_tokens_more(text: Path) -> None:
    splits = MaskedText(path=text, sequence_length=SEQUENCE_LENGTH).open()
    plain = Text(path=text, sequence_length=SEQUENCE_LENGTH).open()
    assert Data.model_validate({"name": "masked_text", "path": str(text)}) == MaskedText(path=text)
    assert splits.train.spec == splits.held_out.spec == Spec(num_classes=264, input_shape=(SEQUENCE_LENGTH,))
    assert len(splits.train) == 10 * len(plain.train)
    assert len(splits.held_out) == len(plain.held_out)


def test_inputs_and_targets_together_are_the_text(text: Path) -> None:
    source = open_masked(text, num_maskings=3)
    plain = read_all(Text(path=text, sequence_length=SEQUENCE_LENGTH).open().train)[0]
    inputs, targets = read_all(source)
    assert inputs.dtype == targets.dtype == torch.int64
    is_asked = targets != NOT_ASKED
    assert torch.equal(torch.where(is_asked, targets, inputs), plain.repeat(3, 1))
    assert (is_asked.sum(dim=1) == NUM_ASKED).all()


def test_eighty_ten_ten(text: Path) -> None:
    inputs, targets = read_all(open_masked(text))
    is_asked = targets != NOT_ASKED
    asked_inputs, asked_targets = inputs[is_asked], targets[is_asked]
    num = len(asked_inputs)
    is_masked, is_kept = asked_inputs == 256, asked_inputs == asked_targets
    others = asked_inputs[~is_masked & ~is_kept]
    deviation = 4 * 0.5 / num**0.5  # four standard deviations of a fraction, at most
    assert num == NUM_ASKED * len(inputs)
    assert is_masked.sum().item() / num == pytest.approx(0.8, abs=deviation)
    assert is_kept.sum().item() / num == pytest.approx(0.1 + 0.1 / 256, abs=deviation)
    spread = 6 * (len(others) / 256) ** 0.5  # six standard deviations of a count
    assert (others.bincount(minlength=264)[:256] - len(others) / 256).abs().max() < spread
    assert others.max() == 255, "random tokens are the text's own"


def test_all_places_are_drawn_alike_and_apart_from_one_another(text: Path) -> None:
    is_asked = (read_all(open_masked(text))[1] != NOT_ASKED).double()
    expected, num = NUM_ASKED / SEQUENCE_LENGTH, len(is_asked)
    assert (is_asked.mean(dim=0) - expected).abs().max() < 5 * (expected * (1 - expected) / num) ** 0.5
    together = is_asked.T @ is_asked / num
    together.fill_diagonal_(expected * (NUM_ASKED - 1) / (SEQUENCE_LENGTH - 1))
    assert (together - together[0, 0]).abs().max() < 6 * (together[0, 0].item() / num) ** 0.5


def test_a_sample_is_the_same_alone_in_any_company_and_any_thread(text: Path) -> None:
    source = open_masked(text)
    expected = read_all(source)
    for indices in ([7], [3, 7, 3], [len(source) - 1, 0]):
        inputs, targets = source.read(np.array(indices))
        assert torch.equal(inputs, expected[0][indices])
        assert torch.equal(targets, expected[1][indices])
    again = open_masked(text)
    results: list[bool] = []

    def read() -> None:
        torch.rand(5)
        results.extend(torch.equal(again[i][0], expected[0][i]) for i in range(50))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 150
    assert source.read(np.zeros(0, dtype=np.int64))[0].shape == (0, SEQUENCE_LENGTH)


def test_reading_leaves_the_global_generators_alone(text: Path) -> None:
    source = open_masked(text)
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist()
    torch.manual_seed(5)
    np.random.seed(5)
    source.read(np.arange(4))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected


def test_each_masking_and_each_seed_draws_other_tokens(text: Path) -> None:
    source = open_masked(text, num_maskings=2)
    half = len(source) // 2
    is_asked = read_all(source)[1] != NOT_ASKED
    other_seed = read_all(open_masked(text, num_maskings=2, seed=1))[1] != NOT_ASKED
    for other in (is_asked.roll(half, dims=0), other_seed):
        same = (is_asked & other).sum().item() / is_asked.sum().item()
        assert same == pytest.approx(NUM_ASKED / SEQUENCE_LENGTH, abs=0.02)


def test_the_draw_is_the_same_on_every_machine(text: Path) -> None:
    """Numbers of a counter-based generator, whose stream NumPy keeps; a checkpoint goes on with them elsewhere."""
    places = (open_masked(text)[5][1] != NOT_ASKED).nonzero().flatten().tolist()
    assert places == PLACES_OF_SAMPLE_5


PLACES_OF_SAMPLE_5 = [3, 21, 24, 25, 29, 34]


@pytest.mark.parametrize(("fraction", "num_asked"), [(0.001, 1), (0.15, 6), (0.16, 6), (0.5, 20), (1.0, 40)])
def test_the_fraction_is_met_as_nearly_as_whole_tokens_can(text: Path, fraction: float, num_asked: int) -> None:
    _, targets = open_masked(text, mask_fraction=fraction).read(np.arange(3))
    assert ((targets != NOT_ASKED).sum(dim=1) == num_asked).all()


def test_any_source_of_tokens_can_be_masked() -> None:
    class Counting(Source):
        spec = Spec(num_classes=1000, input_shape=(20,))

        def __len__(self) -> int:
            return 5

        def read(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
            tokens = torch.from_numpy(indices)[:, None] * 100 + torch.arange(20)
            return tokens, torch.zeros(len(indices))

    source = MaskedSource(Counting(), mask_fraction=0.2, num_maskings=4, seed=3)
    inputs, targets = read_all(source)
    assert (len(source), source.spec.num_classes, inputs.max().item()) == (20, 1008, 1000)
    assert torch.equal(torch.where(targets != NOT_ASKED, targets, inputs)[17], torch.arange(200, 220)), (
        "sample 17 is window 2"
    )


@pytest.mark.parametrize(
    "settings", [{"mask_fraction": 0}, {"mask_fraction": 1.1}, {"num_maskings": 0}, {"seed": -1}, {"masks": 3}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        MaskedText.model_validate(settings)
