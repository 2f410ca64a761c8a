"""The exporter's web server: metrics, health, the state as JSON, the status page."""

import asyncio
import errno
import gzip
import http
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from exporter.publish.metrics.scrape import Scrape
from exporter.publish.page.renderer import ASSETS, Answer, Page, assets
from exporter.publish.web.connections import Connections
from exporter.publish.web.forecasts import PATH as FORECASTS

if TYPE_CHECKING:
    from exporter.publish.web.webconfig import Guard

__all__ = ["WebServer", "make_app", "make_guard"]

log = logging.getLogger(__name__)

# Time for a scrape under way to finish when the exporter stops. (aiohttp waits twice.)
_SHUTDOWN_SECONDS: Final = 0.5
# Larger answers are compressed in a thread: the loop has polls to start.
_COMPRESS_APART: Final = 1 << 18
_FAST: Final = 1  # a level of gzip; text of metrics is full of repetitions
# A browser loads nothing from elsewhere and sends nothing there, and no text ever becomes markup.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
}
_ANY_IPV4: Final = "0.0.0.0"  # noqa: S104 (asked for)
_NO_WEIGHT: Final = re.compile(r"q\s*=\s*0(?:\.0*)?")
_READS: Final = frozenset({"GET", "HEAD"})
_NOT_KEPT: Final = "no-store"
_KEPT: Final = "public, max-age=31536000, immutable"


def make_app(
    scrape: Scrape,
    status: Callable[..., Mapping[str, Any] | Awaitable[bytes]],
    page: Page | None = None,
    visited: Callable[[], None] = lambda: None,
) -> web.Application:
    """Make the application; `status` returns the state (of a target by name) as an object or as JSON text.

    `visited` is called at each visit of the page, except from pages of other sites.
    """

    async def metrics(request: web.Request) -> web.Response:
        return await _packed(request, *await scrape.text(request.headers.get("Accept", "")))

    async def probe(request: web.Request) -> web.Response:
        return web.Response(text=f"vllm-preemption-exporter is {request.path.removeprefix('/-/')}\n")

    async def state(request: web.Request) -> web.Response:
        target = request.query.get("target")
        document = status() if target is None else status(target)
        if isinstance(document, Mapping):
            return web.json_response(document, headers={"Cache-Control": _NOT_KEPT})
        response = await _packed(request, await document, "application/json; charset=utf-8")
        response.headers["Cache-Control"] = _NOT_KEPT
        return response

    app = web.Application(client_max_size=1024, middlewares=[_refuse_other_sites])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/-/healthy", probe)
    app.router.add_get("/-/ready", probe)
    app.router.add_get("/api/v1/status", state)
    if page is not None:
        app.add_routes(_page_routes(page, visited))
    app.on_response_prepare.append(_add_headers)
    return app


def _of_other_site(request: web.Request) -> bool:
    """Whether a browser sends it for a page of another site."""
    return request.headers.get("Sec-Fetch-Site") == "cross-site"


