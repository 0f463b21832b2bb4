import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.recipes.resnet.model import ResidualNetwork, ResNet
from paceline.training.model import Model

NORMS = ("batch", "group", "frozen_batch")


def build(size: int = 16, channels: int = 3, **settings: object) -> ResidualNetwork:
    torch.manual_seed(0)
    resnet = Model.model_validate({"name": "resnet", "width": 8, **settings})
    module = resnet.build(Spec(num_classes=5, input_shape=(channels, size, size)))
    assert isinstance(module, ResidualNetwork)
    return module


def images(batch: int = 4, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def train_step(model: nn.Module, batch: Tensor) -> float:
    loss = F.cross_entropy(model(batch), torch.arange(len(batch)) % 5)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("depth", "num_parameters"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_the_number_of_parameters_is_that_of_the_paper(depth: int, num_parameters: int) -> None:
    with torch.device("meta"):
        model = build(224, depth=depth, width=64)
        model.head = nn.Linear(model.head.in_features, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    num_shortcuts = 3 if depth < 50 else 4
    assert len(convolutions) + 1 - num_shortcuts == depth, "layers with weights on the main path"


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("size", "channels"), [(8, 1), (17, 3)])
def test_shapes(depth: int, norm: str, size: int, channels: int) -> None:
    model = build(size, channels, depth=depth, norm=norm)
    assert model(images(2, size, channels)).shape == (2, 5)


@pytest.mark.parametrize(
    ("stem", "size", "side"),
    [("auto", 32, 32), ("auto", 63, 63), ("auto", 64, 16), ("small", 64, 64), ("imagenet", 32, 8)],
)
def test_the_stem_fits_the_image(stem: str, size: int, side: int) -> None:
    model = build(size, stem=stem)
    after_stem = model.stem(images(2, size))
    assert after_stem.shape == (2, 8, side, side)
    assert model.stages(after_stem).shape == (2, 64, -(-side // 8), -(-side // 8))


def test_the_bottlenecks_3x3_convolution_strides() -> None:
    model = build(depth=50)
    strides = {
        module.kernel_size[0]: module.stride[0] for module in model.stages[1][0].branch if isinstance(module, nn.Conv2d)
    }
    assert strides == {1: 1, 3: 2}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("depth", [18, 50])
def test_gradients_reach_every_parameter(norm: str, depth: int) -> None:
    model = build(norm=norm, depth=depth, zero_init_residual=False)
    train_step(model, images())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("norm", NORMS)
def test_blocks_start_as_the_identity(norm: str) -> None:
    model = build(norm=norm).eval()
    block = model.stages[0][0]
    positive = images(channels=8).abs()
    assert torch.equal(block(positive), positive)
    assert not torch.equal(build(norm=norm, zero_init_residual=False).eval().stages[0][0](positive), positive)


@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
@pytest.mark.parametrize("depth", [18, 50])
def test_a_batch_of_one_sample_trains(norm: str, depth: int) -> None:
    model = build(8, norm=norm, depth=depth)
    assert model.stages(model.stem(images(1, 8))).shape[2:] == (1, 1), "one value for each channel at the end"
    train_step(model, images(1, 8))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    head_gradient = model.head.weight.grad
    assert head_gradient is not None
    assert head_gradient.abs().sum() > 0


def test_frozen_batch_norm_stays_frozen_while_its_scale_is_trained() -> None:
    model = build(norm="frozen_batch")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers
    model.eval()
    in_evaluation = model(images())
    model.train()
    assert torch.equal(model(images()), in_evaluation)
    train_step(model, images())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(model(images()), in_evaluation)
    assert model.stages[3][1].last_norm.weight.abs().sum() > 0


@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_samples_do_not_see_each_other(norm: str) -> None:
    model = build(norm=norm, zero_init_residual=False).double()
    batch = images().double()
    alone = torch.cat([model(batch[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(batch), alone)


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (8, 4), (12, 6), (9, 3), (7, 1), (1, 1)])
def test_groups_hold_two_channels_or_more(width: int, groups: int) -> None:
    norm = build(norm="group", width=width).stem[1]
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


@pytest.mark.parametrize("norm", NORMS)
def test_it_learns_a_few_images(norm: str) -> None:
    model = build(norm=norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        losses.append(train_step(model, images(5)))
        optimizer.step()
    assert losses[0] > 1
    assert losses[-1] < 0.1


def test_the_layout_in_memory_changes_no_logit() -> None:
    model = build(zero_init_residual=False).double()
    batch = images().double()
    assert torch.equal(model(batch), model(batch.contiguous(memory_format=torch.channels_last)))
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_data_that_is_no_image_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"must have 3 dims .*, but got the shape \(128,\)"):
        ResNet().build(Spec(num_classes=256, input_shape=(128,)))


@pytest.mark.parametrize("settings", [{"depth": 35}, {"width": 0}, {"norm": "layer"}, {"stem": "big"}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ResNet.model_validate(settings)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_several_threads_train_without_harm() -> None:
    """In a process of its own: what this test is for ends the process when it goes wrong."""
    script = (
        "import torch, torch.nn.functional as F\n"
        "from paceline.data import Spec\n"
        "from paceline.recipes.resnet.model import ResNet\n"
        "torch.set_num_threads(2)\n"
        f"for norm in {NORMS}:\n"
        "    model = ResNet(width=8, norm=norm).build(Spec(5, (3, 16, 16)))\n"
        "    for _ in range(40):\n"
        "        F.cross_entropy(model(torch.randn(5, 3, 16, 16)), torch.arange(5)).backward()\n"
        "    print(norm)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(done.stdout.split()) == NORMS
