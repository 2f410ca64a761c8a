"""Writes the Grafana dashboards: ``python dashboards/build.py``.

Exported names come from the metric table, vLLM's from the table of its names, colours and words from the
catalogue, thresholds from the configuration. ``generator/`` has one module per dashboard, which states the
question that each panel answers and its healthy state; ``panels.py`` knows the form of Grafana's JSON.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from generator import engine, fleet, own

__all__ = ["DASHBOARDS", "main", "text_of"]

FOLDER: Final = Path(__file__).parent
DASHBOARDS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "engine": engine.build,
    "fleet": fleet.build,
    "exporter": own.build,
}


def text_of(name: str) -> str:
    """Return a dashboard as it is committed: one key per line, so that diffs are readable."""
    return json.dumps(DASHBOARDS[name](), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write all dashboards into the folder of this file."""
    for name in DASHBOARDS:
        path = FOLDER / f"{name}.json"
        path.write_text(text_of(name), encoding="utf-8")
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
