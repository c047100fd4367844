"""Amazon SNS for tests: moto's server, a topic whose messages can be counted, and a proxy that makes SNS unwell."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import boto3

from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port
from tests.worker.processes import PATIENCE_S, wait_until

REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}
_NAMESPACE = "http://sns.amazonaws.com/doc/2010-03-31/"
_ENTRIES = "PublishBatchRequestEntries.member."


def client(service: str, url: str) -> Any:
    return boto3.session.Session(
        aws_access_key_id="testing", aws_secret_access_key="testing", region_name=REGION
    ).client(service, endpoint_url=url)


class MotoServer:
    """moto's server, in a process of its own."""

    def __init__(self, directory: Path, guard: Guard) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._guard = guard
        self._process = SessionProcess(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            log_path=directory / "moto.log",
            environment={**os.environ, **CREDENTIALS},
            cwd=directory,
        )
        guard.add(self._process)
        wait_until(self._answers, "moto's server answers", logs=[directory / "moto.log"])

    def _answers(self) -> bool:
        assert self._process.exit_code is None
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5):
            return True
        return False

    def close(self) -> None:
        self._process.kill()
        self._guard.remove(self._process)

    def topic(self, name: str, *, fifo: bool = False) -> Topic:
        return Topic(self.url, f"{name}.fifo" if fifo else name, fifo=fifo)


