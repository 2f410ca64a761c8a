"""The walls between the rooms of the house, and that nothing points at the place where it was built."""

import ast
import functools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support import PROGRAMS_ONLY

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "exporter"
# What computes and touches nothing: no clock, no file but its own tables, no network, no chance but its own.
PURE = frozenset({
    "array", "bisect", "collections", "csv", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
    "operator", "re", "types", "typing",
})  # fmt: skip
# What no room does: it runs no programs and starts no threads, and signals are the program's business.
NOBODY = frozenset({"concurrent", "multiprocessing", "signal", "subprocess", "threading"})
OUTSIDE = frozenset(sys.stdlib_module_names) - NOBODY


@dataclass(frozen=True)
class Room:
    """What the modules of a room may import.

    Attributes:
        ours: modules and packages of this project, beside those of the room itself.
        standard: of the standard library.
        others: of other projects.
    """

    ours: tuple[str, ...]
    standard: frozenset[str]
    others: tuple[str, ...] = ()


HTTP = frozenset({"asyncio", "socket", "ssl", "http"})
CLOCK = frozenset({"time", "datetime"})
# What the rooms to the right of the pipeline may know of it.
PIPELINE = ("exporter.__version__", "exporter.config", "exporter.net", "exporter.analysis")
# Whoever runs for hours or starts a program may use every room.
ALL = tuple(f"exporter.{room}" for room in (
    "__version__", "analysis", "config", "net", "publish", "rules", "runtime", "simulation", "standin",
    "vllm",
))  # fmt: skip
ROOMS = {
    "net": Room(("exporter.config",), OUTSIDE - CLOCK, ("aiohttp", "yarl")),
    "config": Room((), OUTSIDE - HTTP - CLOCK, ("yaml",)),
    "vllm": Room(
        ("exporter.__version__", "exporter.config", "exporter.net"),
        OUTSIDE - CLOCK,
        ("aiohttp", "multidict", "yarl"),
    ),
    "analysis": Room(
        ("exporter.config", "exporter.vllm.answers", "exporter.vllm.exposition", "exporter.vllm.names"),
        PURE | {"pathlib"},  # the catalogue's file
        ("yaml",),
    ),
    "simulation": Room(
        (
            "exporter.config", "exporter.analysis.kv_formulas", "exporter.analysis.lengths",
            "exporter.analysis.load_profile",
        ),
        PURE,
    ),
    "standin": Room(
        ("exporter.config", "exporter.simulation", "exporter.vllm.names", "exporter.vllm.recording"),
        OUTSIDE,
        ("aiohttp",),
    ),
    "publish": Room(
        (*PIPELINE, "exporter.vllm.exposition.EngineKey"),
        OUTSIDE - {"time"},
        ("aiohttp", "bcrypt", "jinja2", "multidict", "prometheus_client"),
    ),
    "rules": Room(
        (
            "exporter.config", "exporter.analysis.catalogue", "exporter.analysis.relief",
            "exporter.analysis.conditions", "exporter.analysis.situation.TWICE_MATTERS",
            "exporter.analysis.words",
            "exporter.publish.alerts.table", "exporter.publish.metrics.table", "exporter.vllm.names",
        ),
        OUTSIDE - HTTP - CLOCK,
        ("yaml",),
    ),
    "runtime": Room(
        (*PIPELINE, "exporter.publish", "exporter.vllm"),
        OUTSIDE | {"signal", "threading", "concurrent"},
        ("aiohttp", "prometheus_client", "yaml"),
    ),
    "commands": Room(ALL, OUTSIDE, ("aiohttp", "requests", "tqdm")),
}  # fmt: skip
# Outside of every room: the command line, and what Python itself looks for there.
HALL = {"__init__.py", "__main__.py", "cli.py"}
# A process of its own, started for one forecast: it alone of its room touches the world.
PROGRAMS = {"simulation/worker.py"}
MODULES = sorted(path for room in ROOMS for path in (PACKAGE / room).glob("**/*.py"))


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return _parsed(path.read_text(encoding="utf-8"))


_parsed = functools.cache(ast.parse)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, with the names that may be modules."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def crossed(path: Path, room: Room, name: str) -> set[str]:
    """The imports of a module that its room does not allow."""
    ours = (f"exporter.{name}", *room.ours)
    if str(path.relative_to(PACKAGE)) in PROGRAMS:
        return set()
    return {
        one
        for one in imports(path)
        if not (
            any(one == known or one.startswith(f"{known}.") or known.startswith(f"{one}.") for known in ours)
            or one.partition(".")[0] in room.standard
            or one.partition(".")[0] in room.others
        )
    }


def test_data_flows_one_way():
    """No room imports what lies to its right, and the pure ones nothing that touches the world."""
    crossings = {}
    for path in MODULES:
        name = path.relative_to(PACKAGE).parts[0]
        if found := crossed(path, ROOMS[name], name):
            crossings[str(path.relative_to(PACKAGE))] = found
    assert len(MODULES) > 100
    assert not crossings


