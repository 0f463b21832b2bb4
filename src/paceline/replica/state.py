"""The complete state of replicas, as named tensors and one JSON document, and back.

A plain replica is a layout of one part. Names, after a prefix where a checkpoint holds several replicas:

- ``model/<parameter or buffer>``: what the workers together stand for, whole, whoever held which slice of it;
  statistics of BatchNorm are pooled over all.
- ``optimizer/<parameter>/<key>``: whole, where replicas are equal.
- ``ema/<parameter>``: the moving average, whole; where workers differ, the mean of theirs.
- ``rank<r>/<kind>/...``: one rank's own tensors. ``buffer/<buffer>``: if it differs from that of ``model/``.
  ``feedback/<parameter>/<site>`` and ``sharded/...``: residuals of codecs, between workers and inside the sharded
  axis. Where a rule lets optimizers differ, ``optimizer/...`` again, its slice of it; where it lets workers differ,
  ``model/...`` and ``ema/...`` likewise, and ``sync/...``, the rule's state; the state common to all workers is
  ``shared/...`` of the first.

``model/``, ``optimizer/``, ``ema/`` and residuals between workers fit any layout and number of workers. The
rest of ``rank<r>/`` comes back, bit for bit, where the model is cut in the same way and as many workers go on with the
same rule; among another number of workers the rule makes of it what it can. Else a rule begins anew from ``model/`` and
the workers' mean of the optimizer's state.

Random streams need no state: every step seeds its own from (seed, step, worker). Data that draws random numbers as it
is read must seed them from the sample's index.
"""

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint import SavedState
from paceline.compression.codec import ADDED, FeedbackDroppedWarning
from paceline.errors import CheckpointError, SettingsError
from paceline.parallel.local import local, wrap
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.replica.gathering import FORMAT, SavedReplica, Slice, gather, scatter, split_name, trade
from paceline.replica.hashing import hash_tensor
from paceline.replica.living import KeptPart, LivingState, find_newest
from paceline.replica.memory import KeptReplica
from paceline.replica.named_tensors import (
    check_trained,
    list_settings,
    list_ties,
    load_optimizer,
    load_settings,
    model_tensors,
    optimizer_state,
)
from paceline.replica.replica import Replica
from paceline.sync.batch_statistics import pooled_over_workers

Document = dict[str, Any]


