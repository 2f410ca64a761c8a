"""Words, numbers and times as the status page shows them. Pure."""

from typing import Final

from exporter.analysis.catalogue import Severity
from exporter.analysis.words import number

__all__ = ["SEVERITY_WORDS", "clock_time", "counted", "short", "span", "title"]

SEVERITY_WORDS: Final = {
    Severity.NONE: "No alarm",
    Severity.INFO: "Info",
    Severity.WARNING: "Warning",
    Severity.CRITICAL: "Critical",
}
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_EXACT: Final = 10.0
_MILLION, _BILLION, _HALF_OF_LAST_DIGIT = 1e6, 1e9, 0.9995
_ACRONYMS: Final = {"kv": "KV", "dp": "DP"}


def clock_time(wall: float) -> str:
    """Format the time of day of unix seconds as the logs of containers do."""
    second = int(wall % _DAY)
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02} UTC"


def title(name: str) -> str:
    """Turn the name of a verdict or a finding into words."""
    text = " ".join(_ACRONYMS.get(word, word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


def counted(count: int, word: str) -> str:
    """Format a number of things: ``1 engine``, ``2 engines``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def short(name: str, value: float) -> str:
    """Format a number for a narrow place: millions have three digits, as in the charts."""
    if value < _MILLION:
        return number(name, value)
    unit, sign = (_MILLION, "M") if value < _HALF_OF_LAST_DIGIT * _BILLION else (_BILLION, "G")
    return f"{value / unit:.3g}{sign}"


def span(seconds: float) -> str:
    """Format a span of time: ``4.2 s``, ``75 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < _EXACT:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"
    return f"{seconds // _DAY:.0f} d {seconds % _DAY // _HOUR:.0f} h"
