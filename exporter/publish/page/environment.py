"""The templates of the status page, compiled when somebody first opens it."""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.analysis import catalogue
from exporter.analysis.words import label, number
from exporter.publish.page.text import SEVERITY_WORDS, clock_time, counted, short, span, title
from exporter.publish.terminal import inert

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["page_template"]


@cache
def page_template() -> "Template":
    """Load the page's template, with all that it includes."""
    import jinja2  # noqa: PLC0415 (1.5 MiB that an exporter whose page nobody opens does not need)

    def finalize(value: object) -> object:
        """Leave markup of the templates alone; everything else is text that must be printable."""
        return value if hasattr(value, "__html__") else inert(str(value))

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=finalize,
        auto_reload=False,
    )
    filters: dict[str, Any] = {
        function.__name__: function for function in (clock_time, counted, label, number, short, span, title)
    }
    environment.filters |= filters | {"word": SEVERITY_WORDS.__getitem__}
    environment.globals["placeholder"] = catalogue.UNKNOWN_VALUE
    return environment.get_template("page.html")


def _source(name: str) -> str:
    """Read a template without its indentation: it would be a quarter of the page."""
    text = Path(__file__).parent.joinpath("templates", name).read_text(encoding="utf-8")
    return re.sub(r"^[ ]+", "", text, flags=re.MULTILINE)
