"""What may be written to the database."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.storable import NotStorableError, check_json, dump_json, storable_text

storable_strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | storable_strings,
    lambda inner: st.lists(inner) | st.dictionaries(storable_strings, inner),
    max_leaves=20,
)


@given(json_values)
def test_json_values_pass_unchanged_and_survive_the_database(value: Any) -> None:
    assert check_json(value) == value
    assert json.loads(dump_json(check_json(value))) == value


def test_tuples_and_other_mappings_become_lists_and_dicts() -> None:
    checked = check_json(MappingProxyType({"a": (1, 2)}))
    assert checked == {"a": [1, 2]}
    assert type(checked) is dict


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"a": [1, float("nan")]}, "context['a'][1]", "nan is not a JSON number"),
        ({"a": float("-inf")}, "context['a']", "-inf is not a JSON number"),
        ({"a": "x\x00"}, "context['a']", "NUL"),
        ({"a": "\ud800"}, "context['a']", "lone surrogate"),
        ({"a": {1: 2}}, "context['a']", "expected string keys, got 1 (int)"),
        ({"x\x00": 2}, "context key 'x\\x00'", "NUL"),
        ({"a": object()}, "context['a']", "object is not JSON"),
        ({"a": {1, 2}}, "context['a']", "set is not JSON"),
        (b"bytes", "context", "bytes is not JSON"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(value: object, path: str, why: str) -> None:
    with pytest.raises(NotStorableError) as caught:
        check_json(value, "context")
    assert caught.value.path == path
    assert why in caught.value.why
    assert str(caught.value).startswith(f"{path}: ")


def test_json_text_is_compact_and_keeps_non_ascii_characters() -> None:
    assert dump_json({"a": [1, "é"]}) == '{"a":[1,"é"]}'


def test_json_text_with_nan_is_refused() -> None:
    with pytest.raises(ValueError):
        dump_json(float("nan"))


@given(st.text(), st.integers(min_value=200, max_value=400))
def test_any_text_becomes_writable_and_keeps_to_the_limit(text: str, limit: int) -> None:
    cleaned = storable_text(text, limit)
    assert "\x00" not in cleaned
    cleaned.encode("utf-8")
    assert len(cleaned) <= limit


def test_of_a_long_text_the_beginning_and_the_end_are_kept() -> None:
    cleaned = storable_text("begin" + "x" * 10_000 + "the cause", 400)
    assert cleaned.startswith("begin")
    assert cleaned.endswith("the cause")
    assert "characters left out" in cleaned
    assert len(cleaned) == 400


def test_nul_and_lone_surrogates_are_replaced_and_not_dropped() -> None:
    assert storable_text("a\x00b\ud800c") == "a\\0b\\ud800c"


def test_an_error_object_is_told_by_its_text() -> None:
    assert storable_text(ValueError("broken")) == "broken"