def test_a_wall_is_seen(tmp_path, monkeypatch):
    """Each of these would be a way through it."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    unseen = []
    for room, line in (
        ("analysis", "import exporter.runtime.fleet"),
        ("analysis", "from exporter.runtime import fleet"),
        ("analysis", "from exporter.runtime.process import run"),
        ("analysis", "import prometheus_client"),
        ("analysis", "import time"),
        ("analysis", "from exporter.vllm.client import MetricsClient"),
        ("analysis", "from exporter.vllm import client"),
        ("analysis", "import subprocess"),
        ("simulation", "from exporter.analysis.history import History"),
        ("simulation", "import random"),
        ("publish", "from exporter.vllm.exposition import Snapshot"),
        ("publish", "from exporter.runtime.fleet import Fleet"),
        ("publish", "from exporter.runtime.poller import PollOutcome"),
        ("publish", "import time"),
        ("analysis", "from exporter.vllm.prober import Prober"),
        ("net", "from exporter.vllm.client import Answer"),
        ("config", "from exporter.vllm.names import NAMES"),
        ("runtime", "from exporter.commands import check"),
        ("runtime", "from exporter.simulation.run import run"),
        ("standin", "from exporter.publish.status import status_object"),
        ("commands", "import exporter.cli"),
        ("publish", "import threading"),
        ("vllm", "from exporter.analysis.history import History"),
        ("vllm", "from exporter.runtime import poller"),
        ("vllm", "import prometheus_client"),
        ("rules", "import requests"),
        ("config", "import asyncio"),
    ):
        path = tmp_path / room / "new.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import math\nfrom exporter.config import Config\n{line}\n")
        if not crossed(path, ROOMS[room], room):
            unseen.append((room, line))
    assert not unseen


def test_nothing_stands_outside_a_room():
    """Whoever looks for a module knows the room by what it does."""
    outside = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.glob("**/*.py")
        if path.relative_to(PACKAGE).parts[0] not in ROOMS
    }
    assert outside == HALL


def test_a_command_imports_no_other_command():
    """What two of them need stands in a module whose name begins with _."""
    crossing = {
        f"{path.name}: {name}"
        for path in (PACKAGE / "commands").glob("*.py")
        for name in imports(path)
        if name.startswith("exporter.commands.") and not name.split(".")[2].startswith("_")
    }
    assert not crossing


def test_every_command_has_the_same_two_functions():
    """`add_arguments(parser)` and `run(options, config)`: the command line needs no others."""
    wrong = []
    commands = sorted(PACKAGE.glob("commands/[!_]*.py"))
    for path in commands:
        body = parsed(path).body
        found = {node.name: len(node.args.args) for node in body if isinstance(node, ast.FunctionDef)}
        if (found.get("add_arguments"), found.get("run")) != (1, 2):
            wrong.append(path.name)
    assert len(commands) > 9
    assert not wrong


def lazy_imports(path: Path) -> set[str]:
    """The projects that a file imports inside a function, and ``import_module``."""
    tree = parsed(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {"import_module" for node in ast.walk(tree) if getattr(node, "attr", "") == "import_module"}
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
    return found


# Imports in a function, of what most processes never need.
LAZY = {
    "cli.py": {"import_module"},  # the command that was chosen
    "commands/_progress.py": {"tqdm"},  # an extra
    "config/options.py": {"difflib"},  # for a misspelt key
    "publish/page/renderer.py": {"jinja2"},  # when somebody opens the page
    "publish/web/app.py": {"exporter"},  # the web configuration
    "publish/web/passwords.py": {"bcrypt"},  # an extra
    "simulation/worker.py": {"concurrent", "multiprocessing"},  # several cores, which the sidecar never uses
}


def test_imports_stand_at_the_top():
    """But for those of the list; `--help` loads no command."""
    lazy = {str(path.relative_to(PACKAGE)): lazy_imports(path) for path in PACKAGE.glob("**/*.py")}
    assert {name: found for name, found in lazy.items() if found} == LAZY


def test_a_reading_of_the_clock_stands_in_few_places():
    """Where data moves between rooms; everywhere else time is a parameter."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.glob("**/*.py")
        if imports(path) & {"time", "datetime"}
    }
    rooms = ("runtime/", "standin/")
    # The push prints times that it is given; the forecast's process rests after each slice of CPU time.
    assert {name for name in readers if not name.startswith(rooms)} == {"publish/alerts/push.py", *PROGRAMS}


def test_the_pure_pipeline_loads_no_network():
    """Neither an HTTP client nor an event loop: a replay needs none."""
    code = "import sys, exporter.analysis.pipeline; print(*{'aiohttp', 'asyncio', 'ssl'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.split() == []


def test_only_one_shot_talks_use_requests():
    """What runs beside vLLM all day does not load it."""
    users = {path.name for path in PACKAGE.glob("**/*.py") if "requests" in imports(path)}
    assert not users & {"cli.py", "serve.py", "client.py", "record.py", "check.py"}


def test_what_a_quick_run_does_not_load_has_only_tests_of_programs():
    """A test without the mark in these folders would never run."""
    tests = [path for name in PROGRAMS_ONLY for path in (ROOT / "tests" / name).glob("test_*.py")]
    assert len(tests) >= 7
    assert [
        path.name for path in tests if "\npytestmark = pytest.mark.programs\n" not in path.read_text()
    ] == []


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