def capture(replica: Replica, prefix: str = "") -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of a replica. Every rank calls it; rank 0's are complete.

    Rank 0 then holds the whole state of all ranks in host memory: see `describe` for what each has itself. Those of
    several replicas are joined by ``|``, if each has a prefix of its own.

    Args:
        replica: All of its workers are at the same step.
        prefix: Prefix of its names, such as ``generator/``.

    Raises:
        DivergenceError: Replicas should be equal and are not.
    """
    mine, document = describe(replica, prefix)
    return gather(mine, replica.shard.world), document


def describe(replica: Replica, prefix: str = "") -> tuple[dict[str, Tensor], Document]:
    """Return what `capture` gathers: this rank's tensors, DTensors where ranks hold slices of them, and the document.

    Several ranks may have the same slices; the first one's count. Every rank calls it.
    """
    replica.compare()
    module, shard = replica.module, replica.shard
    is_equal = replica.sync.keeps_replicas_equal
    tensors = model_tensors(module)  # first, for it lets go of what a forward pass has gathered
    parameters = dict(module.named_parameters())
    buffers = {name: local(tensor).clone() for name, tensor in tensors.items() if name not in parameters}
    optimizer, scalars = optimizer_state(module, local_optimizer(replica.optimizer))
    optimizer = {name: _settle(tensor, parameters[split_name(name)[1]]) for name, tensor in optimizer.items()}
    own = list_own(replica)
    average = replica.state.average
    averages = average.tensors if average is not None else {}
    if not replica.state.keeps_optimizers_equal:
        own |= {name: local(tensor) for name, tensor in optimizer.items()}
    if not is_equal:
        own |= {f"model/{name}": local(parameter.detach()) for name, parameter in parameters.items()}
        own |= {f"ema/{name}": tensor for name, tensor in averages.items()}
    with replica.consensus():
        whole = {f"model/{name}": tensor for name, tensor in _take_model(replica, may_share=is_equal).items()}
    mine = {
        "peers": shard.group.names,
        "state": replica.state.document(),
        "scalars": scalars,
        "settings": list_settings(replica.optimizer),
        "blocks": {name: held for name, p in parameters.items() if not (held := Slice.of(p)).is_whole},
        "buffers": {name: _fingerprint(whole[f"model/{name}"]) for name in buffers if whole},
        "tied": list_ties(module),
    }
    everybody = shard.world.gather_documents(mine, name="state of replicas")
    saved = {name: value for theirs in reversed(everybody) for name, value in theirs["buffers"].items()}
    own |= {f"buffer/{name}": tensor for name, tensor in buffers.items() if _fingerprint(tensor) != saved[name]}
    if replica.state.keeps_optimizers_equal and (shard.group.rank == 0 or shard.layout.shards_optimizer):
        whole |= optimizer
    if average is not None:
        means = average.mean()  # of all workers
        whole |= {f"ema/{name}": mean for name, mean in means.items() if shard.group.rank == 0}
    whole |= {f"rank{shard.world.rank}/{name}": tensor for name, tensor in own.items()}
    return (
        {f"{prefix}{name}": tensor for name, tensor in whole.items()},
        {"format": FORMAT, f"{prefix}replica": describe_ranks(replica, everybody)},
    )


def keep_part(
    replica: Replica, step: int, progress: Document, objects: Mapping[str, Tensor], *, is_copied: bool
) -> KeptPart | None:
    """Return this rank's part of the state; nothing is exchanged. Replicas must be equal, and codecs without residuals.

    None if slices of the optimizer's state could be joined by all ranks only.

    Args:
        replica: Replica whose group has ended, or is about to.
        step: Number of updates.
        progress: Document of what belongs to no replica.
        objects: Tensors of that.
        is_copied: Whether tensors are copied, since the module goes on; else they share its memory.
    """
    module, rank = replica.module, replica.shard.world.rank
    tensors, parameters = model_tensors(module), dict(module.named_parameters())
    optimizer, scalars = optimizer_state(module, local_optimizer(replica.optimizer))
    for name, tensor in optimizer.items():
        if isinstance(tensor, DTensor) and tensor.shape != parameters[split_name(name)[1]].shape:
            return None
    average = replica.state.average
    averages = {name: wrap(parameters[name], tensor) for name, tensor in average.tensors.items()} if average else {}
    named = {f"model/{name}": tensor for name, tensor in tensors.items()} | optimizer | dict(objects)
    named |= {f"ema/{name}": tensor for name, tensor in averages.items()}
    named |= {f"rank{rank}/buffer/{name}": tensor for name, tensor in tensors.items() if name not in parameters}
    own = {
        "peers": replica.shard.group.names,
        "state": replica.state.document(),
        "scalars": scalars,
        "settings": list_settings(replica.optimizer),
        "blocks": {name: held for name, p in parameters.items() if not (held := Slice.of(p)).is_whole},
        "tied": list_ties(module),
    }
    mine = {name: (Slice.of(t), local(t).detach().to("cpu", copy=is_copied)) for name, t in named.items()}
    return KeptPart(step, mine, copy.deepcopy(own), copy.deepcopy(progress))


def share_parts(kept: Sequence[KeptPart], replica: Replica) -> LivingState:
    """Return the most advanced state of which some rank holds each part; all ranks of the new replica call it.

    Args:
        kept: Parts that this rank has kept, of one update or two; none if it is new.
        replica: The new replica, cut as before.

    Raises:
        LostPartError: There is no such state.
    """
    mesh, world = replica.shard.mesh, replica.shard.world
    assert mesh is not None
    peers = [mesh.axes.ranks_along(rank, "data", "context") for rank in range(world.size)]
    step = find_newest(world.gather_documents([part.step for part in kept], name="steps in memory"), peers)
    mine = next((part for part in kept if part.step == step), None)
    said = [mine.own, mine.progress, {name: one for name, (one, _) in mine.held.items()}] if mine else []
    everybody = world.gather_documents(said, name="state in memory")
    holders = [next(other for other in others if everybody[other]) for others in peers]
    whole = {name: Slice(*one) for theirs in reversed(everybody) if theirs for name, one in theirs[2].items()}
    progress = everybody[next(rank for rank, theirs in enumerate(everybody) if theirs)][1]
    about = describe_ranks(replica, [everybody[holder][0] for holder in holders])
    held = mine.held if mine else {}
    objects = {name: one for name, one in whole.items() if name.startswith("objects/") and world.rank == 0}
    found = {name: tensor for name, tensor, _ in trade(objects, held, world)}
    return LivingState(step, progress | {"format": FORMAT, "replica": about}, held, whole, found)


def full_state_dict(replica: Replica, *, averaged: bool = False) -> dict[str, Tensor]:
    """Return, on rank 0, the `state_dict` of the workers' consensus model; every rank calls it.

    Whatever rule and layout, its tensors are whole, in host memory, and copies; statistics of BatchNorm are pooled over
    all workers. What is tied has all its names.

    Args:
        replica: All of its workers are at the same step.
        averaged: Whether parameters are their moving averages; see `Replica.averaged`.

    Returns:
        Nothing on other ranks.

    Raises:
        SettingsError: Averages are wanted of a replica without `ema`.
    """
    world = replica.shard.world
    with replica.averaged() if averaged else replica.consensus():
        whole = gather(_take_model(replica, may_share=True), world)
        whole = {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}
    ties = world.gather_documents(list_ties(replica.module), name="tied tensors")
    if world.rank:
        return {}
    return whole | {name: whole[first] for theirs in ties for name, first in theirs.items()}


def restore(
    checkpoint: SavedState | None,
    replica: Replica,
    prefix: str = "",
    *,
    hyper_parameters: bool = False,
    has_model: bool = False,
    kept: KeptReplica | None = None,
) -> Document | None:
    """Load rank 0's `checkpoint` into the replica of every rank and return its document, None without one.

    Only rank 0 reads, so hosts need not share a file system.

    Args:
        checkpoint: Checkpoint on rank 0, ignored on other ranks; or a `LivingState` on all.
        replica: Every rank's, in any layout.
        prefix: Prefix under which the replica was captured.
        hyper_parameters: Whether to load the optimizer's hyper-parameters too, as a torch schedule has left them; else
            the present ones stay.
        has_model: Whether the state is what rank 0 holds itself, so that a new replica has its model already.
        kept: State that this rank has kept because it is at the same step: the rest is as it should be.

    Raises:
        SettingsError: The checkpoint is of another optimizer.
        CheckpointError: The checkpoint is of another model, or of another version of Paceline.
    """
    replica.flush()  # or it would land on what is loaded
    world = replica.shard.world
    saved = SavedReplica.open(checkpoint, world, prefix)
    if saved is None:
        return None
    _check_fits(saved, replica)
    match = _match(saved, replica)
    targets = {f"model/{name}": local(tensor) for name, tensor in model_tensors(replica.module).items()}
    loaded: dict[str, Tensor] = {}
    wanted = _list_wanted(saved, replica, match) if kept is None else {}
    wanted = {name: held for name, held in wanted.items() if not has_model or name not in targets}
    for name, tensor in (
        checkpoint.trade(wanted, world) if isinstance(checkpoint, LivingState) else scatter(wanted, saved.find, world)
    ):
        if name in targets:
            targets[name].copy_(tensor)
        else:
            loaded[name] = tensor
    if kept is not None:
        replica.state.load_own_state(kept.own)
    else:
        _load(loaded, saved, replica, match)
    if hyper_parameters:
        load_settings(replica.optimizer, saved.about["optimizer"]["settings"][match.place])
    if world.rank == 0:
        _warn_of_dropped(saved, replica, match)
    return saved.document


def _take_model(replica: Replica, *, may_share: bool) -> dict[str, Tensor]:
    """Return what the first of the ranks that hold the same knows of the model, DTensors where it is cut.

    Parameters are copied unless they `may_share` memory with the module; buffers always are.
    """
    module, shard = replica.module, replica.shard
    taken: dict[str, Tensor] = {}
    with pooled_over_workers(module, shard.statistics_group):
        if shard.group.rank == 0:
            trained = dict(module.named_parameters()) if may_share else {}
            for name, tensor in model_tensors(module).items():  # what changes back in the end is copied
                taken[name] = tensor if name in trained else tensor.clone()
    return taken


def list_own(replica: Replica) -> dict[str, Tensor]:
    """Return what codecs and the rule keep on this rank."""
    sync, shared = replica.state.sync_state()
    kinds = {"feedback": replica.state.feedback(), "sync": sync, "shared": {} if replica.group.rank else shared}
    if replica.shard.reduce_scatter is not None:
        kinds["sharded"] = replica.shard.reduce_scatter.state()
    return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _settle(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the optimizer's tensor; whole, where it is not cut as its parameter is: only its rule can cut it again."""
    if tensor.shape == parameter.shape or not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor()


