"""What is wrong with a YAML file is said with its line and its field."""

from __future__ import annotations

import msgspec
import pytest

from workers.yaml_lines import FaultError, decode, line_of, path_of, steps_of


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Slo(Section, frozen=True, kw_only=True):
    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        if self.ttft_s is not None and self.ttft_s <= 0:
            raise ValueError("ttft_s: it must be above 0")


class Rule(Section, frozen=True, kw_only=True):
    name: str
    slo: Slo | None = None
    headers: dict[str, Slo] = {}

    def __post_init__(self) -> None:
        if self.slo and self.slo.itl_s == 7:
            raise ValueError("slo.itl_s: seven")


class Tree(Section, frozen=True, kw_only=True):
    policies: list[Rule] = []
    names: dict[str, list[str]] = {}
    wait_s: float = 1.0
    rest: Slo = Slo()

    def __post_init__(self) -> None:
        if self.wait_s == 0:
            raise ValueError("wait_s: nothing waits")
        if (self.rest.itl_s or 0) > self.wait_s:
            raise ValueError("wait_s (1 s) must be longer than rest.itl_s (2 s)")


FAULTS = {
    "a value of the wrong type": (
        "policies:\n- name: a\n- name: b\n  slo:\n    itl_s: 1\n    ttft_s: soon\n",
        "f.yaml:6: policies[1].slo.ttft_s: Expected float | null, got str",
    ),
    "an unknown key points to that key": (
        "wait_s: 1\nrest:\n  itl_s: 1\n\n  # comment\n  colour: red\n",
        "f.yaml:6: rest.colour: unknown field",
    ),
    "an unknown key at the top": ("wait_s: 1\nwiat_s: 1\n", "f.yaml:2: wiat_s: unknown field; did you mean wait_s?"),
    "a misspelt key in a list in flow style": (
        "policies: [{name: a},\n {name: b,\n  slo: {ttft: 1}}]\n",
        "f.yaml:3: policies[1].slo.ttft: unknown field; did you mean ttft_s?",
    ),
    "a missing field points to what lacks it": (
        "policies:\n- name: a\n-\n  slo: {}\n",
        "f.yaml:4: policies[1].name: this field is required",
    ),
    "below a key that is free, the key is found": (
        "policies:\n- name: a\n  headers:\n    x-one: {ttft_s: 1}\n    x-two: {ttft_s: x}\n",
        "f.yaml:5: policies[0].headers.x-two.ttft_s: Expected float | null, got str",
    ),
    "below a key with dots": (
        "policies:\n- name: a\n  headers:\n    a.b:\n      c: 1\n",
        "f.yaml:5: policies[0].headers['a.b'].c: unknown field",
    ),
    "two free keys, one in the other": (
        "names:\n  x: [a]\n  y: [b,\n    3]\n",
        "f.yaml:4: names.y[1]: Expected str, got int",
    ),
    "a key that is a number": ("names:\n  x: [a]\n  7: [a]\n", "f.yaml:3: names.7: a key must be text"),
    "a check of our own in a section": (
        "policies:\n- name: a\n  slo:\n    ttft_s: -1\n",
        "f.yaml:4: policies[0].slo.ttft_s: it must be above 0",
    ),
    "a check of our own below a free key": (
        "policies:\n- name: a\n  headers:\n    x: {ttft_s: 1}\n    y:\n      ttft_s: 0\n",
        "f.yaml:6: policies[0].headers.y.ttft_s: it must be above 0",
    ),
    "a check of our own over two sections": (
        "policies:\n- name: a\n  slo:\n    itl_s: 7\n",
        "f.yaml:4: policies[0].slo.itl_s: seven",
    ),
    "a check of our own at the top": ("rest: {}\nwait_s: 0\n", "f.yaml:2: wait_s: nothing waits"),
    "a check that names a default first points to what the file has": (
        "policies: []\nrest:\n  itl_s: 2\n",
        "f.yaml:3: wait_s (1 s) must be longer than rest.itl_s (2 s)",
    ),
    "through a merge key": (
        "policies:\n- &base\n  name: a\n  slo:\n    ttft_s: 1\n- <<: *base\n  slo:\n    ttft_s: x\n",
        "f.yaml:8: policies[1].slo.ttft_s: Expected float | null, got str",
    ),
    "a merged value that is wrong": (
        "policies:\n- name: a\n  headers:\n    x: &slo\n      itl_s: 1\n    y:\n      <<: *slo\n      ttft_s: -2\n",
        "f.yaml:8: policies[0].headers.y.ttft_s: it must be above 0",
    ),
    "a key that stands twice": (
        "wait_s: 1\nrest: {}\nwait_s: 2\n",
        "f.yaml:3: the key 'wait_s' stands twice in the same mapping",
    ),
    "a key that stands twice, deeper": (
        "policies:\n- name: a\n  slo:\n    itl_s: 1\n    itl_s: 2\n",
        "f.yaml:5: the key 'itl_s' stands twice in the same mapping",
    ),
    "not YAML": ("wait_s: 1\n  rest: 2\n", "f.yaml:2: not YAML: mapping values are not allowed here"),
    "a tag": ("wait_s: !!python/name:os.system x\n", "f.yaml:1: not YAML: could not determine a constructor"),
    "a control character": ("wait_s: 1\nrest: \x01\n", "f.yaml:2: not YAML: special characters are not allowed"),
    "a date that is none": ("wait_s: 2024-13-45\n", "f.yaml: not YAML: month must be in 1..12"),
    "an alias to nothing": ("wait_s: 1\nrest: *nowhere\n", "f.yaml:2: not YAML: found undefined alias 'nowhere'"),
    "two documents": ("wait_s: 1\n---\nwait_s: 2\n", "f.yaml:2: not YAML: expected a single document"),
    "nothing": ("", "f.yaml: Expected object, got null"),
    "a list": ("- a\n", "f.yaml: Expected object, got array"),
    "a bottomless one": ("rest: " + "[" * 3000, "f.yaml: nested too deeply"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_line_and_field(fault: str) -> None:
    text, message = FAULTS[fault]
    with pytest.raises(FaultError) as caught:
        decode(text, Tree, source="f.yaml")
    assert str(caught.value).startswith(message)


def test_what_is_right_is_decoded() -> None:
    tree = decode("policies: [{name: a, slo: {ttft_s: 2}}]\nnames: {x: [y]}\n", Tree, source="f.yaml")
    assert tree == Tree(policies=[Rule(name="a", slo=Slo(ttft_s=2.0))], names={"x": ["y"]})


def test_a_path_is_read_and_written_in_one_way() -> None:
    assert steps_of("policies[1].slo.ttft_s") == ("policies", 1, "slo", "ttft_s")
    for path in ("policies[1].slo.ttft_s", "a", "a[0][1].x-tier", "a['b.c/d'][0].e", ""):
        assert path_of(steps_of(path)) == path


def test_a_field_that_is_not_there_has_the_line_of_what_is_around_it() -> None:
    text = "a: 1\nb:\n  - x: 1\n  - y: 1\n"
    assert line_of(text, ("b", 1, "y")) == 4
    assert line_of(text, ("b", 0, "nothing", "deeper")) == 3
    assert line_of(text, ("b", 7)) == 2
    assert line_of(text, ("nothing",)) is None
    assert line_of("", ("a",)) is None


def test_the_wording_of_msgspec_is_the_one_we_take_apart() -> None:
    """Where it changes, the line would be lost without an error."""
    for tree, words in (
        ({"colour": 1}, "Object contains unknown field `colour`"),
        ({"policies": [{}]}, "Object missing required field `name` - at `$.policies[0]`"),
        ({"names": {1: []}}, "Expected `str`, got `int` - at `key` in `$.names`"),
        ({"names": {"a": 1}}, "Expected `array`, got `int` - at `$.names[...]`"),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(tree, Tree)
        assert str(caught.value) == words
