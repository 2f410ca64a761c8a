"""The walls between the rooms of the house, and that nothing points at the place where it was built."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "exporter"
# Room -> what its modules must not import, whole packages and modules.
FORBIDDEN = {
    "vllm": (
        "exporter.analysis", "exporter.publish", "exporter.pipeline", "exporter.watch", "exporter.serve",
    ),
    "analysis": (
        "exporter.publish", "exporter.pipeline", "exporter.watch", "exporter.serve", "exporter.recording",
        "exporter.vllm.client", "exporter.vllm.probes",
        "aiohttp", "requests", "urllib.request", "http", "socket", "ssl",
        "time", "datetime", "asyncio", "threading", "logging",
    ),
    "simulation": (
        "exporter.publish", "exporter.pipeline", "exporter.watch", "exporter.serve", "exporter.recording",
        "exporter.vllm", "exporter.fake",
        "aiohttp", "requests", "urllib.request", "http", "socket", "ssl",
        "time", "datetime", "asyncio", "threading", "logging", "random", "os", "pathlib", "sys",
    ),
    "publish": ("exporter.vllm", "exporter.recording", "exporter.serve", "exporter.cli"),
}  # fmt: skip
# It moves no data: it writes the documentation, with a table from every room.
ALLOWED = {"publish/reference.py": ("exporter.vllm.names",)}
MODULES = sorted(path for room in FORBIDDEN for path in (PACKAGE / room).glob("**/*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, with the names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_data_flows_one_way(path):
    """No room imports what lies to its right, and the pure ones nothing that touches the world."""
    room = path.relative_to(PACKAGE).parts[0]
    crossed = {
        name
        for name in imports(path)
        for wall in FORBIDDEN[room]
        if (name == wall or name.startswith(f"{wall}."))
        and not name.startswith(ALLOWED.get(str(path.relative_to(PACKAGE)), ("nothing",)))
    }
    assert not crossed


def test_a_reading_of_the_clock_stands_in_few_places():
    """Where data moves between rooms; everywhere else time is a parameter."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.glob("**/*.py")
        if imports(path) & {"time", "datetime"}
    }
    # The push prints times that it is given; the fake server is a world of its own.
    assert readers <= {
        "fake.py",
        "watch.py",
        "serve.py",
        "check.py",
        "demo.py",
        "logs.py",
        "publish/alertmanager.py",
    }


def test_only_one_shot_talks_use_requests():
    """What runs beside vLLM all day does not load it."""
    users = {path.name for path in PACKAGE.glob("**/*.py") if "requests" in imports(path)}
    assert not users & {"cli.py", "serve.py", "watch.py", "web.py", "client.py", "record.py", "check.py"}


def texts() -> list[Path]:
    """Every text of the repository that is kept."""
    kept = []
    for path in sorted(ROOT.glob("**/*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts)
        if hidden or {"__pycache__", "build", "dist", "node_modules"} & {*parts} or not path.is_file():
            continue
        if path.suffix not in {".gz", ".png", ".lock", ".pyc"}:
            kept.append(path)
    return kept


def test_nothing_points_at_where_it_was_built():
    """No path of some machine, no folder beside the repository, no host of a registry."""
    telling = re.compile(
        r"\.\./shared|(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/|\bissue #?\d+\b|https?://[\w.-]*pypi"
    )
    own = Path(__file__)
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        if path != own
        for match in telling.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert not found