def _fingerprint(tensor: Tensor) -> str:
    return f"{hash_tensor(local(tensor)):x}"


def describe_ranks(replica: Replica, everybody: Sequence[Document]) -> Document:
    """Return the document of a replica, given what each rank says of itself."""
    states = [json.dumps(mine["state"]) for mine in everybody]
    distinct = list(dict.fromkeys(states))
    parts = _list_parts([mine["peers"] for mine in everybody])
    return {
        "optimizer": {
            "type": type(local_optimizer(replica.optimizer)).__name__,
            "scalars": {name: values for mine in everybody for name, values in mine["scalars"].items()},
            "settings": [everybody[ranks[0]]["settings"] for ranks in parts],
        },
        "cut": replica.shard.describe(),
        "tied": {name: first for mine in everybody for name, first in mine["tied"].items()},
        "parts": parts,
        "blocks": [everybody[ranks[0]]["blocks"] for ranks in parts],
        "states": [json.loads(state) for state in distinct],
        "state_of": [distinct.index(state) for state in states],
    }


def _list_parts(peers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks that hold each part of the model, by worker, given the peers of each rank."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, theirs in enumerate(peers):
        parts.setdefault(tuple(theirs), []).append(rank)
    return list(parts.values())


def _check_fits(saved: SavedReplica, replica: Replica) -> None:
    """Refuse what is of another optimizer or model, on all ranks alike."""
    there, here = saved.about["optimizer"]["type"], type(local_optimizer(replica.optimizer)).__name__
    if there != here:
        raise SettingsError(
            f"the optimizer must be the checkpoint's {there}, but got {here}; resume with the same optimizer, or start "
            "a new run"
        )
    check_trained(replica.module, replica.optimizer, saved.list_optimizer(), replica.shard.world)
    mine = {name: _show(Slice.of(tensor)) for name, tensor in model_tensors(replica.module).items()}
    everybody = replica.shard.world.gather_documents(mine, name="model to be loaded")
    model = {name: shown for theirs in everybody for name, shown in theirs.items()}
    known = {name.split("/", 1)[1]: _show(s) for name, s in saved.slices.items() if name.startswith("model/")}
    for name in model | known:
        if model.get(name) != known.get(name):
            raise CheckpointError(
                f"a checkpoint must be of the model that it is loaded into, but {name} is "
                f"{known.get(name, 'missing')} in it and {model.get(name, 'missing')} here; resume with the model "
                "that it was saved from"
            )


def _show(tensor: Slice) -> str:
    return f"of shape {tuple(tensor.whole)} and {tensor.dtype}"


@dataclass(frozen=True)
class _Match:
    """The parts of a saved replica that a rank can use.

    Args:
        ranks: Ranks that had this rank's part of the model, by worker; empty if the model was cut in another way.
        mine: The rank in this rank's place, if there are as many as now.
        place: Index of this rank's part among the saved ones; 0 if the model was cut in another way.
        rule_goes_on: Whether the rule is the same, and keeps a state here too.
        uses_own_optimizer: Whether the rule is the same, and each worker's optimizer has a state of its own here too.
        uses_feedback: Whether the codec between workers is the same, so that it uses the saved residuals.
        uses_sharded: Whether the codec inside the sharded axis uses the saved residuals, of the same slices.
    """

    ranks: Sequence[int]
    mine: int | None
    place: int
    rule_goes_on: bool
    uses_own_optimizer: bool
    uses_feedback: bool
    uses_sharded: bool

    @property
    def sync_ranks(self) -> Sequence[int]:
        """The ranks whose state the rule goes on from; none where it begins anew."""
        return self.ranks if self.rule_goes_on else []


def _match(saved: SavedReplica, replica: Replica) -> _Match:
    """Find out what is of use; the replica takes on its numbers here, for codecs may depend on the step."""
    shard, first = replica.shard, saved.state_of(0)
    parts = _list_parts(shard.world.gather_documents(shard.group.names, name="parts of the model"))
    place = next(place for place, ranks in enumerate(parts) if shard.world.rank in ranks)
    ranks = saved.about["parts"][place] if saved.about["cut"] == shard.describe() else []
    mine = ranks[shard.group.rank] if len(ranks) == shard.group.size else None
    rule_goes_on = first["sync"] == replica.sync.name and replica.state.keeps_sync_state
    source = mine if mine is not None else ranks[0] if ranks else 0
    replica.state.load_document(saved.state_of(source), is_own=rule_goes_on and mine is not None)
    coded = shard.reduce_scatter.codec.name if shard.reduce_scatter is not None else ""
    return _Match(
        ranks,
        mine,
        place if ranks else 0,
        rule_goes_on,
        uses_own_optimizer=first["sync"] == replica.sync.name and not replica.state.keeps_optimizers_equal,
        uses_feedback=first["codec"] == replica.state.codec != "",
        uses_sharded=mine is not None and first["sharded_codec"] == coded != "",
    )


def _list_wanted(saved: SavedReplica, replica: Replica, match: _Match) -> dict[str, Slice]:
    """Return what this rank needs, by name."""
    wanted = {f"model/{name}": Slice.of(tensor) for name, tensor in model_tensors(replica.module).items()}
    common = saved.list_optimizer()
    if match.mine is not None:
        kinds = {"buffer": True, "feedback": match.uses_feedback, "sharded": match.uses_sharded}
        kinds |= dict.fromkeys(("model", "optimizer", "sync"), match.rule_goes_on)
        kinds["optimizer"] |= match.uses_own_optimizer
        kinds |= {"ema": match.rule_goes_on and replica.state.average is not None}
        for kind in [kind for kind, is_needed in kinds.items() if is_needed]:
            wanted |= saved.list_own(match.mine, kind)
        if kinds["optimizer"] and saved.list_own(match.mine, "optimizer"):
            common = {}
    else:
        for rank in match.sync_ranks:
            wanted |= saved.list_own(rank, "sync")
        if match.uses_feedback:
            common |= saved.list_feedback()
            # What a codec begins from is the same on all workers.
            first = saved.list_own(match.ranks[0], "feedback") if match.ranks else {}
            wanted |= {name: whole for name, whole in first.items() if split_name(name)[2] not in ADDED}
    if match.sync_ranks:
        wanted |= saved.list_own(match.ranks[0], "shared")
    parameters = dict(replica.module.named_parameters())
    stepped = {
        id(parameter) for group in local_optimizer(replica.optimizer).param_groups for parameter in group["params"]
    }
    if replica.state.average is not None and not any(name.startswith(f"rank{match.mine}/ema/") for name in wanted):
        for name, whole in saved.list_averages().items():
            if (owner := name.partition("/")[2]) in parameters:
                wanted[name] = Slice.of(parameters[owner])._replace(dtype=whole.dtype)
    for name, whole in common.items():
        kind, owner, _ = split_name(name)
        if owner in parameters and (kind == "feedback" or id(parameters[owner]) in stepped):
            held = Slice.of(parameters[owner])
            wanted[name] = held._replace(dtype=whole.dtype) if whole.shape == held.whole else whole
    return wanted


def _load(loaded: Mapping[str, Tensor], saved: SavedReplica, replica: Replica, match: _Match) -> None:
    """Take on all but what was copied into the model already."""
    own = _under(loaded, f"rank{match.mine}/")
    tensors, parameters = model_tensors(replica.module), dict(replica.module.named_parameters())
    for name, tensor in (_under(own, "buffer/") | _under(own, "model/")).items():
        local(tensors[name]).copy_(tensor)
    states = {}
    for name, tensor in (dict(loaded) | own).items():
        if name.startswith("optimizer/"):
            parameter = parameters[split_name(name)[1]]
            is_slice = isinstance(parameter, DTensor) and tensor.shape == local(parameter).shape
            states[name] = wrap(parameter, tensor.to(parameter.device)) if is_slice else tensor
    load_optimizer(replica.module, local_optimizer(replica.optimizer), states, saved.about["optimizer"]["scalars"])
    device = replica.group.device
    sync = [_under(loaded, f"rank{rank}/sync/", device) for rank in match.sync_ranks]
    # What all workers have in common may be the servers', who are sent it from host memory.
    replica.state.load_sync_state(sync, _under(loaded, f"rank{match.ranks[0]}/shared/") if match.ranks else {})
    if replica.shard.reduce_scatter is not None:
        replica.shard.reduce_scatter.load_state(_under(own, "sharded/", device))
    if replica.state.average is not None:
        replica.state.average.load(_under(own, "ema/") or _under(loaded, "ema/"))
    if match.uses_feedback:
        by_worker = [_under(loaded, f"rank{rank}/feedback/", device) for rank in match.ranks]
        if match.mine is None:  # it is one worker's, and shared out
            by_worker = [_under(loaded, "feedback/", device) | (by_worker[0] if by_worker else {})]
        replica.state.load_feedback(by_worker)


def _under(tensors: Mapping[str, Tensor], prefix: str, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it; where they are, unless a device is given."""
    return {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}


def _warn_of_dropped(saved: SavedReplica, replica: Replica, match: _Match) -> None:
    """Warn of residuals that cannot be used here."""
    state, num_workers = saved.state_of(0), len(saved.about["parts"][0])
    dropped = []
    if saved.holds_back("feedback") and not match.uses_feedback:
        here = f"codec {replica.state.codec!r}" if replica.state.codec else "no codec"
        dropped.append(
            f"residuals of codec {state['codec']!r} of {num_workers} workers are dropped, since {here} "
            f"runs among {replica.group.size} here; resume with the same codec and more than one worker to keep them"
        )
    if saved.holds_back("sharded") and not match.uses_sharded:
        dropped.append(
            f"residuals of sharded_codec {state['sharded_codec']!r} are dropped, since ranks hold "
            "other slices here, or it is another; resume with the same one in the same layout to keep them"
        )
    if saved.holds_back("sync") and not match.sync_ranks:
        dropped.append(
            f"residuals of the codec of sync {state['sync']!r} are dropped, since the rule begins anew here; "
            "resume with the same sync and the model cut in the same way to keep them"
        )
    if dropped:
        warnings.warn("; ".join(dropped), FeedbackDroppedWarning, stacklevel=3)