@web.middleware
async def _refuse_other_sites(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what changes something or costs a simulation, if a page of another site causes it."""
    if _of_other_site(request) and (request.method not in _READS or request.path == FORECASTS):
        return web.Response(status=403, text="Requests from other sites are refused.\n")
    return await handler(request)


def _page_routes(page: Page, visited: Callable[[], None]) -> list[web.RouteDef]:
    async def view(request: web.Request) -> web.Response:
        if request.path == "/" and not _of_other_site(request):
            visited()
        make = page.html if request.path == "/" else page.history
        return _answer(request, make(request.query.get("engine"), request.query.get("target")), _NOT_KEPT)

    async def asset(request: web.Request) -> web.Response:
        files, version = assets()
        kept = _KEPT if request.query.get("v") == version else "no-cache"
        return _answer(request, files[request.path.rpartition("/")[2]], kept)

    pages = [web.get(path, view) for path in ("/", "/api/v1/history")]
    return pages + [web.get(f"/{name}", asset) for name in ASSETS]


def _answer(request: web.Request, answer: Answer, kept: str) -> web.Response:
    """Send an answer that was made before, compressed if the client accepts that."""
    headers = {"Content-Type": answer.content_type, "Cache-Control": kept, "Vary": "Accept-Encoding"}
    if _takes_gzip(request):
        return web.Response(body=answer.packed, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=answer.body, headers=headers)


def _takes_gzip(request: web.Request) -> bool:
    """Whether the client accepts gzip: named, and not with a weight of 0."""
    for part in request.headers.get("Accept-Encoding", "").lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() == "gzip":
            return not _NO_WEIGHT.fullmatch(weight.strip())
    return False


async def _packed(request: web.Request, body: bytes, content_type: str) -> web.Response:
    """Send a body, compressed if the client accepts that; a large one in a thread, and fast."""
    headers = {"Content-Type": content_type}
    if len(body) < _COMPRESS_APART:
        response = web.Response(body=body, headers=headers)
        if _takes_gzip(request):
            response.enable_compression()
        return response
    headers["Vary"] = "Accept-Encoding"
    if _takes_gzip(request):
        headers["Content-Encoding"] = "gzip"
        running = asyncio.get_running_loop()
        body = await running.run_in_executor(None, gzip.compress, body, _FAST)
    return web.Response(body=body, headers=headers)


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


class _Handler(web.RequestHandler):
    """aiohttp's handler, but silent about malformed requests.

    Anybody may send them before a password is checked: a line for each would fill the log, with contents that
    may be secret. The sender gets an error.
    """

    __slots__ = ("_headers",)

    def __init__(self, server: web.Server, headers: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]
        self._headers = headers

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except ValueError:  # aiohttp 3.14.3 lets an error about a bad URL through
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        # This answer bypasses the application; without the header it would show aiohttp's name and version.
        headers = {**_HEADERS, **self._headers(), "Server": "vllm-preemption-exporter"}
        response = web.Response(status=status, text=f"{http.HTTPStatus(status).phrase}\n", headers=headers)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError):
            super().log_exception(*args, **kw)


class WebServer:
    """Serves an application until it is stopped."""

    def __init__(self, app: web.Application, host: str, port: int, config_file: str | None = None) -> None:
        """Prepare, without opening anything.

        Args:
            app: the application.
            host: address to listen on; ``::`` is every address, including IPv4.
            port: 0 for any free one.
            config_file: of a web configuration, for TLS and basic authentication.

        Raises:
            ConfigError: the web configuration is invalid.
        """
        self._guard = make_guard(config_file) if config_file else None
        if self._guard is not None:
            app.middlewares.insert(0, self._guard.middleware)
            app.on_response_prepare.append(self._guard.headers)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._connections = Connections(self._protocol)
        app.middlewares.insert(0, self._connections.middleware)
        app.middlewares.append(self._connections.turns)
        self._host = host
        self._port = port
        self._listener: socket.socket | None = None
        self._door: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Return the base URL of the server; raises OSError if it cannot listen on the address."""
        try:
            listener = self._listener = _listen(self._host, self._port)
        except OSError as problem:
            why = str(problem.strerror or problem).partition(" (while")[0].lower()
            place = _place(self._host, self._port)
            raise OSError(problem.errno, f"cannot listen on {place}: {why}") from problem
        await self._runner.setup()
        if self._guard is not None:
            self._connections.context = self._guard.context
            self._watching = asyncio.create_task(self._watch(self._guard))
        self._door = await asyncio.get_running_loop().create_server(self._connections, sock=listener)
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._connections.context is None else "https"
        return f"{scheme}://{_place('localhost' if host in ('::', _ANY_IPV4) else host, port)}"

    async def stop(self) -> None:
        """Finish the answers under way and close; clients that do not read their answers are cut off."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._guard is not None:
            self._guard.passwords.close()
        if self._door is not None:
            self._door.close()
        if self._listener is not None:
            self._listener.close()
        await self._connections.close()
        server = self._runner.server
        transports = [handler.transport for handler in server.connections] if server else []
        await self._runner.cleanup()
        for transport in transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        if self._guard is not None:
            await self._guard.passwords.ended()

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # noqa: S101 (it was set up before it listens)
        return _Handler(server, lambda: self._guard.extra if self._guard else {})

    async def _watch(self, guard: "Guard") -> None:
        """Use the web configuration after each change."""
        while True:
            await asyncio.sleep(guard.seconds)
            if await guard.refresh():
                self._connections.context = guard.context
                self._connections.finish()


def make_guard(path: str) -> "Guard":
    """Load the web configuration of a file; raises ConfigError if it is invalid."""
    from exporter.publish.web import webconfig  # noqa: PLC0415 (most sidecars have none)

    return webconfig.Guard(path)


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; ``::`` is both families if the machine has both."""
    if host == "::":
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except OSError as problem:
                if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
        log.info("no IPv6 on this machine, listening on IPv4")
        host = _ANY_IPV4
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
