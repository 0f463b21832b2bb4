"""Runs of plain functions: any data, any model, any loss, on any number of workers."""

import functools
import json

import pytest
import torch
from pydantic import ValidationError

import plain_functions as mine
from paceline.comm import LocalGroup
from paceline.data import Batch, FunctionData, Interval, Source, Splits
from paceline.errors import DataError, GradientError, SettingsError
from paceline.exporting.judge import evaluate_run
from paceline.monitor.events import Evaluated, RunFinished, RunStarted, Warned
from paceline.registry import explain
from paceline.replica import Loss
from paceline.training import FunctionLoss, Objective, Run, evaluate
from plain_functions import losses_of, make_points_run, make_run, parameters_of, read, train_here


def results_of(directory):
    """Return all losses, and the last held-out loss and metrics."""
    finish = read(directory, RunFinished)[-1].event
    return [*losses_of(directory), finish.held_out_loss, *(value for _, value in sorted(finish.metrics.items()))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": mine.compute_loss_of_output, "metrics": mine.measure_model, "num_micro_batches": 2},
        {"data": mine.make_told, "shares": (1, 0, 2)},
        {"data": mine.make_loaders, "collate_fn": None, "num_steps": None, "num_epochs": 2},
        {"num_steps": None, "num_epochs": 2, "join_epochs": True, "loss": "masked_lm"},
        {"sync": "local_sgd", "loss": "masked_lm"},
    ],
    ids=["dicts", "output", "iterable", "DataLoader", "epochs", "rule"],
)
def test_workers_equal_one_process(tmp_path, changes):
    """Of uneven numbers of tokens, with empty shares, and held-out samples that cannot be divided evenly."""
    alone = results_of_run(tmp_path / "1", changes, 1)
    for num_workers in (2, 3):
        here = results_of_run(tmp_path / str(num_workers), changes, num_workers)
        if "sync" not in changes:
            # Sums in another order, in float64.
            assert here == pytest.approx(alone, rel=1e-9)
        assert here[-2:] == pytest.approx(alone[-2:], rel=0.5)


def results_of_run(directory, changes, num_workers):
    if "shares" in changes:
        changes = changes | {"shares": changes["shares"][:num_workers]}
    train_here(make_run(**changes), directory, num_workers)
    return results_of(directory)


@pytest.mark.parametrize(("global_batch", "is_told"), [(8, True), (5, False)])
def test_the_batch_size_of_a_data_loader_is_not_a_runs_and_that_is_told(tmp_path, global_batch, is_told):
    train_here(make_run(data=mine.make_loaders, collate_fn=None, global_batch=global_batch, num_steps=1), tmp_path)
    assert read(tmp_path, mine.StepFinished)[0].event.num_samples == global_batch
    told = [record.event.message for record in read(tmp_path, Warned)]
    beginning = (
        "the DataLoader's batch_size of 5 is not used: a step takes the run's global_batch of 8, over all workers"
    )
    assert [message.startswith(beginning) for message in told if "batch_size" in message] == [True] * is_told


def test_metrics_are_means_by_their_own_weights(tmp_path):
    train_here(make_run(), tmp_path, 2)
    held_out = [mine.Sentences(7, seed=1)[index] for index in range(7)]
    metrics = read(tmp_path, RunFinished)[-1].event.metrics
    assert metrics["length"] == pytest.approx(sum(len(sample["labels"]) for sample in held_out) / 7)
    assert 0 < metrics["right"] <= 1
    weighed = metrics["right"] * sum(len(sample["labels"]) for sample in held_out)
    assert weighed == pytest.approx(round(weighed))
    assert [record.step for record in read(tmp_path, Evaluated)] == [4, 8, 9]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_epochs": 2}, [8, 8, 8, 6] * 2),
        ({"num_epochs": 2, "drop_last": True}, [8, 8, 8] * 2),
        ({"num_epochs": 2, "join_epochs": True}, [8] * 7 + [4]),
        ({"num_steps": 5}, [8, 8, 8, 6, 8]),
    ],
    ids=["short", "drop", "join", "steps"],
)
def test_a_run_goes_through_epochs(tmp_path, changes, expected):
    """And its schedule ends with it."""
    run = make_points_run(schedule="linear", **({"num_steps": None} | changes))
    train_here(run, tmp_path, 2)
    steps = read(tmp_path, mine.StepFinished)
    assert [record.event.num_samples for record in steps] == expected
    rates = [record.event.learning_rate for record in steps]
    falls = [1e-3 * (1 - step / len(expected)) for step in range(len(expected))]
    assert rates == pytest.approx(falls)
    assert read(tmp_path, RunStarted)[0].event.total_steps == len(expected)


