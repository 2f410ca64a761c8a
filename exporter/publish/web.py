"""The exporter's web server: metrics, health, the state as JSON, a page that says where things are."""

import errno
import logging
import socket
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from exporter import __version__

__all__ = ["WebServer", "make_app"]

log = logging.getLogger(__name__)

# How long a scrape under way may take to finish when the exporter is told to stop. (aiohttp waits twice.)
_SHUTDOWN_SECONDS: Final = 0.5
# Larger answers are compressed in a thread: the loop has polls to start.
_COMPRESS_APART: Final = 1 << 18
_PLAIN: Final = "text/plain"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>vLLM preemption exporter</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem; max-width: 40rem; color-scheme: light dark }}
</style>
</head>
<body>
<h1>vLLM preemption exporter {version}</h1>
<p>Watches {target}: <strong>{state}</strong></p>
<ul>
<li><a href="metrics">metrics</a> for Prometheus</li>
<li><a href="api/v1/status">api/v1/status</a>, the state as JSON</li>
<li><a href="-/healthy">-/healthy</a> and <a href="-/ready">-/ready</a> for probes; neither depends on
vLLM</li>
</ul>
<p>vLLM writes a line to its access log for every poll unless it runs with
<code>--disable-access-log-for-endpoints /metrics</code>.</p>
</body>
</html>
"""


def make_app(registry: CollectorRegistry, status: Callable[[], Mapping[str, Any]]) -> web.Application:
    """The application.

    Args:
        registry: whose collectors do no I/O: they run on the event loop.
        status: the state now, ready for JSON.
    """

    async def metrics(request: web.Request) -> web.Response:
        encoder, content_type = _encoder(request.headers.get("Accept", ""))
        response = web.Response(
            body=encoder(registry),
            headers={"Content-Type": content_type},
            zlib_executor_size=_COMPRESS_APART,
        )
        response.enable_compression()
        return response

    async def healthy(_request: web.Request) -> web.Response:
        return web.Response(text="vllm-preemption-exporter is healthy\n")

    async def ready(_request: web.Request) -> web.Response:
        return web.Response(text="vllm-preemption-exporter is ready\n")

    async def state(_request: web.Request) -> web.Response:
        return web.json_response(status(), headers={"Cache-Control": "no-store"})

    async def page(_request: web.Request) -> web.Response:
        target = status()["targets"][0]
        text = _PAGE.format(
            version=escape(__version__), target=escape(target["url"]), state=escape(_state_of(target))
        )
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    app = web.Application(client_max_size=1024)
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", ready),
            web.get("/api/v1/status", state),
            web.get("/", page),
        ]
    )
    app.on_response_prepare.append(_add_headers)
    return app


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """The format that is asked for, the plain one where the question makes no sense."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder(_PLAIN)


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


def _state_of(target: Mapping[str, Any]) -> str:
    if target["up"] is None:
        return "not asked yet"
    return "up" if target["up"] else f"down ({target['error']})"


class WebServer:
    """Serves an application until it is stopped."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        """Prepare, without opening anything.

        Args:
            app: what to serve.
            host: address to listen on; ``::`` means every address, IPv4 too.
            port: 0 for any free one.
        """
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._host = host
        self._port = port

    async def start(self) -> str:
        """Listen, and return the base URL of the server.

        Raises:
            OSError: the address cannot be listened on.
        """
        try:
            listener = _listen(self._host, self._port)
        except OSError as problem:
            where = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
            why = str(problem.strerror or problem).partition(" (while")[0].lower()
            raise OSError(problem.errno, f"cannot listen on {where}: {why}") from problem
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        host, port = listener.getsockname()[:2]
        if host in ("::", "0.0.0.0"):  # noqa: S104 (a comparison)
            host = "localhost"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Finish the answers under way and close."""
        await self._runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; every address means both families where the machine has both."""
    if host == "::":
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except OSError as problem:
                if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
        log.info("no IPv6 here, listening on IPv4")
        host = "0.0.0.0"  # noqa: S104 (asked for)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
