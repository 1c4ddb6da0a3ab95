"""The Prometheus endpoint: text exposition over a very small HTTP/1.1 responder.

Owns the listening TCP socket (off by default, loopback). Every series exists from the start at 0, because a series that
appears with its first event hides that event from `rate()`. Limits: 8 KiB of request, 5 s, 16 connections at once;
/metrics and /health answer GET, everything else is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvd.config import parse_listen
from kvd.errors import ConfigError

REQUEST_BYTES_MAX: Final = 8192
REQUEST_TIMEOUT_S: Final = 5.0
CONNECTIONS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its samples are (labels, value)."""

    name: str
    kind: str  # counter, gauge
    meaning: str
    samples: Iterable[tuple[Mapping[str, str], float]]


def exposition(series: Iterable[Series]) -> str:
    """Prometheus text format 0.0.4."""
    lines = []
    for item in series:
        lines += [f"# HELP {item.name} {_escaped(item.meaning)}", f"# TYPE {item.name} {item.kind}"]
        for labels, value in item.samples:
            inside = ",".join(f'{name}="{_quoted(text)}"' for name, text in labels.items())
            shown = str(int(value)) if float(value).is_integer() else repr(float(value))
            lines.append(f"{item.name}{{{inside}}} {shown}" if inside else f"{item.name} {shown}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsServer:
    """Answers scrapes; `render` makes the text, `healthy` says what /health answers."""

    def __init__(
        self, listen: str, render: Callable[[], str], healthy: Callable[[], tuple[bool, str]]
    ) -> None:
        self._host, self._port = parse_listen(listen)  # checked with the configuration
        self._render = render
        self._healthy = healthy
        self._connections = 0
        self._server: asyncio.Server | None = None
        self.loopback = is_loopback(self._host)

    @property
    def address(self) -> tuple[str, int]:
        """Where it really listens (port 0 asks for any)."""
        if self._server is None:
            return self._host, self._port
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def start(self) -> None:
        """Listen. Raises ConfigError naming the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=REQUEST_BYTES_MAX, backlog=CONNECTIONS_MAX
            )
        except OSError as error:
            raise ConfigError(
                f"server.metrics_listen = {self._host}:{self._port} cannot be used: {error.strerror or error}",
                code="listen", key="server.metrics_listen", value=f"{self._host}:{self._port}",
            ) from error  # fmt: skip

    async def run(self) -> None:
        """Serve until cancelled; may be called again after it failed, and then listens again where it did before."""
        if self._server is None:
            await self.start()
        if self._server is not None:
            self._host, self._port = self.address
            try:
                async with self._server:
                    await self._server.serve_forever()
            finally:
                self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that is slow, gone or talks too much gets nothing
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "not HTTP\n")
        method, path = words[0], words[1].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "GET only\n")
        if path == b"/metrics":
            return _response(
                "200 OK", self._render(), "text/plain; version=0.0.4; charset=utf-8", method == b"HEAD"
            )
        if path in (b"/health", b"/healthz"):
            ok, text = self._healthy()
            return _response(
                "200 OK" if ok else "503 Service Unavailable", text + "\n", head=method == b"HEAD"
            )
        return _response("404 Not Found", "/metrics or /health\n")


def _response(status: str, text: str, kind: str = "text/plain; charset=utf-8", head: bool = False) -> bytes:
    body = text.encode()
    top = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return top.encode() + (b"" if head else body)