def test_a_run_of_epochs_goes_on_and_may_go_further(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run = make_points_run(num_steps=None, num_epochs=3, schedule="constant")
    train_here(run, straight, 2)
    train_here(run.model_copy(update={"num_epochs": 2}), resumed, 2)
    train_here(Run.model_validate(json.loads(run.model_dump_json())), resumed, 2)
    assert losses_of(resumed) == losses_of(straight)
    for name, tensor in parameters_of(straight).items():
        assert torch.equal(parameters_of(resumed)[name], tensor)


def test_what_is_not_held_out_is_not_evaluated_and_that_is_said(tmp_path):
    train_here(make_run(data=mine.make_one, metrics=None, schedule="constant"), tmp_path, 2)
    assert not read(tmp_path, Evaluated)
    assert read(tmp_path, RunFinished)[0].event.held_out_loss is None
    (warned,) = read(tmp_path, Warned)
    assert "no held-out part" in warned.event.message


def return_nothing():
    return None


def return_tensors():
    return torch.zeros(3), torch.zeros(3)


def return_other_keys():
    return {"train": mine.Sentences(3), "validation": mine.Sentences(3)}


def return_pair_of_samples():
    return [(torch.zeros(1), 0), (torch.ones(1), 1)]


def return_splits():
    return Splits(Loaded(), Loaded())


class Loaded(Source):
    def __len__(self):
        return 3

    def read(self, indices):
        return torch.zeros(len(indices), 2)


@pytest.mark.parametrize("function", [return_nothing, return_tensors, return_other_keys])
def test_what_are_no_data_sets_is_refused(function):
    with pytest.raises(DataError, match=rf"{function.__name__} must return \(train, held_out\)"):
        FunctionData(path=function).open()


def test_a_list_of_samples_is_a_data_set():
    splits = FunctionData(path=return_pair_of_samples).open()
    assert len(splits.train) == 2
    assert splits.held_out is None


def test_sources_make_their_own_batches():
    assert isinstance(FunctionData(path=return_splits).open().train, Loaded)
    with pytest.raises(SettingsError, match="which makes its own batches"):
        FunctionData(path=return_splits).open_with(mine.pad)


def test_a_random_split_is_the_same_in_every_process_and_disturbs_nothing():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = FunctionData(path=mine.make_points).open()
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(2)
    again = FunctionData(path=mine.make_points).open()
    assert torch.equal(first.train.read_first()[0], again.train.read_first()[0])
    assert (len(first.train), len(first.held_out)) == (30, 10)


def test_settings_of_a_data_loader_count():
    splits = FunctionData(path=mine.make_loaders).open()
    assert (splits.drop_last, splits.shuffle) == (True, True)
    assert set(splits.train.read_first()) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_epochs": 1}, "either num_steps or num_epochs must be given, but got 9 and 1; set one to none"),
        ({"num_steps": None}, "but got None and None; give one"),
        (
            {"num_steps": None, "num_epochs": 1, "batch_schedule": "growing"},
            "num_steps must be given where batch_schedule changes the batch",
        ),
        ({"data": "text"}, "collate_fn must come with a function that returns data sets, but got data text"),
        ({"drop_last": True, "join_epochs": True}, "must not both be true"),
        ({"layout": {"pipeline": 2}}, "loss must be a function (output, batch) where the layout has a pipeline"),
        (
            {"layout": {"pipeline": 2}, "loss": "masked_lm", "metrics": mine.measure_model},
            "metrics must be a function (output, batch)",
        ),
        ({"loss": torch.nn.functional.cross_entropy}, "must be called model, for a function that calls the model, or"),
        ({"loss": lambda model, batch: 0}, "at the top of a module"),
        ({"metrics": mine.make_points}, "must take the model or its output and the batch as its first 2 parameters"),
        (
            {"data": functools.partial(mine.make_sentences, num_sample=3)},
            "but got 'num_sample'; did you mean 'num_samples'?",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(changes, problem):
    with pytest.raises(ValidationError) as caught:
        make_run(**changes)
    assert problem in explain(caught.value)


def test_an_iterable_data_set_has_no_epochs_to_be_counted():
    run = make_run(data=mine.make_told, num_steps=None, num_epochs=2)
    with pytest.raises(SettingsError, match="num_steps must be given for an iterable data set"):
        run.count_steps(run.open_data())
    run = make_run(num_steps=None, num_epochs=2, drop_last=True, global_batch=31)
    with pytest.raises(SettingsError, match="global_batch must be at most the data set's 30 samples with drop_last"):
        run.count_steps(run.open_data())


def make_batch(num_samples=2):
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    data = {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).double(), "labels": labels}
    return Batch(data, num_samples, Interval(0, 2))


def return_loss(output, batch):
    return Loss(output.mean(), 5.0, {"right": torch.tensor(3)})


def return_mean(output, batch):
    return output.mean()


def return_pair(output, batch):
    return output.mean(), torch.tensor(4)


@pytest.mark.parametrize(("function", "weight"), [(return_loss, 5.0), (return_mean, 2.0), (return_pair, 4.0)])
def test_a_loss_may_be_said_in_three_ways(function, weight):
    loss = FunctionLoss(path=function).loss(mine.build(), make_batch())
    assert loss.weight == weight
    borrowed = FunctionLoss(path=function).loss(mine.build(), make_batch(num_samples=0))
    assert borrowed.weight == 0, "whatever the function says"
    assert all(not total for total in borrowed.totals.values())


def return_output(output, batch):
    return output


def return_word(output, batch):
    return {"loss": output.mean()}


@pytest.mark.parametrize(("function", "got"), [(return_output, r"float64\[2, 3, 11\]"), (return_word, "{loss: ")])
def test_what_is_no_loss_is_refused(function, got):
    with pytest.raises(SettingsError, match=f"{function.__name__} must return a loss: .* but got {got}"):
        FunctionLoss(path=function).loss(mine.build(), make_batch())


def return_no_loss(output, batch):
    return None


def return_no_mean(output, batch):
    return None, 3


@pytest.mark.parametrize("function", [return_no_loss, return_no_mean])
def test_an_output_without_its_loss_is_told_of(function):
    words = (
        rf"{function.__name__} must return .* but got .*None.*; .* was not given the labels, .* output.logits and batch"
    )
    with pytest.raises(SettingsError, match=words):
        FunctionLoss(path=function).loss(mine.build(), make_batch())


def loss_of_parts(model, batch):
    """Use what only the module has, as code for a module does."""
    assert model.embedding.weight.shape == (mine.VOCABULARY, 6)
    mean, weight = model.compute_loss(batch)
    return mean + 0 * model.head.weight.sum() * model.config["scale"], weight


class Configured(mine.Reader):
    def __init__(self):
        super().__init__(6)
        self.config = {"scale": 2}

    def compute_loss(self, batch):
        return mine.compute_loss(self, batch)


def build_configured():
    return Configured().double()


def test_a_loss_may_use_attributes_and_methods_of_the_model(tmp_path):
    """In training, in evaluation with metrics and without, and where memory is rehearsed."""
    for number, metrics in enumerate((mine.measure, None)):
        run = make_run(model=build_configured, loss=loss_of_parts, metrics=metrics, schedule="constant")
        train_here(run, tmp_path / str(number), 2, recipe="plain_functions:make_run")
        assert not read(tmp_path / str(number), Warned)
        assert read(tmp_path / str(number), Evaluated)
    judged = evaluate_run(tmp_path / "1")
    assert judged.evaluation.loss == pytest.approx(read(tmp_path / "1", RunFinished)[-1].event.held_out_loss)


def test_labels_of_a_mapping_are_shifted_inside():
    """As the models of the transformers library do it: position i says token i + 1."""
    torch.manual_seed(0)
    model, batch = mine.build(), make_batch()
    loss = Objective.model_validate("next_token").loss(model, batch)
    logits = model(**batch.inputs)
    assert loss.weight == 1
    torch.testing.assert_close(loss.mean, torch.nn.functional.cross_entropy(logits[:1, 0], torch.tensor([2])))
    pair = Batch((batch.data["input_ids"], batch.data["labels"]), 2, Interval(0, 2))
    assert Objective.model_validate("next_token").loss(lambda ids: logits, pair).weight == 3, "a pair's are not"


def return_number(output, batch):
    return 3


def return_vector(output, batch):
    return {"all": output}


def return_forbidden(output, batch):
    return {"loss": output.mean()}


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (return_number, "must return a mapping from names to pairs"),
        (return_vector, "must return a mapping from names to pairs"),
        (return_forbidden, "must not be called loss"),
    ],
)
def test_what_are_no_metrics_is_refused(function, problem):
    run = make_run(metrics=function)
    splits = run.open_data()
    replica = make_replica(run)
    with pytest.raises(SettingsError, match=problem):
        evaluate(replica, run.loss, splits.held_out, batch_size=2, metrics=run.metrics)


