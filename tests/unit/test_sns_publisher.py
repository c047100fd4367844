"""CheckedPublisher against a client that answers as told: which messages are sent again, reported, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("boto3")

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.demo import sns
from airflow_dbpartition.demo.sns import CheckedPublisher, Message, PublishError, batches, sns_client
from airflow_dbpartition.errors import ConfigurationError, StepInterruptedError, UnskippableError

TOPIC = "arn:aws:sns:eu-central-1:123456789012:records"
Answer = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


def all_well(entries: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {"Successful": [{"Id": entry["Id"]} for entry in entries], "Failed": []}


class Client:
    """Answers the first calls as it is told, and all others well."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.calls: list[dict[str, Any]] = []
        self._answers = list(answers)

    def publish_batch(self, **asked: Any) -> Mapping[str, Any]:
        self.calls.append(asked)
        answer = self._answers.pop(0) if self._answers else all_well
        if isinstance(answer, Exception):
            raise answer
        return answer(asked["PublishBatchRequestEntries"])

    def sent(self) -> list[list[str]]:
        """The message ids of each call."""
        return [
            [entry["MessageAttributes"]["message_id"]["StringValue"] for entry in call["PublishBatchRequestEntries"]]
            for call in self.calls
        ]


def failing(*numbers: int, code: str = "InternalError", fault: bool = False) -> Answer:
    """These entries of the call are refused."""

    def answer(entries: list[dict[str, Any]]) -> Mapping[str, Any]:
        refused = [{"Id": str(number), "Code": code, "Message": "no", "SenderFault": fault} for number in numbers]
        taken = [{"Id": entry["Id"]} for entry in entries if int(entry["Id"]) not in numbers]
        return {"Successful": taken, "Failed": refused}

    return answer


def messages(count: int) -> list[Message]:
    return [Message(f"m{number}", f"body {number}") for number in range(count)]


def publish(client: Client, count: int = 4, *, most_refusals: int = 10, **options: Any) -> dict[str, str]:
    publisher = CheckedPublisher(options.pop("topic", TOPIC), client=client, first_wait_s=0.001, **options)
    return publisher.publish(messages(count), most_refusals=most_refusals)


def client_error(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PublishBatch"
    )


# --- calls ---------------------------------------------------------------------------------------------------------


def test_ten_messages_go_into_a_call() -> None:
    client = Client()
    assert publish(client, 23) == {}
    assert [len(ids) for ids in client.sent()] == [10, 10, 3]
    assert client.calls[0]["TopicArn"] == TOPIC
    assert [entry["Id"] for entry in client.calls[2]["PublishBatchRequestEntries"]] == ["0", "1", "2"]


def test_no_message_is_no_call() -> None:
    client = Client()
    assert publish(client, 0) == {}
    assert client.calls == []


def test_a_message_for_a_fifo_topic_carries_its_id_for_sns_to_drop_repetitions_by() -> None:
    client = Client()
    publish(client, 1, topic=f"{TOPIC}.fifo")
    (entry,) = client.calls[0]["PublishBatchRequestEntries"]
    assert (entry["MessageDeduplicationId"], entry["MessageGroupId"]) == ("m0", "m0")
    publish(client, 1)
    (entry,) = client.calls[1]["PublishBatchRequestEntries"]
    assert not {"MessageDeduplicationId", "MessageGroupId"} & entry.keys()


@given(st.lists(st.integers(0, sns.MOST_BYTES - 100), max_size=60))
def test_no_call_holds_more_than_sns_takes_and_none_could_be_spared(sizes: list[int]) -> None:
    written = [Message(f"m{number}", "x" * size) for number, size in enumerate(sizes)]
    lots = list(batches(written))
    assert [message for lot in lots for message in lot] == written
    for lot in lots:
        assert 0 < len(lot) <= 10
        assert sum(message.size_bytes for message in lot) <= sns.MOST_BYTES
    for lot, following in pairwise(lots):
        assert len(lot) == 10 or sum(m.size_bytes for m in lot) + following[0].size_bytes > sns.MOST_BYTES


def test_sizes_are_counted_in_bytes_with_the_attribute() -> None:
    assert Message("m1", "ü\U0001f6eb").size_bytes == 6 + len("message_id" + "String" + "m1")


# --- entries -------------------------------------------------------------------------------------------------------


def test_entries_that_sns_could_not_take_are_sent_again_and_only_they() -> None:
    client = Client(failing(1, 3), failing(0))
    assert publish(client) == {}
    assert client.sent() == [["m0", "m1", "m2", "m3"], ["m1", "m3"], ["m1"]]


def test_an_entry_that_the_answer_does_not_mention_is_not_taken_for_published() -> None:
    client = Client(lambda entries: {"Successful": [{"Id": "0"}, {"Id": "2"}]}, lambda entries: {})
    assert publish(client) == {}
    assert client.sent() == [["m0", "m1", "m2", "m3"], ["m1", "m3"], ["m1", "m3"]]


def test_an_entry_that_is_both_taken_and_refused_counts_as_refused() -> None:
    client = Client(lambda entries: {**failing(2)(entries), "Successful": all_well(entries)["Successful"]})
    publish(client)
    assert client.sent()[1] == ["m2"]


def test_messages_that_are_wrong_are_reported_and_not_sent_again() -> None:
    client = Client(failing(0, 2, code="InvalidParameter", fault=True), failing(1, code="Other", fault=True))
    assert publish(client, 12) == {"m0": "InvalidParameter: no", "m2": "InvalidParameter: no", "m11": "Other: no"}
    assert len(client.calls) == 2


