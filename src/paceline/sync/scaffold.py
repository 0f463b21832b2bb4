"""SCAFFOLD: local SGD whose workers correct their gradients for how their data differ from everybody's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Size, Tensor

from paceline.registry import register
from paceline.sync.anchor import Anchor
from paceline.sync.periodic import Calendar, Feedback, PeriodicRule, PeriodicSynchroniser
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import LocalStep, Outcome, Site, Synchroniser


@register("scaffold")
class Scaffold(PeriodicRule):
    """Stochastic controlled averaging (SCAFFOLD; Karimireddy et al. 2020, arXiv:1910.06378).

    Each worker steps by g_i - c_i + c. At the end of a period c_i becomes the mean of the gradients g_i that the worker
    has had in it, c the mean of all c_i, and parameters their mean, all by the mass of the samples used. Where workers'
    data differ, local_sgd with a constant learning rate ends beside the optimum, and this does not. The first
    period is local_sgd's; so are all where data do not differ. With a period of 1 and SGD it is every_step while
    masses stay the same.

    On the wire are two all-reduces of the parameters' size a period, each with the codec. It holds six copies of
    the parameters. Clipping bounds each worker's own gradient, before the correction, which is not clipped.
    With plain SGD c_i is that of the paper's option II, (x - y_i) / (steps * learning rate) - c + c_i; written as a
    mean of gradients it does not depend on the optimizer or its rate. Masses are those of one period, where the
    paper samples workers that count alike; its outer learning rate is 1 here.
    """

    @property
    def reads_gradients(self) -> bool:
        """Yes: variates correct them."""
        return True

    def start_synchroniser(self, site: Site) -> Synchroniser | None:
        """Return what corrects and averages; a worker alone has nothing to correct."""
        return ScaffoldSynchroniser(site, self) if site.group.size > 1 else None

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Two all-reduces a period: parameters and control variates."""
        return super().traffic(shapes, num_workers) * 2


class ScaffoldSynchroniser(Synchroniser):
    """Averages parameters and control variates where workers meet, and corrects gradients in between.

    Args:
        site: Where it works.
        rule: The settings.
    """

    def __init__(self, site: Site, rule: Scaffold) -> None:
        self._site = site
        self._averaging = PeriodicSynchroniser(site, rule, Calendar(rule.period))
        self._exchanger = rule.start_differences(site.group, site.seed + 1)
        self._feedback = Feedback(self._exchanger, rule.codec, site, kind="feedback of variates")
        self._own = {name: torch.zeros_like(parameter) for name, parameter in site.parameters.items()}
        """This worker's control variates."""
        self._sums = {name: torch.zeros_like(parameter) for name, parameter in site.parameters.items()}
        """Of the gradients of the period, each times the mass of its samples."""
        self._common = Anchor("variates", self._sums, site.group, self._exchanger)
        self._sum_mass = 0.0
        self._mass = 0.0

    def meets(self, number: int) -> bool:
        """Meet at the end of a period."""
        return self._averaging.meets(number)

    def before_update(self, step: LocalStep) -> None:
        """Add the gradients to the period's, and correct them."""
        self._averaging.before_update(step)
        mass, self._mass = step.mass - self._mass, step.mass
        if not mass:
            return
        gradients = {name: p.grad for name, p in self._site.parameters.items() if p.grad is not None}
        # fp16 overflows now and then; the optimizer leaves such a step out.
        if all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            self._sum_mass += mass
            for name, gradient in gradients.items():
                self._sums[name].add_(gradient, alpha=mass)
        for name, parameter in self._site.parameters.items():
            correction = self._common.tensors[name].to(parameter.dtype) - self._own[name]
            if parameter.grad is not None:
                parameter.grad.add_(correction)
            elif bool(correction.any()):  # others use it
                parameter.grad = correction

    def after_update(self, step: LocalStep) -> Outcome:
        """Exchange and land at the end of a period."""
        outcome = self._averaging.after_update(step)
        if not self.meets(step.number):
            return outcome
        self._mass = 0.0
        if not step.total_mass:
            return outcome
        for name, total in self._sums.items():
            total.copy_(total / self._sum_mass if self._sum_mass else self._own[name])
            self._own[name].copy_(total)
        self._common.send(step.mass, step.total_mass, step.number)
        waited_s = self._common.arrive()
        self._common.land()
        for total in self._sums.values():
            total.zero_()
        self._sum_mass = 0.0
        return Outcome(outcome.waited_s + waited_s, outcome.wire_bytes + self._common.wire_bytes)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, parameters are the workers' mean, by the samples used since they last met."""
        with self._averaging.consensus():
            yield

    def shared_state(self) -> dict[str, Tensor]:
        """Return what workers have in common: parameters and control variates."""
        return self._averaging.shared_state() | self._common.state()

    def state(self) -> dict[str, Tensor]:
        """Return this worker's control variates, the sums of the period, and what codecs hold back."""
        state = self._averaging.state() | self._feedback.state()
        state |= {f"own/{name}": tensor for name, tensor in self._own.items()}
        return state | {f"sum/{name}": tensor for name, tensor in self._sums.items()}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Go on in the period; among another number of workers with no correction until they have met."""
        self._averaging.load_state(saved, shared)
        self._feedback.load_state(saved)
        if any(name.startswith("variates/") for name in shared):
            self._common.load_state(shared)
        rank = self._site.group.rank
        mine = saved[rank] if len(saved) == self._site.group.size else {}
        for name, own in self._own.items():
            own.copy_(mine.get(f"own/{name}", self._common.tensors[name]))
            self._sums[name].copy_(mine.get(f"sum/{name}", torch.zeros_like(own)))

    def document(self) -> dict[str, Any]:
        """Return this worker's masses in the period."""
        return {"averaging": self._averaging.document(), "mass": self._mass, "sum_mass": self._sum_mass}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Take them on."""
        self._averaging.load_document(document["averaging"])
        self._mass, self._sum_mass = document["mass"], document["sum_mass"]

    def close(self) -> None:
        """Let connections and threads go."""
        self._averaging.close()
        self._exchanger.close()