class Topic:
    """A topic, and a queue that is given all that is published there."""

    def __init__(self, url: str, name: str, *, fifo: bool = False) -> None:
        sns, self._sqs = client("sns", url), client("sqs", url)
        attributes = {"FifoTopic": "true"} if fifo else {}
        self.arn = str(sns.create_topic(Name=name, Attributes=attributes)["TopicArn"])
        self._queue = self._sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"} if fifo else {})[
            "QueueUrl"
        ]
        queue_arn = self._sqs.get_queue_attributes(QueueUrl=self._queue, AttributeNames=["QueueArn"])["Attributes"]
        sns.subscribe(
            TopicArn=self.arn,
            Protocol="sqs",
            Endpoint=queue_arn["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )

    def receive(self) -> list[dict[str, Any]]:
        """Take every message there is: its body, where the attribute must say the same id."""
        bodies = []
        while found := self._sqs.receive_message(
            QueueUrl=self._queue, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for message in found:
                body = json.loads(message["Body"])
                assert message["MessageAttributes"]["message_id"]["StringValue"] == body["message_id"]
                bodies.append(body)
            self._sqs.delete_message_batch(
                QueueUrl=self._queue,
                Entries=[{"Id": str(at), "ReceiptHandle": m["ReceiptHandle"]} for at, m in enumerate(found)],
            )
        return bodies

    def counted(self) -> Counter[str]:
        """How often each message id has come."""
        return Counter(body["message_id"] for body in self.receive())


@dataclass(frozen=True)
class Refused:
    """How SNS refuses one entry of a PublishBatch."""

    code: str
    sender_fault: bool
    text: str = "the test says so"


@dataclass
class Call:
    """One PublishBatch: whose messages it brought, and which of them went on to SNS."""

    number: int
    sent: list[str]
    passed: list[str] = field(default_factory=list)
    answered: int = 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class SnsProxy:
    """Stands before moto's SNS. Use it as a context manager.

    Attributes:
        url: where workers find SNS.
        refuse: asked for each entry, by the body of its message: None lets it pass.
        calls: every PublishBatch that came, in order.
    """

    def __init__(self, moto: MotoServer) -> None:
        self._moto = moto
        self._port = free_port()
        self._changing = threading.Condition()
        self._server: _Server | None = None
        self._status: int | None = None  # answered instead of anything else
        self._broken_from: int | None = None
        self._held: set[int] = set()
        self.url = f"http://127.0.0.1:{self._port}"
        self.refuse: Callable[[Mapping[str, Any]], Refused | None] = lambda _body: None
        self.calls: list[Call] = []

    def __enter__(self) -> SnsProxy:
        self.listen()
        return self

    def __exit__(self, *_error: object) -> None:
        self.let_go(*self._held)
        self.stop_listening()

    @property
    def environment(self) -> dict[str, str]:
        """Of a worker that finds SNS here."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL_SNS": self.url}

    # --- mischief ----------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """Connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def listen(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with contextlib.suppress(OSError):  # whoever asked may have been killed
                    proxy._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = _Server(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer_with(self, status: int | None, *, from_call: int = 0) -> None:
        """Answer so, and pass nothing on, from the call of this number (from 0) on; None: be well again."""
        with self._changing:
            self._status, self._broken_from = status, from_call

    def hold_answers_of(self, *calls: int) -> None:
        """SNS gets these calls (from 0) and answers; each answer waits until it is let go."""
        with self._changing:
            self._held.update(calls)

    def let_go(self, *calls: int) -> None:
        with self._changing:
            self._held.difference_update(calls)
            self._changing.notify_all()

    # --- looking -----------------------------------------------------------------------------------------------

    def wait_for_answers(self, status: int, *, times: int) -> None:
        """Wait until so many calls were answered so."""
        wait_until(
            lambda: [call.answered for call in list(self.calls)].count(status) >= times, f"{times} answers of {status}"
        )

    def wait_until_held(self, number: int) -> None:
        """SNS has taken the messages of this call, and nobody knows of it yet."""
        wait_until(
            lambda: any(call.number == number and call.passed for call in list(self.calls)),
            f"SNS has answered call {number}, which is held",
        )

    # --- work --------------------------------------------------------------------------------------------------

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        if fields.get("Action") != "PublishBatch":
            _answer(request, *self._passed_on(request, body))
            return
        entries = _entries(fields)
        with self._changing:
            call = Call(len(self.calls), [json.loads(entry["Message"])["message_id"] for entry in entries])
            self.calls.append(call)
            broken = self._status is not None and call.number >= (self._broken_from or 0)
            status = self._status if broken else None
        if status is not None:
            call.answered = status
            _answer(request, status, b"<html>unwell</html>")
            return
        refused = {entry["Id"]: why for entry in entries if (why := self.refuse(json.loads(entry["Message"])))}
        rest = [entry for entry in entries if entry["Id"] not in refused]
        status, text = 200, _EMPTY_ANSWER
        if rest:
            status, text = self._passed_on(request, _with_entries(fields, rest))
        call.passed = [json.loads(entry["Message"])["message_id"] for entry in rest] if status == 200 else []
        with self._changing:
            self._changing.wait_for(lambda: call.number not in self._held, timeout=2 * PATIENCE_S)
        call.answered = status
        _answer(request, status, _with_refused(text, refused) if refused else text)

    def _passed_on(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._moto.port, timeout=30)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
            connection.request("POST", request.path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, HTTPException):
            return 502, b""
        finally:
            connection.close()


_EMPTY_ANSWER = (
    f'<PublishBatchResponse xmlns="{_NAMESPACE}"><PublishBatchResult><Failed/><Successful/></PublishBatchResult>'
    "<ResponseMetadata><RequestId>none</RequestId></ResponseMetadata></PublishBatchResponse>"
).encode()


def _answer(request: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
    request.send_response(status)
    request.send_header("Content-Type", "text/xml")
    request.send_header("Content-Length", str(len(text)))
    request.end_headers()
    request.wfile.write(text)


def _entries(fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The entries of a PublishBatch, each with its fields as they are called in the request."""
    found: dict[int, dict[str, str]] = {}
    for name, value in fields.items():
        if name.startswith(_ENTRIES):
            number, _, rest = name.removeprefix(_ENTRIES).partition(".")
            found.setdefault(int(number), {})[rest] = value
    return [found[number] for number in sorted(found)]


def _with_entries(fields: Mapping[str, str], entries: list[dict[str, str]]) -> bytes:
    """The request with these entries instead of its own."""
    kept = {name: value for name, value in fields.items() if not name.startswith(_ENTRIES)}
    for number, entry in enumerate(entries, start=1):
        kept.update({f"{_ENTRIES}{number}.{name}": value for name, value in entry.items()})
    return urlencode(kept).encode()


def _with_refused(text: bytes, refused: Mapping[str, Refused]) -> bytes:
    """The answer, with these entries among those that failed."""
    ElementTree.register_namespace("", _NAMESPACE)
    root = ElementTree.fromstring(text)
    result = root.find(f"{{{_NAMESPACE}}}PublishBatchResult")
    assert result is not None
    failed = result.find(f"{{{_NAMESPACE}}}Failed")
    if failed is None:
        failed = ElementTree.SubElement(result, f"{{{_NAMESPACE}}}Failed")
    for id_, why in refused.items():
        failed.append(
            ElementTree.fromstring(
                f'<member xmlns="{_NAMESPACE}"><Id>{id_}</Id><Code>{escape(why.code)}</Code>'
                f"<Message>{escape(why.text)}</Message><SenderFault>{str(why.sender_fault).lower()}</SenderFault></member>"
            )
        )
    return ElementTree.tostring(root)


@contextlib.contextmanager
def moto_server(directory: Path, guard: Guard) -> Iterator[MotoServer]:
    server = MotoServer(directory, guard)
    try:
        yield server
    finally:
        server.close()
