"""Arguments as operators read them: what comes out of a template is text, and means what the author would write."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_dbpartition import templated
from airflow_dbpartition.assignment import LeastLoaded, RoundRobin
from airflow_dbpartition.domain import TransferPolicy
from airflow_dbpartition.errors import ConfigurationError


@pytest.mark.parametrize(
    ("reader", "value", "read"),
    [
        (templated.integer(1), 3, 3),
        (templated.integer(1), " 3 ", 3),
        (templated.integer(0), "0", 0),
        (templated.flag, True, True),
        (templated.flag, "True", True),
        (templated.flag, " false ", False),
        (templated.flag, "1", True),
        (templated.duration_s, 90, 90.0),
        (templated.duration_s, "90", 90.0),
        (templated.duration_s, "0.5", 0.5),
        (templated.duration_s, timedelta(minutes=2), 120.0),
        (templated.delay_s, 0, 0.0),
        (templated.optional(templated.duration_s), None, None),
        (templated.optional(templated.duration_s), "None", None),
        (templated.optional(templated.duration_s), " ", None),
        (templated.optional(templated.duration_s), "7", 7.0),
        (templated.one_of("wait", "fail"), "fail", "fail"),
        (templated.text(5), " abc ", "abc"),
        (templated.transfer_policy, True, TransferPolicy.ALWAYS),
        (templated.transfer_policy, "True", TransferPolicy.ALWAYS),
        (templated.transfer_policy, "false", TransferPolicy.NEVER),
        (templated.transfer_policy, "until_started", TransferPolicy.UNTIL_STARTED),
        (templated.json_object, {"a": 1}, {"a": 1}),
    ],
)
def test_text_means_what_the_author_would_write(reader: templated.Reader, value: Any, read: Any) -> None:
    assert reader("it", value) == read


@pytest.mark.parametrize(
    ("reader", "value", "words"),
    [
        (templated.integer(1), 0, "expected it to be an integer of at least 1, got 0"),
        (templated.integer(1), True, "got True"),
        (templated.integer(1), "three", "got 'three'"),
        (templated.integer(1), 1.5, "got 1.5"),
        (templated.integer(1), None, "got None"),
        (templated.flag, "perhaps", "expected it to be True or False, got 'perhaps'"),
        (templated.flag, 1, "got 1"),
        (templated.duration_s, 0, "expected it to be a timedelta or a positive number of seconds, got 0"),
        (templated.duration_s, "soon", "got 'soon'"),
        (templated.duration_s, "nan", "got 'nan'"),
        (templated.duration_s, float("inf"), "got inf"),
        (templated.duration_s, True, "got True"),
        (templated.duration_s, timedelta(seconds=-1), "got datetime.timedelta"),
        (templated.delay_s, -1, "expected it to be a timedelta or a number of seconds, got -1"),
        (templated.one_of("wait", "fail"), "stop", 'expected it to be "wait" or "fail", got \'stop\''),
        (templated.text(5), "", "expected it to be text of 1 to 5 characters, got ''"),
        (templated.text(5), "abcdef", "got 'abcdef'"),
        (templated.text(5), 5, "got 5"),
        (templated.transfer_policy, "sometimes", "expected transferable to be True, False"),
        (templated.assignment, "fair", 'expected assignment to be "round_robin"'),
        (templated.assignment, RoundRobin, "write RoundRobin(...)"),
        (templated.json_object, [1], "expected it to be a mapping, got list [1]"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_value_in_one_line(
    reader: templated.Reader, value: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        reader("it", value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_assignment_is_read_by_name_or_taken_as_it_is() -> None:
    assert isinstance(templated.assignment("assignment", "least_loaded"), LeastLoaded)
    strategy = RoundRobin()
    assert templated.assignment("assignment", strategy) is strategy


def test_a_template_is_known_by_its_braces_and_by_being_another_tasks_output() -> None:
    with DAG("asks"):

        @task
        def answer() -> int:
            return 42

        output = answer()
    assert templated.is_template("{{ ds }}")
    assert templated.is_template("{% if a %}1{% endif %}")
    assert templated.is_template(output)
    for value in ("plain", 3, None, {"a": "b"}, RoundRobin()):
        assert not templated.is_template(value)
