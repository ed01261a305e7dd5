"""task_data.py: what a rollout tells of its task."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from quartet.task_data import MAX_BYTES, read, told


def test_the_answer_comes_first_and_what_says_nothing_is_left_out() -> None:
    data = {"task": "x", "info": "", "user": None, "list": [], "answer": "é", "zero": 0}
    assert told(data) == '{"answer":"é","task":"x","zero":0}'
    assert told({}) == told({"answer": None, "info": {}}) == ""


def test_promise_1_what_does_not_fit_is_null_and_the_others_stay() -> None:
    data = {"tests": "x" * MAX_BYTES, "info": {"a": "é" * 1000}, "more": "y" * 2500, "answer": "42"}
    found = read(told(data))
    assert found == {"answer": "42", "info": {"a": "é" * 1000}, "tests": None, "more": None}


def test_what_json_lacks_is_text_or_null() -> None:
    data = {"answer": math.nan, "info": {"a": {1}}, "half": "\ud800", ("no", "name"): 1}
    assert read(told(data)) == {"answer": None, "info": {"a": "{1}"}, "half": "\ud800"}
    # Of data sets whose format is NumPy's.
    arrays = {"answer": np.array([1, 2]), "info": {"a": np.array([3])}, "level": np.float64(0.5)}
    assert read(told(arrays)) == {"answer": "[1 2]", "info": {"a": "[3]"}, "level": 0.5}


def test_what_is_no_object_is_not_read() -> None:
    for text in ("", "x", "[]", "1", "[" * 5000, json.dumps({"a": "x" * MAX_BYTES})):
        assert read(text) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


# Letter by letter they would take longer to make than all else here.
LONG = st.builds(str.__mul__, st.characters(), st.integers(300, 3000))


@given(st.dictionaries(st.text() | LONG, VALUES | LONG))
def test_promise_1_it_is_always_an_object_within_its_bytes(data: dict[str, Any]) -> None:
    text = told(data)
    assert len(text.encode()) <= MAX_BYTES
    found = read(text)
    assert (found or {}).keys() <= data.keys()
    assert all(value is None or value == data[name] for name, value in (found or {}).items())
