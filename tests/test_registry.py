import importlib
import json
import pkgutil
from abc import abstractmethod
from enum import Enum
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

import paceline
from paceline.errors import SettingsError, UnknownNameError, missing_extra, unknown_name
from paceline.registry import Family, Settings, describe_fields, explain, find_variant, list_variants, register
from paceline.simulator.training.shapes import BertShape


class Shape(Family):
    family = "shape"

    @abstractmethod
    def area(self): ...


@register("circle")
class Circle(Shape):
    radius: float = Field(default=1.0, gt=0)

    def area(self):
        return 3 * self.radius**2


@register("ring")
class Ring(Circle):
    inner: float = 0.5

    @model_validator(mode="after")
    def _check_inner(self):
        if self.inner >= self.radius:
            raise ValueError(f"inner must be below radius, but got {self.inner} >= {self.radius}")
        return self


@register("square")
class Square(Shape):
    side: float
    corners: tuple[str, ...] = ("a", "b")

    def area(self):
        return self.side**2


class Colour(Enum):
    RED = "red"


class Drawing(Settings):
    shape: Shape = Circle()
    round_shape: Circle | None = None
    path: Path = Path("here")
    colour: Colour = Colour.RED
    layers: tuple[Shape, ...] = ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("circle", Circle()),
        ({"name": "circle"}, Circle()),
        ({"name": "circle", "radius": "2"}, Circle(radius=2)),
        (Circle(radius=3), Circle(radius=3)),
        ({"name": "square", "side": 2, "corners": ["x"]}, Square(side=2, corners=("x",))),
    ],
    ids=str,
)
def test_a_field_takes_a_variant_its_name_or_a_mapping(given, expected):
    drawing = Drawing(shape=given)
    assert type(drawing.shape) is type(expected)
    assert drawing.shape == expected
    assert drawing.shape.area() == expected.area()


def test_a_variant_knows_its_name_and_the_family_has_none():
    assert (Circle.name, Circle().name, Shape.name) == ("circle", "circle", "")
    assert find_variant(Shape, "ring") is Ring
    assert list_variants(Shape) == {"circle": Circle, "ring": Ring, "square": Square}


def test_part_of_a_family_takes_only_what_derives_from_it():
    assert list_variants(Circle) == {"circle": Circle, "ring": Ring}
    assert Drawing(round_shape={"name": "ring", "inner": 0.1}).round_shape == Ring(inner=0.1)
    assert Drawing(round_shape={"radius": 2}).round_shape == Circle(radius=2), "a variant itself needs no name"
    with pytest.raises(ValidationError, match="known: circle, ring"):
        Drawing(round_shape="square")


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(UnknownNameError) as caught:
        find_variant(Shape, "cirle")
    assert str(caught.value) == (
        "shape must be a known name, but got 'cirle'; did you mean 'circle'? known: circle, ring, square"
    )
    with pytest.raises(ValidationError) as refused:
        Drawing(shape={"name": "xyz"})
    assert explain(refused.value) == "shape must be a known name, but got 'xyz'; known: circle, ring, square"


def test_an_object_of_another_kind_is_refused_in_words():
    with pytest.raises(ValidationError, match="must be a registered name or settings, but got 5; known: circle, ring"):
        Drawing(shape=5)
    with pytest.raises(ValidationError, match="but got an object of object; known"):
        Drawing(shape=object())


@pytest.mark.parametrize("nothing", [{}, {"radius": 2}, {"name": None}, 5, None, ["circle"]], ids=str)
def test_what_names_no_variant_is_refused(nothing):
    with pytest.raises(ValidationError, match="shape"):
        Drawing(shape=nothing)


def test_a_family_itself_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Shape()


def test_a_class_without_a_method_of_its_family_is_refused_where_it_is_registered():
    with pytest.raises(
        SettingsError, match=r"Half must define all that its family shape asks for, but area is missing"
    ):

        @register("half")
        class Half(Shape):
            pass

    assert "half" not in list_variants(Shape)


def test_a_name_taken_by_another_class_is_refused():
    with pytest.raises(SettingsError, match=r"shape name 'circle' must be free, but .*Circle has it"):

        @register("circle")
        class Other(Shape):
            pass

    assert find_variant(Shape, "circle") is Circle


def test_registering_a_class_again_after_a_reload_replaces_it():
    def define():
        @register("reloaded")
        class Reloaded(Colours):
            pass

        return Reloaded

    class Colours(Family):
        family = "colour"

    first, second = define(), define()
    assert first is not second
    assert list_variants(Colours) == {"reloaded": second}


def test_the_same_name_in_two_families_is_two_things():
    class Sound(Family):
        family = "sound"

    @register("ring")
    class Ringing(Sound):
        pass

    assert find_variant(Sound, "ring") is Ringing
    assert find_variant(Shape, "ring") is Ring


def test_a_class_of_no_family_is_refused():
    with pytest.raises(SettingsError, match="Stray must derive from a family"):

        @register("stray")
        class Stray(Family):
            pass


def test_settings_are_frozen_keyword_only_and_know_their_fields():
    circle = Circle(radius=2)
    with pytest.raises(ValidationError, match="frozen"):
        circle.radius = 3
    with pytest.raises(TypeError, match="positional"):
        Circle(2)
    with pytest.raises(ValidationError) as refused:
        Circle(raduis=2)
    assert explain(refused.value) == (
        "a field of Circle must be a known name, but got 'raduis'; did you mean 'radius'? known: radius"
    )
    assert circle == Circle(radius=2)
    assert hash(circle) == hash(Circle(radius=2))