def make_replica(run):
    from paceline.replica import Replica

    module = mine.build()
    return Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=LocalGroup())


def test_an_optimizer_of_ones_own_is_neither_clipped_nor_scheduled_unless_asked_for():
    for optimizer in (torch.optim.SGD, "torch.optim:SGD", {"name": "function", "path": "torch.optim:SGD"}):
        run = make_points_run(optimizer=optimizer)
        assert run.clip_norm is None
        assert run.schedule.name == "constant"
        assert Run.model_validate(run.model_dump(mode="json")) == run
        asked = make_points_run(optimizer=optimizer, clip_norm=0.5, schedule="cosine")
        assert asked.clip_norm == 0.5
        assert asked.schedule.name == "cosine"
    assert make_points_run().clip_norm == 1.0
    assert make_points_run(optimizer="sgd").clip_norm == 1.0


def build_nothing():
    return torch.nn.Flatten()


def build_frozen():
    return mine.build_linear().requires_grad_(False)


@pytest.mark.parametrize(("function", "kind"), [(build_nothing, "Flatten"), (build_frozen, "Sequential")])
def test_a_model_with_nothing_to_train_is_refused(tmp_path, function, kind):
    with pytest.raises(SettingsError, match=f"must have parameters that require gradients, but {kind} has none"):
        train_here(make_points_run(model=function), tmp_path)


def hold_out_nothing():
    train, _ = mine.make_points()
    return train, torch.utils.data.Subset(train, [])


def hold_out_an_empty_stream():
    return mine.Told(30), mine.Told(0)


@pytest.mark.parametrize(("num_steps", "changes"), [(0, {"data": hold_out_nothing}), (4, {})])
def test_held_out_data_without_samples_are_refused(tmp_path, num_steps, changes):
    """Before training begins, where their number is known."""
    run = make_points_run(**changes) if changes else make_run(data=hold_out_an_empty_stream, metrics=None)
    with pytest.raises(DataError, match="held-out data must have samples, but there are none; hold out some"):
        train_here(run, tmp_path, 2)
    assert len(losses_of(tmp_path)) == num_steps


def detach(output, batch):
    return mine.squared_error(output, batch).detach()


def test_a_loss_without_gradients_is_refused(tmp_path):
    with pytest.raises(GradientError, match=r"depend on parameters .*; run forward without .* do not detach"):
        train_here(make_points_run(loss=detach), tmp_path)
