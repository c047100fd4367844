"""/livez, /readyz and /metrics of one worker, on a small HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.worker.metrics import Metrics

Check = Callable[[], tuple[bool, str]]  # (well, why)


_SILENCE_S = 5.0  # a client that says nothing for so long keeps no thread


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A probe that hangs up early is no news either, and a traceback no line of a JSON log."""


class HealthServer:
    """Serves until closed.

    Args:
        port: TCP port on all interfaces (Kubernetes probes come from outside); 0 = any free one.
        live: whether the worker's loop turns; not so = restart it.
        ready: whether it can take work.

    Raises:
        ConfigurationError: the port cannot be had.
    """

    def __init__(self, port: int, *, live: Check, ready: Check, metrics: Metrics) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
                elif path in ("/livez", "/readyz"):
                    well, why = live() if path == "/livez" else ready()
                    self._answer(200 if well else 503, "text/plain; charset=utf-8", f"{why}\n".encode())
                else:
                    self._answer(404, "text/plain; charset=utf-8", b"there are /livez, /readyz and /metrics\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes every few seconds are no news."""

        try:
            self._server = _Server(("", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"cannot serve health on port {port}: {error}; choose another --health-port"
            ) from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="dbpartition-health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
