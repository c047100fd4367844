"""CheckedPublisher: PublishBatch of Amazon SNS, where no answer is believed before each message was found in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as UnreachableError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from airflow_dbpartition.errors import ConfigurationError, UnskippableError

MOST_ENTRIES, MOST_BYTES = 10, 262_144  # SNS takes no more of them in one PublishBatch
TRIES, FIRST_WAIT_S, LONGEST_WAIT_S = 6, 0.2, 5.0  # of one PublishBatch: a few seconds; then the partition's retries

# SNS calls all of these the sender's fault, and they are: but not the message's. The first may be well in a moment.
_PASSING_CODES = {"KMSThrottling", "RequestThrottled", "Throttled", "Throttling", "ThrottlingException"}
_OTHERS_FAULTS = {
    "AuthorizationError",
    "EndpointDisabled",
    "InvalidSecurity",
    "KMSAccessDenied",
    "KMSDisabled",
    "KMSInvalidState",
    "KMSNotFound",
    "KMSOptInRequired",
    "NotFound",
    "PlatformApplicationDisabled",
}


class PublishError(Exception):
    """SNS did not take all messages, and no message is to blame."""


class _NotTakenError(Exception):
    """Some messages have to be sent again."""


@dataclass(frozen=True)
class Message:
    """A message, and the id that it has however often it is published."""

    id: str
    body: str

    @property
    def size_bytes(self) -> int:
        """As SNS counts: the body, and the attribute's name, type and value."""
        return len(self.body.encode()) + len("message_id") + len("String") + len(self.id)

    def entry(self, number: int, *, fifo: bool) -> dict[str, Any]:
        """This message in a PublishBatch.

        Args:
            fifo: for a FIFO topic, which drops repetitions itself for five minutes. Each message is a group of its own:
                partitions run side by side, so that there is no order to be kept.
        """
        return {
            "Id": str(number),
            "Message": self.body,
            "MessageAttributes": {"message_id": {"DataType": "String", "StringValue": self.id}},
            **({"MessageGroupId": self.id, "MessageDeduplicationId": self.id} if fifo else {}),
        }


def batches(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages in lots that one PublishBatch may hold: by number and by bytes."""
    batch: list[Message] = []
    size_bytes = 0
    for message in messages:
        if batch and (len(batch) == MOST_ENTRIES or size_bytes + message.size_bytes > MOST_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(message)
        size_bytes += message.size_bytes
    if batch:
        yield batch


class CheckedPublisher:
    """Publishes messages to one topic, and checks every entry of every answer.

    A PublishBatch that is answered with 200 may still carry entries that were refused. Each is one of three: the
    message is wrong (it is reported, and not sent again); SNS is not well, or does not mention it (it is sent again,
    and only it); the topic, its key or the credentials are wrong (an error, since no message is to blame).

    Args:
        topic_arn: the topic; its region is the client's.
        client: a boto3 client of SNS; by default one is made.
        before_call: called before each call; what it raises ends the publishing.
        first_wait_s: how long to wait before the second try of a call, at the most (seconds); it doubles.

    Raises:
        ConfigurationError: topic_arn is none.
    """

    def __init__(
        self,
        topic_arn: str,
        *,
        client: Any = None,
        before_call: Callable[[], None] = lambda: None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._client = client or sns_client(topic_arn)
        self._topic_arn = topic_arn
        self._fifo = topic_arn.endswith(".fifo")
        self._before_call = before_call
        self._first_wait_s = first_wait_s

    def publish(self, messages: Iterable[Message], *, most_refusals: int) -> dict[str, str]:
        """Publish every message; returns what SNS said of those that it refused, by message id.

        Args:
            most_refusals: so many messages may be refused.

        Raises:
            PublishError: SNS was not well in several tries, or something else than a message is wrong.
            UnskippableError: more messages were refused than may be.
        """
        refused: dict[str, str] = {}
        for batch in batches(messages):
            refused.update(self._publish_batch(batch))
            if len(refused) > most_refusals:
                raise UnskippableError(
                    f"SNS refused {len(refused)} messages, where {max(most_refusals, 0)} may still be refused in this "
                    f"partition; the last: {list(refused.values())[-1]}"
                )
        return refused

    def _publish_batch(self, batch: Sequence[Message]) -> dict[str, str]:
        left: Sequence[Message] = batch
        refused: dict[str, str] = {}
        tries = Retrying(
            stop=stop_after_attempt(TRIES),
            wait=wait_random_exponential(multiplier=self._first_wait_s, max=LONGEST_WAIT_S),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            for attempt in tries:
                with attempt:
                    self._before_call()
                    answer = self._client.publish_batch(
                        TopicArn=self._topic_arn,
                        PublishBatchRequestEntries=[
                            message.entry(number, fifo=self._fifo) for number, message in enumerate(left)
                        ],
                    )
                    found = _checked(answer, left)
                    refused.update(found.refused)
                    left = found.again
                    if left:
                        raise _NotTakenError(found.why)
        except (BotoCoreError, ClientError, _NotTakenError) as error:
            number = tries.statistics.get("attempt_number", 1)
            tried = "one try" if number == 1 else f"{number} tries"
            raise PublishError(
                f"{len(left)} of {len(batch)} messages were not published in {tried}: {error}"
            ) from error
        return refused


@dataclass(frozen=True)
class _Found:
    """What an answer says of the messages that were sent; it does not speak of those that SNS has taken."""

    refused: dict[str, str]
    again: list[Message]
    why: str


def _checked(answer: Mapping[str, Any], sent: Sequence[Message]) -> _Found:
    taken = {entry["Id"] for entry in answer.get("Successful", ())}
    failed = {entry["Id"]: entry for entry in answer.get("Failed", ())}
    refused: dict[str, str] = {}
    again: list[Message] = []
    why = "the answer does not mention them"
    for number, message in enumerate(sent):
        entry = failed.get(str(number))
        if entry is None:
            if str(number) not in taken:
                again.append(message)
            continue
        code = entry.get("Code")
        said = f"{code}: {entry.get('Message', '')}"
        if not entry.get("SenderFault") or code in _PASSING_CODES:
            again.append(message)
            why = said
        elif code in _OTHERS_FAULTS:
            raise PublishError(f"message {message.id} was refused, and the message is not to blame: {said}")
        else:
            refused[message.id] = said
    return _Found(refused, again, why)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return error.response.get("Error", {}).get("Code") in _PASSING_CODES or status == 429 or status >= 500
    return isinstance(error, (_NotTakenError, UnreachableError, HTTPClientError))


def sns_client(topic_arn: str) -> Any:
    """A client for the topic's region, with the credentials and the endpoint that boto3 finds in the environment.

    Raises:
        ConfigurationError: it is no topic's ARN.
    """
    parts = topic_arn.split(":") if isinstance(topic_arn, str) else []
    if len(parts) != 6 or parts[0] != "arn" or parts[2] != "sns":
        raise ConfigurationError(f"expected topic_arn to be arn:aws:sns:<region>:<account>:<topic>, got {topic_arn!r}")
    # Tries are counted in one place, which is not boto3.
    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1})
    return boto3.session.Session().client("sns", region_name=parts[3], config=config)