def test_wrong_messages_are_reported_though_others_have_to_be_sent_again() -> None:
    def both(entries: list[dict[str, Any]]) -> Mapping[str, Any]:
        wrong, unwell = failing(0, code="InvalidParameter", fault=True)(entries), failing(1)(entries)
        return {"Successful": [{"Id": "2"}, {"Id": "3"}], "Failed": [*wrong["Failed"], *unwell["Failed"]]}

    client = Client(both)
    assert publish(client) == {"m0": "InvalidParameter: no"}
    assert client.sent() == [["m0", "m1", "m2", "m3"], ["m1"]]


@pytest.mark.parametrize("code", ["KMSThrottling", "Throttled"])
def test_throttling_is_waited_for_though_sns_calls_it_the_senders_fault(code: str) -> None:
    client = Client(failing(0, 1, 2, 3, code=code, fault=True))
    assert publish(client) == {}
    assert len(client.calls) == 2


@pytest.mark.parametrize("code", sorted(sns._OTHERS_FAULTS))
def test_a_fault_of_the_topic_its_key_or_the_credentials_is_blamed_on_no_message(code: str) -> None:
    client = Client(failing(0, 1, 2, 3, code=code, fault=True))
    with pytest.raises(PublishError, match=f"m0 was refused, and the message is not to blame: {code}: no"):
        publish(client)
    assert len(client.calls) == 1


def test_every_error_that_sns_can_answer_a_batch_with_is_either_the_messages_or_not() -> None:
    """boto3 knows them; a new one has to be thought about."""
    shapes = sns_client(TOPIC).meta.service_model.operation_model("PublishBatch").error_shapes
    codes = {shape.metadata["error"]["code"] for shape in shapes if shape.metadata["error"].get("senderFault")}
    of_the_call = {code for code in codes if "Batch" in code}  # never said of an entry
    of_the_message = {"InvalidParameter", "ParameterValueInvalid", "ValidationException"}
    assert codes - of_the_call == of_the_message | sns._OTHERS_FAULTS | (sns._PASSING_CODES & codes)


def test_more_refusals_than_may_be_end_the_publishing_before_the_next_call() -> None:
    client = Client(failing(0, 1, 2, code="InvalidParameter", fault=True))
    with pytest.raises(UnskippableError, match=r"SNS refused 3 messages, where 2 may still be .*InvalidParam"):
        publish(client, 30, most_refusals=2)
    assert len(client.calls) == 1
    assert len(publish(Client(failing(0, 1, code="InvalidParameter", fault=True)), 30, most_refusals=2)) == 2


# --- calls that fail -----------------------------------------------------------------------------------------------

URL = "http://sns.example"
PASSING = [
    client_error("InternalError", 500),
    client_error("503", 503),
    client_error("Unknown", 429),
    client_error("Throttling", 400),
    EndpointConnectionError(endpoint_url=URL),
    ConnectTimeoutError(endpoint_url=URL),
    ReadTimeoutError(endpoint_url=URL),
    ConnectionClosedError(endpoint_url=URL),
]
LASTING = [
    client_error("NotFound", 404),
    client_error("AuthorizationError", 403),
    client_error("InvalidParameter", 400),
    NoCredentialsError(),
]


def named(error: Exception) -> str:
    return error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__


@pytest.mark.parametrize("error", PASSING, ids=named)
def test_a_call_that_fails_is_made_again(error: Exception) -> None:
    client = Client(error, error)
    assert publish(client) == {}
    assert len(client.calls) == 3


@pytest.mark.parametrize("error", PASSING, ids=named)
def test_an_outage_is_an_error_and_never_a_refusal(error: Exception) -> None:
    client = Client(*[error] * 50)
    with pytest.raises(PublishError, match="10 of 10 messages were not published in 6 tries"):
        publish(client, 30)
    assert len(client.calls) == 6


@pytest.mark.parametrize("error", LASTING, ids=named)
def test_what_somebody_has_to_change_is_an_error_at_once(error: Exception) -> None:
    client = Client(error)
    with pytest.raises(PublishError, match="4 of 4 messages were not published in one try"):
        publish(client)
    assert len(client.calls) == 1


def test_entries_that_are_never_taken_are_counted_in_the_error() -> None:
    client = Client(failing(1, 3), *[failing(0)] * 50)
    with pytest.raises(PublishError, match="1 of 4 messages were not published in 6 tries: InternalError: no"):
        publish(client)
    assert client.sent() == [["m0", "m1", "m2", "m3"], ["m1", "m3"], *[["m1"]] * 4]


def test_a_step_that_is_asked_to_stop_makes_no_further_call() -> None:
    calls_left = [None, None]

    def before_call() -> None:
        if not calls_left:
            raise StepInterruptedError("asked to stop")
        calls_left.pop()

    client = Client(*[client_error("InternalError", 500)] * 50)
    with pytest.raises(StepInterruptedError):
        publish(client, before_call=before_call)
    assert len(client.calls) == 2


# --- the client ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arn", ["", "records", "arn:aws:sqs:eu-central-1:1:records", "arn:aws:sns:eu", None, 5])
def test_what_is_no_topic_is_refused(arn: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected topic_arn to be arn:aws:sns:<region>"):
        CheckedPublisher(arn)


def test_the_client_is_of_the_topics_region_and_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SNS", "http://127.0.0.1:1")
    made = sns_client(TOPIC)
    assert made.meta.region_name == "eu-central-1"
    assert made.meta.endpoint_url == "http://127.0.0.1:1"
    assert made.meta.config.retries["total_max_attempts"] == 1
