"""Layer 10: a recurrent network that classifies sequences."""

from paceline.data.images import Images
from paceline.optim import AdamW
from paceline.recipes.rnn.model import RNN
from paceline.schedules import Cosine
from paceline.training.objective import Classification
from paceline.training.run import Run

__all__ = ["RNN", "run"]


def run() -> Run:
    """An LSTM that reads images row by row; by default scikit-learn's bundled handwritten digits.

    `--data.path` takes an IDX pair (MNIST, Fashion-MNIST) or a folder with one subfolder of images per class.
    """
    return Run(
        model=RNN(),
        data=Images(size=16),
        loss=Classification(),
        optimizer=AdamW(learning_rate=3e-3),
        schedule=Cosine(warmup_steps=20, final_factor=0.0),
        global_batch=64,
        num_steps=400,
        evaluate_interval=100,
        checkpoint_interval=100,
    )
