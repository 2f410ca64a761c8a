"""Prints a forecast as a table, and returns it as a dict for JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from exporter.simulation.whatif import NO_HELP, WORSE, Calibration, Comparison, Figure, Forecast, Row, spread

__all__ = ["render", "to_dict"]

# The words of the verdicts that are not their own word.
_WORDS: Final = {NO_HELP: "does not help", WORSE: "makes it worse"}
_COLUMNS: Final = (
    ("preempt/min", "preemptions_per_minute", "{:.1f}"),
    ("per request", "preemptions_per_request", "{:.2f}"),
    ("recomputed", "recomputed_ratio", "{:.1%}"),
    ("KV peak", "kv_peak_ratio", "{:.0%}"),
    ("queue s", "queue_seconds", "{:.2f}"),
    ("tokens/s", "output_tokens_per_second", "{:.0f}"),
    ("e2e p50", "e2e_p50_seconds", "{:.2f}"),
    ("e2e p95", "e2e_p95_seconds", "{:.2f}"),
)


def render(result: Forecast) -> str:
    """Return the forecast as a table for a terminal: each figure, and its ratio to the present."""
    header = ["change", *(title for title, _, _ in _COLUMNS), "verdict"]
    table = [header, *(_cells(row) for row in (result.present, *result.rows))]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines = [_trust(result.calibration), ""]
    for line in table:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    lines += ["", *_notes(result)]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    cells = [row.candidate.label]
    for _, name, form in _COLUMNS:
        figure = row.figures.get(name)
        text = "-" if figure is None else form.format(figure.mean)
        if figure is not None and figure.ratio is not None:
            text += f" x{figure.ratio:.2f}"
        cells.append(text)
    return [*cells, _WORDS.get(row.verdict, row.verdict)]


def _trust(calibration: Calibration) -> str:
    warning = "do not trust this forecast: " if calibration.trusted is False else ""
    return warning + calibration.sentence


def _notes(result: Forecast) -> Iterator[str]:
    yield (
        f"{result.seeds} runs each, {result.warm_up:.0f} s to warm up and {result.duration:.0f} s measured; "
        "ranked by throughput and latency, not by preemptions"
    )
    share = spread(result.present.figures.get("output_tokens_per_second"))
    yield f"the runs of the present differ by +-{share:.1%} in tokens/s"
    labels: dict[str, list[str]] = {}
    for row in (result.present, *result.rows):
        if row.candidate.note:
            labels.setdefault(row.candidate.note, []).append(row.candidate.label)
        if row.stuck:
            yield f"{row.candidate.label}: the engine stops for good: {row.stuck}"
    for note, changes in labels.items():
        yield f"{', '.join(changes)}: {note}"


def to_dict(result: Forecast) -> dict[str, Any]:
    """Return the forecast as a dict for JSON."""
    calibration = result.calibration
    return {
        "calibration": {
            "observed_preemptions_per_minute": calibration.observed,
            "simulated_preemptions_per_minute": _figure(calibration.simulated),
            "trusted": calibration.trusted,
            "sentence": _trust(calibration),
            "reason": calibration.sentence,
            "comparisons": [_comparison(each) for each in calibration.comparisons],
        },
        "simulated": {
            "seeds": result.seeds,
            "warm_up_seconds": result.warm_up,
            "seconds": result.duration,
            "step_times": [asdict(each) for each in result.step_times],
        },
        "now": _row(result.present),
        "candidates": [_row(row) for row in result.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "change": row.candidate.label,
        "fixes": list(row.candidate.fixes),
        "value": row.candidate.value,
        "parts": [{"fixes": list(each.fixes), "value": each.value} for each in row.candidate.parts],
        "note": row.candidate.note,
        "verdict": _WORDS.get(row.verdict, row.verdict),
        "outcome": row.verdict,
        "score": row.score,
        "stuck": row.stuck,
        "figures": {name: _figure(figure) for name, figure in row.figures.items()},
    }


def _comparison(each: Comparison) -> dict[str, Any]:
    return {
        "figure": each.name,
        "observed": each.observed,
        "simulated": each.simulated.mean,
        "band": list(each.band),
        "matches": each.matches,
    }


def _figure(figure: Figure) -> dict[str, float | None]:
    return {
        "mean": figure.mean,
        "least": figure.least,
        "most": figure.most,
        "ratio_to_now": figure.ratio,
        "ratio_least": figure.ratio_least,
        "ratio_most": figure.ratio_most,
    }
