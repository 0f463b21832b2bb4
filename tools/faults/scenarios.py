"""Scenarios of the fault campaign: which training is hit, where and how, drawn from a seed."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

PHASES = ("data", "forward", "backward", "reduce", "update", "evaluate", "snapshot", "persist", "flush", "commit")
"""Phases of a step and of a checkpoint."""
RECOVERY_PHASES = ("vote", "open", "heal")
ANY, JOINER, LAUNCHER = -1, -2, -4
"""Numbers in place of a rank: the first worker that comes, one that joins, the launcher."""
NUM_STEPS, GLOBAL_BATCH = 24, 12
SETTINGS: dict[str, object] = {
    "num_steps": NUM_STEPS,
    "global_batch": GLOBAL_BATCH,
    "checkpoint_interval": 6,
    "evaluate_interval": 8,
    "evaluate_samples": 16,
    "num_threads": 1,
    "schedule.warmup_steps": 2,
    "loss.sample_tokens": 0,
    "model.width": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 32,
    "data.max_bytes": 300_000,
    "bucket_bytes": 4000,
}
EXACT = "every_step, exact"
RULES: dict[str, dict[str, object]] = {
    EXACT: {"sync": "every_step", "num_virtual_workers": 12},
    "every_step": {"sync": "every_step"},
    "every_step, one_bit": {"sync": "every_step", "sync.codec": "one_bit"},
    "every_step, top_k of gradients": {"sync": "every_step", "sync.codec": "top_k", "sync.codec_of": "gradient"},
    "every_step, power_sgd of gradients": {
        "sync": "every_step",
        "sync.codec": "power_sgd",
        "sync.codec_of": "gradient",
    },
    "local_sgd": {"sync": "local_sgd", "sync.period": 4},
    "post_local_sgd": {"sync": "post_local_sgd", "sync.period": 4},
    "diloco": {"sync": "diloco", "sync.period": 4},
    "adaptive_local_sgd": {"sync": "adaptive_local_sgd"},
    "hierarchical_local_sgd": {"sync": "hierarchical_local_sgd", "sync.period": 4, "sync.host_size": 2},
    "streaming_diloco": {"sync": "streaming_diloco", "sync.period": 6, "sync.num_fragments": 3},
    "scaffold": {"sync": "scaffold", "sync.period": 4},
    "easgd": {"sync": "easgd", "sync.period": 4},
    "easgd, asynchronous": {"sync": "easgd", "sync.period": 4, "sync.asynchronous": True},
    "dpsgd": {"sync": "dpsgd"},
    "choco_sgd": {"sync": "choco_sgd"},
    "push_sum": {"sync": "push_sum"},
    "adaptive_mixing": {"sync": "adaptive_mixing"},
    "ad_psgd": {"sync": "ad_psgd"},
    "asgd": {"sync": "asgd", "sync.num_standbys": 1},
    "ssp": {"sync": "ssp", "sync.num_standbys": 1},
    "parameter_server": {"sync": "parameter_server", "sync.num_standbys": 1},
}
OWN_PACE = ("easgd, asynchronous", "ad_psgd", "asgd", "ssp")
"""Rules whose workers do not step together."""
STARTING_AGAIN = ("easgd, asynchronous", "ad_psgd", "every_step, one_bit")
"""Rules whose workers may have to start again from a checkpoint when one is lost."""
GOING_ON = tuple(rule for rule in RULES if rule not in STARTING_AGAIN)
"""Rules whose workers go on without lost ones, and with new ones."""
JOINING = tuple(rule for rule in GOING_ON if rule not in ("dpsgd", "choco_sgd", "push_sum", "adaptive_mixing"))
"""Rules that agree on a boundary soon: gossip may take 20 steps, which is nearly the whole run."""
KINDS = {
    "kill": 62,
    "kill two at once": 6,
    "kill during recovery": 8,
    "kill a joining worker": 3,
    "kill the launcher": 4,
    "stop, continue": 4,
    "sleep": 2,
    "hold the interpreter": 2,
    "scale 4-3-2-5-4": 2,
    "join while it shrinks": 2,
    "old epoch": 2,
    "lost and doubled messages": 2,
    "attack on the control server": 2,
    "clock": 2,
    "disk full": 2,
    "I/O error": 2,
    "damaged checkpoint": 3,
    "NaN": 2,
    "flipped bit": 2,
    "link": 2,
}
"""Kinds of scenarios, each with its share in percent or so."""


@dataclass(frozen=True)
class Fault:
    """A fault of one process."""

    number: int
    kind: str
    rank: int
    step: int
    phase: str
    time_s: float = 0.0
    """Time for which it lasts, 0 for ever; a share of messages, or a shift of the clock."""


@dataclass(frozen=True)
class Scenario:
    """A training and what happens to it."""

    number: int
    name: str
    rule: str
    num_workers: int = 3
    faults: tuple[Fault, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    """Numbers of workers that are asked for, one after the other."""
    detail: str = ""
    """Way in which a checkpoint is damaged, or a link fails."""


_SLOW = Fault(9, "slow steps", ANY, 0, "", 0.1)


def draw(seed: int, number: int) -> Scenario:
    """Return a scenario."""
    chance = random.Random(f"{seed} {number}")
    name = chance.choices(list(KINDS), weights=list(KINDS.values()))[0]
    return _MAKERS.get(name, _make_kills)(name, number, chance)


def draw_all(seed: int, names: tuple[str, ...] = (), first: int = 0) -> Iterator[Scenario]:
    """Yield scenarios for ever, of some kinds if they are named."""
    for number in itertools.count(first):
        scenario = draw(seed, number)
        if not names or scenario.name in names:
            yield scenario


def _draw_step(chance: random.Random) -> int:
    return chance.randrange(2, NUM_STEPS - 6)


def _make_kills(name: str, number: int, chance: random.Random) -> Scenario:
    rules = list(RULES)
    rule = rules[number % len(rules)] if name == "kill" else chance.choice(rules)
    size = chance.choice((3, 3, 4)) if rule in GOING_ON else 3
    first, second = chance.sample(range(size), 2)
    step, phase = _draw_step(chance), chance.choice(PHASES)
    if phase in ("snapshot", "persist", "flush", "commit"):
        first, second = 0, second or first
    faults = [Fault(0, "kill", first, step, phase)]
    if name == "kill two at once":
        faults.append(Fault(1, "kill", second, step, chance.choice(PHASES[:5])))
    if name == "kill during recovery":
        rule = chance.choice(GOING_ON)
        faults.append(Fault(1, "kill", ANY, step, chance.choice(RECOVERY_PHASES)))
    if name == "kill a joining worker":
        rule = chance.choice(JOINING)
        faults.append(Fault(1, "kill", JOINER, 0, chance.choice(("open", "heal", "forward", "update"))))
    return Scenario(number, name, rule, size, tuple(faults))


def _make_launcher(name: str, number: int, chance: random.Random) -> Scenario:
    phase = chance.choice(PHASES)
    rank = 0 if phase in ("snapshot", "persist", "flush", "commit") else chance.randrange(3)
    fault = Fault(0, "kill launcher", rank, _draw_step(chance), phase)
    rule = chance.choice(list(RULES))
    return Scenario(number, name, rule, faults=(fault,), settings={"launcher_timeout_s": chance.choice((0, 60))})


def _make_stillness(name: str, number: int, chance: random.Random) -> Scenario:
    """Stop, sleep or hold for a time before, about or after those at which others notice."""
    kind = {"stop, continue": "stop", "sleep": "sleep", "hold the interpreter": "hold"}[name]
    times = {"stop": (0.5, 1.5, 3.0, 6.0), "sleep": (1.0, 5.0, 0.0), "hold": (1.0, 5.0, 0.0)}[kind]
    phase = chance.choice(("data", "forward", "backward", "reduce", "update"))
    fault = Fault(0, kind, chance.randrange(3), _draw_step(chance), phase, chance.choice(times))
    return Scenario(number, name, chance.choice(GOING_ON), faults=(fault,), settings={"hang_timeout_s": 4})


def _make_resize(name: str, number: int, chance: random.Random) -> Scenario:
    rule = chance.choice(JOINING)
    if name == "scale 4-3-2-5-4":
        return Scenario(number, name, rule, 4, (_SLOW,), sizes=(3, 2, 5, 4))
    fault = Fault(0, "kill", chance.randrange(4), 6, chance.choice(PHASES[:5]))
    return Scenario(number, name, rule, 4, (fault, _SLOW), sizes=(2, 3))


def _make_messages(name: str, number: int, chance: random.Random) -> Scenario:
    kill = Fault(0, "kill", chance.randrange(3), _draw_step(chance), chance.choice(PHASES[:5]))
    lost = Fault(1, "lose messages", ANY, 0, "", chance.choice((0.02, 0.1)))
    other = lost if name == "lost and doubled messages" else _SLOW
    return Scenario(number, name, chance.choice(GOING_ON), faults=(kill, other))


def _make_clock(name: str, number: int, chance: random.Random) -> Scenario:
    rank, step, shift_s = chance.choice((0, 1, LAUNCHER)), _draw_step(chance), chance.choice((-3600.0, 3600.0))
    kill = Fault(1, "kill", 2, step + 3, chance.choice(PHASES[:5]))
    return Scenario(number, name, EXACT, faults=(Fault(0, "clock", rank, step, "update", shift_s), kill))


def _make_disk(name: str, number: int, chance: random.Random) -> Scenario:
    phase = chance.choice(("persist", "flush", "commit"))
    return Scenario(number, name, chance.choice(list(RULES)), faults=(Fault(0, name, 0, _draw_step(chance), phase),))


def _make_damage(name: str, number: int, chance: random.Random) -> Scenario:
    fault = Fault(0, "kill launcher", chance.randrange(3), chance.randrange(14, 20), "forward")
    detail = chance.choice(("flipped bit", "cut", "swapped", "missing", "stale", "pickle", "path"))
    rule = chance.choice(list(RULES))
    return Scenario(number, name, rule, faults=(fault,), settings={"launcher_timeout_s": 0}, detail=detail)


def _make_spoilt(name: str, number: int, chance: random.Random) -> Scenario:
    fault = Fault(0, "NaN" if name == "NaN" else "flip", chance.randrange(3), _draw_step(chance), "")
    settings: dict[str, object] = {"anomalies.non_finite": "skip"}
    if name != "NaN":
        settings = {"gradient_hash_interval": 1, "on_divergence": "heal"}
    return Scenario(number, name, "every_step", faults=(fault,), settings=settings)


def _make_link(name: str, number: int, chance: random.Random) -> Scenario:
    """Cut off one of three hosts, on which workers are started as torchrun starts them."""
    detail = chance.choice(("down", "sends nothing", "receives nothing", "flaps"))
    rules = [rule for rule in RULES if rule not in OWN_PACE]
    fault = Fault(0, "link", chance.randrange(3), _draw_step(chance), chance.choice(PHASES[:5]))
    return Scenario(number, name, chance.choice(rules), faults=(fault,), detail=detail)


_MAKERS = {
    "kill the launcher": _make_launcher,
    "stop, continue": _make_stillness,
    "sleep": _make_stillness,
    "hold the interpreter": _make_stillness,
    "scale 4-3-2-5-4": _make_resize,
    "join while it shrinks": _make_resize,
    "old epoch": _make_messages,
    "lost and doubled messages": _make_messages,
    "attack on the control server": _make_messages,
    "clock": _make_clock,
    "disk full": _make_disk,
    "I/O error": _make_disk,
    "damaged checkpoint": _make_damage,
    "NaN": _make_spoilt,
    "flipped bit": _make_spoilt,
    "link": _make_link,
}
