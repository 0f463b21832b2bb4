"""Numbers that hold for any samples and tensor ranks, from micro-batches of two sizes and the first of a few ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from paceline.planner.products import Product
from paceline.planner.recorder import ENDS, PassRecord, PlaceRecord
from paceline.planner.trace import FIRST, LAST, TIED, WorkloadTrace
from paceline.simulator.training.traced_shape import (
    Amount,
    Dim,
    Length,
    TracedBlock,
    TracedEnds,
    TracedPass,
    TracedProduct,
)

_DIMS: tuple[Dim, ...] = ("rows", "columns", "depth", "batch")


def fit_places(
    one: WorkloadTrace, two: WorkloadTrace, shared: WorkloadTrace | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the blocks and ends of a `TracedShape`, and notes on what could not be told apart.

    Args:
        one: A micro-batch.
        two: A larger one.
        shared: The larger one on the first of a few tensor ranks; None if the model cannot be shared.
    """
    fitting = _Fitting(one, two, shared)
    blocks: list[TracedBlock] = []
    for name in two.places:
        if name == ENDS:
            continue
        block = fitting.block(name)
        if blocks and _is_alike(blocks[-1], block):
            blocks[-1] = blocks[-1].model_copy(update={"count": blocks[-1].count + 1})
        else:
            blocks.append(block)
    return {"blocks": tuple(blocks), "ends": fitting.ends()}, fitting.notes


def _is_alike(one: TracedBlock, other: TracedBlock) -> bool:
    update = {"name": "", "count": 1}
    return one.model_copy(update=update) == other.model_copy(update=update)


