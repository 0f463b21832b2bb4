"""What is refused inside a pipeline's step reaches the user as Paceline's own error, not as one of torch's schedule."""

import torch
from pipeline_on_ranks import open_mesh, sum_of_losses
from torch import nn

from paceline.errors import SettingsError
from paceline.parallel.pipeline import Pipeline, PipelineSettings
from paceline.testing.processes import run_processes


class Refusing(nn.Module):
    """A stage that refuses what it is given in training, with or without a cause, and no trial."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise SettingsError("width must be even, but got 3; give 4") from KeyError("width")
        return self.weight * x


def refuse() -> list[str]:
    with open_mesh() as mesh:
        module = nn.Sequential(nn.Linear(3, 3), Refusing())
        pipeline = Pipeline(module, mesh, PipelineSettings(cuts=("1",)), torch.ones(1, 3))
        try:
            pipeline.run(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), sum_of_losses)
        except Exception as error:
            return [type(error).__name__, str(error), repr(error.__cause__), str(error.__suppress_context__)]
    return []


def test_a_refusal_inside_a_step_is_the_error_that_the_user_sees() -> None:
    _, last = run_processes(2, refuse, timeout_s=50)
    said = ["SettingsError", "width must be even, but got 3; give 4", "KeyError('width')", "True"]
    assert last.value == said, last.output
