"""Runs whose layout shares the model: no rank builds it whole, and all start from the values it would have."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.comm import join
from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.monitor.log import EventLog
from paceline.parallel.local import local, local_slice
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout
from paceline.training import Run
from paceline.training.building import build_model, check_inputs
from paceline.training.training import Training, start_training

FAMILIES: list[str] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def build() -> nn.Module:
    FAMILIES.append("fake" if _get_current_dispatch_mode() is not None else "real")
    return Net()


def build_by_hand() -> nn.Module:
    net = Net()
    net.layers[1].weight.detach().numpy()[:] = 0.5
    return net


def build_by_rank() -> nn.Module:
    net = Net()
    nn.init.constant_(net.layers[0].bias, float(os.environ["RANK"]))
    return net


def data() -> Any:
    tokens = torch.arange(80).view(8, 10) % 16
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def loss_of_output(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def make_run(model: Any, layout: dict[str, Any], **settings: Any) -> Run:
    if "pipeline" in layout:
        settings.setdefault("pipeline", {"sequence": ("embedding", "layers.*", "head")})
    return Run(
        model=model,
        data=data,
        loss=loss_of_output if "pipeline" in layout else loss,
        layout=Layout(**layout),
        global_batch=8,
        num_steps=1,
        **settings,
    )


def start(run: Run, folder: str, group: Group) -> Training:
    log = EventLog(os.devnull, run="x", rank=group.rank, epoch=0)
    return start_training(run, Path(folder), group, log, "x")[0]


def start_all(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Return, for several models, what differs from the whole one, and what was told."""
    group = join()
    found: dict[str, Any] = {}
    weights = f"{folder}/weights.safetensors"
    for name, model, settings in [
        ("plain", build, {}),
        ("initial", build, {"initial": weights}),
        ("by hand", build_by_hand, {}),
        ("by rank", build_by_rank, {}),
        ("found", build, {"pipeline": {}}),
    ]:
        run = make_run(model, layout, **settings)
        FAMILIES.clear()
        training = start(run, folder, group)
        built = list(FAMILIES)
        whole = build_model(run, training.splits, group)
        if "initial" in settings:
            run.initial.match(whole).load_into(whole)  # type: ignore[union-attr]
        if name == "by rank":
            nn.init.zeros_(whole.layers[0].bias)  # type: ignore[index, union-attr, arg-type]
        expected = {name: tensor.detach() for name, tensor in whole.state_dict(keep_vars=True).items()}
        held = training.module.state_dict(keep_vars=True)
        wrong = [
            key for key, tensor in held.items() if not torch.equal(local(tensor), local_slice(expected[key], tensor))
        ]
        found[name] = [wrong, built, training.about_building]
        group.membership.shards[-1].close()
        training.store.close()
    group.close()
    return found


@pytest.mark.parametrize("layout", [{"sharded": 2}, {"pipeline": 2}])
def test_ranks_start_from_the_values_of_the_whole_model(tmp_path: Path, layout: dict[str, Any]) -> None:
    torch.manual_seed(9)
    save_file(
        {name: torch.randn_like(t) for name, t in Net().state_dict().items() if name != "head.weight"},
        tmp_path / "weights.safetensors",
    )
    for result in run_processes(2, start_all, {"folder": str(tmp_path), "layout": layout}):
        assert result.exit_code == 0, result.output
        assert result.value["plain"] == result.value["initial"] == [[], ["fake"], ""]
        assert result.value["by hand"][0] == result.value["by rank"][0] == []
        assert "builds the whole model before it keeps its part, since it asks for" in result.value["by hand"][2]
        assert "since ranks construct different ones, of which rank 0's is taken" in result.value["by rank"][2]
        assert result.value["found"][0] == []
        assert ("since it is run to find how it can be split" in result.value["found"][2]) == ("pipeline" in layout)


def test_a_model_that_does_not_take_the_inputs_of_a_sample_is_refused_before_it_is_tried() -> None:
    tokens = {"words": torch.zeros(1, 4, dtype=torch.int64)}
    run = make_run(build, {"tensor": 2})
    for inputs in (tokens["words"], (tokens["words"],), {"tokens": tokens["words"]}):
        check_inputs(run, Net(), inputs)
    refused = r"forward of Net missing a required argument: 'tokens', and the inputs are \{words: int64\[1, 4\]\}"
    with pytest.raises(SettingsError, match=refused):
        check_inputs(run, Net(), tokens)
    check_inputs(run.model_copy(update={"layout": Layout(sharded=2)}), Net(), tokens)  # is not run before
