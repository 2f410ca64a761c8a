"""Who causes a forecast: a visit of the page and the API, but no other site, and no client that has left."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from support.metrics_text import scrape_of
from support.servers import until

from exporter.config import WhatIfConfig
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.page.renderer import Page
from exporter.publish.page.view import View
from exporter.publish.web import forecasts
from exporter.publish.web.app import WebServer, make_app
from exporter.publish.web.forecasts import PATH, Forecasts
from exporter.runtime.reload import PATH as RELOAD

ENGINE = {"load": {}, "limits": {}, "fixes": []}
FOREIGN = {"Sec-Fetch-Site": "cross-site"}


class Simulations:
    """Forecasts whose process never ends by itself."""

    def __init__(self, monkeypatch):
        self.started = self.ended = 0
        monkeypatch.setattr(Forecasts, "_run", self._run)
        self.forecasts = Forecasts(
            lambda: {"targets": [{"engines": {"0": ENGINE}}]}, WhatIfConfig(), lambda: 0.0
        )

    async def _run(self, _question):
        self.started += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


@pytest.fixture
def simulations(monkeypatch):
    """None so far."""
    monkeypatch.setattr(forecasts, "_LOOK_EVERY", 0.01)
    return Simulations(monkeypatch)


@asynccontextmanager
async def serving(simulations, visited=lambda: None):
    """The address of a server with the page, the forecasts, and a reload that always succeeds."""

    async def reload(_request):
        return aiohttp.web.Response(text="reloaded")

    page = Page(lambda: View(0.0, 1.7e9, (), {}), lambda: 0.0)
    app = make_app(scrape_of(ExporterMetrics(), PollCounts()), dict, page, visited)
    app.router.add_get(PATH, simulations.forecasts.answer)
    app.router.add_post(RELOAD, reload)
    server = WebServer(app, "127.0.0.1", 0)
    try:
        yield await server.start()
    finally:
        await server.stop()


@pytest.mark.parametrize(("method", "path"), [("POST", RELOAD), ("GET", PATH), ("HEAD", PATH)])
def test_a_page_of_another_site_causes_neither_a_reload_nor_a_forecast(simulations, method, path):
    """Whatever address its image or form has."""

    async def scenario():
        async with (
            serving(simulations) as base,
            aiohttp.ClientSession(base) as client,
            client.request(method, path, headers=FOREIGN) as answer,
        ):
            return answer.status

    assert asyncio.run(scenario()) == 403
    assert simulations.started == 0


def test_the_same_site_and_programs_may_reload(simulations):
    """Programs send no such header, and our own page is no other site."""

    async def scenario():
        async with serving(simulations) as base, aiohttp.ClientSession(base) as client:
            for headers in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
                async with client.post(RELOAD, headers=headers) as answer:
                    assert answer.status == 200

    asyncio.run(scenario())


def test_a_visit_of_the_page_asks_for_a_forecast_unless_another_site_opens_it(simulations):
    """It is shown all the same; its other addresses ask for nothing."""
    visits = []

    async def scenario():
        async with (
            serving(simulations, lambda: visits.append(1)) as base,
            aiohttp.ClientSession(base) as client,
        ):
            for path, headers in (("/", FOREIGN), ("/page.css", {}), ("/api/v1/history", {}), ("/", {})):
                async with client.get(path, headers=headers) as answer:
                    assert answer.status == 200
                assert len(visits) == (path == "/" and headers == {})

    asyncio.run(scenario())


def test_a_forecast_ends_when_its_only_client_is_gone(simulations):
    """The next client need not wait for it."""

    async def scenario():
        async with serving(simulations) as base, aiohttp.ClientSession(base) as client:
            asking = asyncio.create_task(client.get(PATH))
            await until(lambda: simulations.started == 1, "the simulation")
            async with client.get(PATH) as second:
                assert second.status == 429
            assert simulations.ended == 0
            asking.cancel()
            await until(lambda: simulations.ended == 1, "its end")
            assert not simulations.forecasts._lock.locked()

    asyncio.run(scenario())


def test_a_forecast_of_the_background_goes_on_when_a_client_leaves(simulations):
    """The client was told to come again."""

    async def scenario():
        async with serving(simulations) as base, aiohttp.ClientSession(base) as client:
            making = asyncio.create_task(simulations.forecasts.make("", "0", ENGINE))
            await until(lambda: simulations.started == 1, "the simulation")
            async with client.get(PATH) as answer:
                assert answer.status == 429
            assert simulations.ended == 0
            making.cancel()
            await asyncio.wait([making])

    asyncio.run(scenario())
