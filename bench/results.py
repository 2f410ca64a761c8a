"""Keeps the results: a table for people and the main ratios for programs.

A run of some benchmarks replaces their rows and keeps the others'.
"""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench import Row

FOLDER: Final = Path(__file__).parent
ROWS: Final = FOLDER / "results.json"
TABLE: Final = FOLDER / "RESULTS.md"

# The promised ratios: (benchmark, row) -> name in results.json.
KEYS: Final[Mapping[tuple[str, str], str]] = {
    ("reader", "ratio, turns of five"): "reader_speedup_over_prometheus_client",
    ("peers", "one poll over the bare GET, in turns"): "poll_over_bare_get",
    ("peers", "CPU over Debian's Prometheus agent"): "cpu_over_prometheus_agent",
    ("peers", "CPU over vmagent"): "cpu_over_vmagent",
    ("peers", "CPU over requests and prometheus-client"): "cpu_over_requests_loop",
    ("serve", "resident memory over the bare process"): "resident_mib_over_bare",
    ("scale", "targets per core"): "targets_per_core",
}
# Notes below the heading of a benchmark.
NOTES: Final[Mapping[str, str]] = {
    "peers": """\
The GET, ours or the bare one, is the minimum cost of a poll: half is aiohttp's client, half the server and
the network. The section "poll" lists the additional work, measured without waiting in between;
after the wait for an answer the processor's caches are cold, and the same work takes a quarter longer. A
quarter of it is the regular expression that finds the 64 relevant lines among 600, at twice the cost of
finding the ends of lines; the rest is spread over all steps, and no function takes more than a tenth.
""",
}
_HEAD: Final = """\
# Results

`make bench` runs all benchmarks and writes this page; `python -m bench NAME` updates one part. Ratios compare
runs that took turns or ran at the same time; figures are medians unless stated otherwise. Eight of ten single
measurements lie between the two figures of the third column.

"""


def keep(name: str, rows: Sequence[Row]) -> None:
    """Replace one benchmark's rows and write both files."""
    kept = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}
    benchmarks = kept.get("benchmarks", {})
    benchmarks[name] = [asdict(row) | {"holds": row.holds} for row in rows]
    ratios = {
        key: round(row["figure"], 4)
        for (benchmark, what), key in KEYS.items()
        for row in benchmarks.get(benchmark, ())
        if row["what"] == what
    }
    document = {**ratios, "machine": machine(), "benchmarks": benchmarks}
    ROWS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    TABLE.write_text(_page(benchmarks), encoding="utf-8")


def machine() -> dict[str, str]:
    """Describe the machine without identifying it."""
    cpu = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory[1]) / (1 << 20):.0f} GiB" if memory else "unknown",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("aiohttp", "prometheus-client", "PyYAML")},
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _page(benchmarks: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [f"The machine, shared with other work: {about}.\n"]
    for name, rows in benchmarks.items():
        lines += [
            f"## {name}\n",
            *([NOTES[name]] if name in NOTES else []),
            "| what | figure | of ten | bar | |",
            "|---|---:|---:|---|---|",
        ]
        for row in rows:
            spread = "" if row.get("low") is None else f"{row['low']:.2f} to {row['high']:.2f}"
            bar = "" if row["bar"] is None else f"{row['side']} {row['bar']:g} {row['unit']}".strip()
            verdict = "" if row["bar"] is None else "holds" if row["holds"] else "**missed**"
            lines.append(
                f"| {row['what']} | {row['figure']:.2f} {row['unit']} | {spread} | {bar} | {verdict} |"
            )
        lines.append("")
    return _HEAD + "\n".join(lines)
