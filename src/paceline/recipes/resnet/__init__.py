"""Layer 10: ResNets that classify images."""

from paceline.data.images import Images
from paceline.optim import SGD
from paceline.recipes.resnet.model import ResNet
from paceline.schedules import Cosine
from paceline.training.objective import Classification
from paceline.training.run import Run

__all__ = ["ResNet", "run"]


def run() -> Run:
    """A ResNet that classifies images; by default scikit-learn's bundled handwritten digits.

    `--data.path` takes an IDX pair (MNIST, Fashion-MNIST) or a folder with one subfolder of images per class.
    """
    return Run(
        model=ResNet(depth=18, width=16),
        data=Images(size=16),
        loss=Classification(),
        optimizer=SGD(learning_rate=0.05, weight_decay=5e-4),
        schedule=Cosine(warmup_steps=10, final_factor=0.0),
        global_batch=64,
        num_steps=120,
        evaluate_interval=30,
        checkpoint_interval=60,
    )