def test_a_bad_default_is_refused_like_a_bad_value():
    class Wrong(Settings):
        size: int = Field(default=0, ge=1)

    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Wrong()


def test_problems_are_told_one_a_line_with_path_rule_and_value():
    with pytest.raises(ValidationError) as refused:
        Drawing(shape={"name": "circle", "radius": -1}, layers=["circle", {"name": "square"}])
    assert explain(refused.value).splitlines() == [
        "shape.radius must be greater than 0, but got -1",
        "layers.1.side must be given",
    ]


def test_rules_of_our_own_are_told_in_their_own_words():
    class Counted(Settings):
        count: int = 1

        @field_validator("count")
        @classmethod
        def _check(cls, count):
            if count % 2 == 0:
                raise ValueError(f"must be odd, but got {count}")
            return count

    with pytest.raises(ValidationError) as refused:
        Counted(count=2)
    assert explain(refused.value) == "count: must be odd, but got 2"
    with pytest.raises(ValidationError) as refused:
        Drawing(shape={"name": "ring", "inner": 2})
    assert explain(refused.value) == "shape: inner must be below radius, but got 2.0 >= 1.0"


def take_two(model, batch):
    """Stand for a loss, or an optimizer."""


NOTHING = (0, 0, 0, 0)
EXAMPLES = {
    "function": {"path": f"{__name__}:take_two"},
    "edge_list": {"edges": [(0, 1), (1, 2)]},
    "per_worker": {"samples": 4},
    "files": {"path": "folder"},
    "mixture": {"sources": ({"name": "text"}, {"name": "images"})},
    "decoder": {"num_layers": 2, "width": 64},
    "trace": {"path": str(Path(__file__).with_name("failures.csv"))},
    "traced": {
        "title": "one block",
        "blocks": (
            {
                "name": "0",
                "forward": {},
                "backward": {},
                "parameters": NOTHING,
                "kept_elements": NOTHING,
                "input_elements": (0, 1),
                "output_elements": (0, 1),
            },
        ),
        "ends": {"forward": {}, "backward": {}, "working_elements": NOTHING},
    },
    "scripted": {"objective": "classification", "sample_s": (0.1,)},
}
"""Fields of variants that cannot be made of defaults alone."""


def all_variants():
    """Return every variant that Paceline registers, whatever module it is in."""
    for info in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not info.name.endswith("__main__") and ".triton_" not in info.name:  # kernels for GPUs need an extra
            importlib.import_module(info.name)

    def below(cls):
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    found = {v for v in below(Family) if v.name and v.__name__[0] != "_" and v.__module__.startswith("paceline.")}
    return sorted(found, key=lambda variant: (variant.family, variant.name))


@pytest.mark.parametrize("variant", all_variants(), ids=lambda variant: f"{variant.family}-{variant.name}")
def test_every_variant_survives_json(variant):
    made = variant(**EXAMPLES.get(variant.name, EXAMPLES["decoder"] if variant is BertShape else {}))
    text = json.dumps(made.model_dump(mode="json"))
    family = next(base for base in variant.__mro__ if "family" in vars(base))
    again = family.model_validate(json.loads(text))
    assert type(again) is variant
    assert again == made
    assert json.loads(made.model_dump_json()) == json.loads(text)
    assert family.model_validate(made.model_dump()) == made


def test_there_are_variants_of_every_family():
    assert {variant.family for variant in all_variants()} >= {
        "benchmark",
        "data",
        "learning-rate schedule",
        "model",
        "loss",
        "optimizer",
        "sync",
    }


def test_everything_inside_survives_json():
    drawing = Drawing(
        shape=Ring(radius=4),
        round_shape=Ring(inner=0.25),
        path=Path("/a/b"),
        layers=(Square(side=3, corners=()), Circle()),
    )
    again = Drawing.model_validate_json(drawing.model_dump_json())
    assert again == drawing
    assert [type(layer) for layer in again.layers] == [Square, Circle]
    assert json.loads(drawing.model_dump_json())["shape"] == {"name": "ring", "radius": 4.0, "inner": 0.5}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_cannot_hold_is_refused(value):
    """Or the saved run would be another: infinity becomes null in JSON, and null may mean "none"."""

    class Clipped(Settings):
        clip_norm: float | None = 1.0

    with pytest.raises(ValidationError, match="clip_norm"):
        Clipped(clip_norm=value)


class Documented(Circle):
    """Settings that say what they mean."""

    inner: float = 0.5
    """Size of the hole,

    in metres.
    """
    colour: str = "red"
    number: int = 3
    "Number of them."


class DocumentedBelow(Documented):
    colour: str = "blue"
    """Colour of the paint."""
    number: int = 4


def test_fields_are_described_by_the_text_below_them():
    assert describe_fields(DocumentedBelow) == {
        "radius": "",
        "inner": "Size of the hole,\n\nin metres.",
        "colour": "Colour of the paint.",
        "number": "Number of them.",
    }
    from_nowhere = type("FromNowhere", (Documented,), {"__annotations__": {"more": int}, "more": 3})
    assert describe_fields(from_nowhere)["colour"] == ""
    assert describe_fields(from_nowhere)["more"] == ""


def test_errors_of_names_and_extras_say_what_to_do():
    assert str(unknown_name("recipe", "x", [])) == "recipe must be a known name, but got 'x'; known: none"
    assert "pip install 'paceline[vision]'" in str(missing_extra("pillow", "vision", "reading images"))


def test_a_class_that_is_not_registered_says_how_to_register_it():
    class Oval(Shape):
        def area(self):
            return 1.0

    with pytest.raises(ValidationError, match=r'Oval must be registered; put @paceline.register\("oval"\) before'):
        Oval()
