"""Pieces of the status page: words, spans of time, badges, things to copy.

Pure. Whatever comes from a server goes through `esc` on its way into the page.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Check, Severity
from exporter.analysis.words import number

__all__ = [
    "WORDS",
    "badge",
    "clock_time",
    "confirm",
    "copied",
    "counted",
    "esc",
    "label",
    "not_help",
    "short",
    "span",
    "title",
]

WORDS: Final = {
    Severity.NONE: "No alarm",
    Severity.INFO: "Info",
    Severity.WARNING: "Warning",
    Severity.CRITICAL: "Critical",
}
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_EXACT: Final = 10.0
_MILLION, _MILLIARD, _HALF_OF_LAST_DIGIT = 1e6, 1e9, 0.9995
_UNITS: Final = ("ratio", "seconds", "total")
_SHORT: Final = {"kv": "KV", "dp": "DP"}


def esc(text: object) -> str:
    """Text that is nothing but text in HTML; letters that would move others about are question marks."""
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return escape(shown)


def clock_time(wall: float) -> str:
    """The time of day of unix seconds, as logs in containers have it."""
    second = int(wall % _DAY)
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02} UTC"


def badge(severity: Severity) -> str:
    """A severity: by its word, its shape and its colour."""
    shape = f'<svg aria-hidden="true"><use href="#i-{severity.value}"/></svg>'
    return f'<span class="badge {severity.value}">{shape}{WORDS[severity]}</span>'


def title(name: str) -> str:
    """The name of a verdict or finding as words."""
    return label(name, endings=False)


def label(name: str, *, endings: bool = True) -> str:
    """An identifier of ours as words; its unit stands with the number."""
    words = name.split("_")
    if endings and len(words) > 1 and words[-1] in _UNITS:
        words.pop()
    text = " ".join(_SHORT.get(word, word) for word in words)
    return esc(text[:1].upper() + text[1:])


def counted(count: int, word: str) -> str:
    """A number of things."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def short(name: str, value: float) -> str:
    """A number for a narrow place: as everywhere, but three digits of millions, as in the charts."""
    if value < _MILLION:
        return number(name, value)
    unit, sign = (_MILLION, "M") if value < _HALF_OF_LAST_DIGIT * _MILLIARD else (_MILLIARD, "G")
    return f"{value / unit:.3g}{sign}"


def span(seconds: float) -> str:
    """A span of time as people say it."""
    if seconds < _EXACT:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"
    return f"{seconds // _DAY:.0f} d {seconds % _DAY // _HOUR:.0f} h"


def copied(text: str) -> str:
    """Something to paste; its button comes to life with JavaScript.

    Where its number is not known there is none: who pastes it at night does not look at it again.
    """
    what = esc(text)
    button = f'<button type="button" class="copy" aria-label="Copy {what}">Copy</button>'
    return f'<p class="flag"><code>{what}</code>{"" if catalogue.UNKNOWN_VALUE in text else button}</p>'


def not_help(pairs: Iterable[tuple[str, str]]) -> str:
    """What looks like a cure and is none; fixes with the reasons."""
    table = catalogue.load()
    rows = []
    for name, reason in pairs:
        fix = table.fixes[name]
        flag = f" <code>{esc(fix.flag.split()[0])}</code>" if fix.flag else ""
        rows.append(f"<li><b>{esc(fix.title)}</b>{flag}: {esc(reason)}</li>")
    return f"<ul class='nothelp'>{''.join(rows)}</ul>"


def confirm(checks: Sequence[Check]) -> Iterator[str]:
    """How to see that a verdict is right, behind a line that can be opened."""
    if checks:
        yield "<details><summary>See it with your own eyes</summary><ul>"
        for check in checks:
            query = copied(" ".join(check.promql.split())) if check.promql else ""
            yield f"<li>{esc(check.text)}{query}</li>"
        yield "</ul></details>"
