"""Renders the text of a scrape of some collectors."""

from prometheus_client import CollectorRegistry

from exporter.publish.metrics.samples import RowCollector
from exporter.publish.metrics.scrape import Scrape, encoder


def scrape_of(*collectors: RowCollector) -> Scrape:
    """Return a scrape of these collectors, each in its table of metrics."""
    tables = [
        (rows, [one for one in collectors if one.rows is rows])
        for rows in {id(one.rows): one.rows for one in collectors}.values()
    ]
    return Scrape(lambda: tables, CollectorRegistry())


def text_of(*collectors: RowCollector, accept: str = "") -> str:
    """Return its text at once: nothing in it waits."""
    work = scrape_of(*collectors)._make(*encoder(accept))
    try:
        while True:
            work.send(None)
    except StopIteration as end:
        return end.value.decode()