class _Fitting:
    """Traces, of which places are fitted one after another."""

    def __init__(self, one: WorkloadTrace, two: WorkloadTrace, shared: WorkloadTrace | None) -> None:
        self._one, self._two, self._shared = one, two, shared
        self.notes: list[str] = []

    def block(self, name: str) -> TracedBlock:
        """Return the numbers of a block."""
        large = self._two.places[name]
        shared = self._shared_place(name)
        return TracedBlock(
            name=name,
            forward=self._pass(name, "forward"),
            backward=self._pass(name, "backward"),
            parameters=self._parameters(name),
            kept_elements=self._amount(name, lambda place: place.kept_elements),
            kept_bytes=self._amount(name, lambda place: place.kept_bytes),
            kept_scores_elements=self._amount(name, lambda place: place.kept_scores),
            kept_products_elements=self._amount(name, lambda place: place.kept_products),
            input_elements=self._length(name, lambda place: place.inputs),
            output_elements=self._length(name, lambda place: place.outputs),
            reductions=0.0 if shared is None else _count_reduced(shared) / max(large.outputs, 1.0),
            context_elements=self._length(name, lambda place: place.context),
        )

    def ends(self) -> TracedEnds:
        """Return the numbers of all that is in no block."""
        shared = self._shared_place(ENDS)
        reduced = 0.0 if shared is None else _count_reduced(shared) / self._two.samples
        of_rank = self._two.working_bytes if self._shared is None else self._shared.working_bytes
        working = (self._one.working_bytes / 4, self._two.working_bytes / 4, of_rank / 4)
        return TracedEnds(
            forward=self._pass(ENDS, "forward"),
            backward=self._pass(ENDS, "backward"),
            first_parameters=self._parameters(FIRST),
            last_parameters=self._parameters(LAST),
            tied_parameters=self._parameters(TIED),
            reductions_elements=(0.0, reduced),
            working_elements=self._fit(*working),
        )

    def _shared_place(self, name: str) -> PlaceRecord | None:
        return None if self._shared is None else self._shared.places.get(name, PlaceRecord())

    def _parameters(self, name: str) -> Amount:
        number = float(self._two.parameters.get(name, 0))
        of_rank = number if self._shared is None else float(self._shared.parameters.get(name, 0))
        return self._fit(number, number, of_rank)

    def _length(self, name: str, read: Callable[[PlaceRecord], float]) -> Length:
        return _line(self._one, self._two, read(self._one.places[name]), read(self._two.places[name]))

    def _amount(self, name: str, read: Callable[[PlaceRecord], float]) -> Amount:
        shared = self._shared_place(name)
        large = read(self._two.places[name])
        return self._fit(read(self._one.places[name]), large, large if shared is None else read(shared))

    def _fit(self, small: float, large: float, of_rank: float) -> Amount:
        """Return the quantity that is `small` and `large` for the two micro-batches, and `of_rank` for a part of it.

        What ranks divide is the same share of what each sample adds and of what is there without any.
        """
        fixed, each = _line(self._one, self._two, small, large)
        size = 1 if self._shared is None else self._shared.tensor
        share = 0.0 if size == 1 or not large else min(1.0, max(0.0, (large - of_rank) / large * size / (size - 1)))
        return (fixed - fixed * share, each - each * share, fixed * share, each * share)

    def _pass(self, name: str, way: str) -> TracedPass:
        small, large = (getattr(trace.places[name], way) for trace in (self._one, self._two))
        return TracedPass(
            products=self._products(name, way, small, large),
            moved_elements=self._amount(name, lambda place: getattr(place, way).elements),
            fused_elements=self._amount(name, lambda place: getattr(place, way).fused_elements),
            moved_bytes=self._amount(name, lambda place: getattr(place, way).other_bytes),
            loss_elements=self._amount(name, lambda place: getattr(place, way).loss_elements),
            kernels=large.kernels,
        )

    def _products(self, name: str, way: str, small: PassRecord, large: PassRecord) -> tuple[TracedProduct, ...]:
        smaller: Sequence[Product | None] = small.products
        if not _match(small.products, large.products):
            self.notes.append(f"growth with samples of products in {name}, which are others for more samples")
            smaller = [None] * len(large.products)
        shared = self._shared_place(name)
        parts: Sequence[Product | None] = [None] * len(large.products)
        if shared is not None:
            of_rank = getattr(shared, way).products
            if _match(of_rank, large.products):
                parts = of_rank
            else:
                self.notes.append(f"products that tensor ranks share in {name}, where a rank has others")
        found: dict[TracedProduct, int] = {}
        for before, product, part in zip(smaller, large.products, parts, strict=True):
            fitted = self._product(before, product, part)
            found[fitted] = found.get(fitted, 0) + 1
        return tuple(product.model_copy(update={"count": count}) for product, count in found.items())

    def _product(self, small: Product | None, large: Product, part: Product | None) -> TracedProduct:
        ratio = self._one.samples / self._two.samples

        def line(field: str) -> Length:
            value = float(getattr(large, field))
            before = value * (ratio if field in ("rows", "flops", "elements") else 1.0)
            if small is not None:
                before = float(getattr(small, field))
            return _line(self._one, self._two, before, value)

        return TracedProduct(
            kind=large.kind,
            rows=line("rows"),
            columns=line("columns"),
            depth=line("depth"),
            batch=line("batch"),
            shared=None if part is None or self._shared is None else _find_shared(large, part, self._shared.tensor),
            flops=None if large.flops is None else line("flops"),
            elements=None if large.elements is None else line("elements"),
        )


def _count_reduced(place: PlaceRecord) -> float:
    return place.forward.reduced_elements + place.backward.reduced_elements


def _match(some: Sequence[Product], others: Sequence[Product]) -> bool:
    return [product.kind for product in some] == [product.kind for product in others]


def _find_shared(whole: Product, part: Product, size: int) -> Dim | None:
    for name in _DIMS:
        if getattr(part, name) * size == getattr(whole, name) and getattr(whole, name) > 1:
            return name
    return None


def _line(one: WorkloadTrace, two: WorkloadTrace, small: float, large: float) -> Length:
    """Return the size that is `small` and `large` for two micro-batches."""
    each = (large - small) / (two.samples - one.samples)
    fixed = small - each * one.samples
    return (0.0 if abs(fixed) < 1e-9 * abs(large) else fixed, each)
