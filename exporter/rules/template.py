"""Template code in annotations, which Prometheus runs for each alert: names, numbers, fixes, links.

It has queries where the direct push has values. Fixes are only in the description: in an expression three
fixes would be three alerts, and as a label a new order would close one page and open another.

``{{-`` removes the white space before it, so code may be on lines of its own in the file.
"""

from collections.abc import Iterable, Sequence

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Scope, Verdict
from exporter.analysis.relief import limit_words
from exporter.analysis.words import Signal
from exporter.publish.alerts.table import (
    FIXES_HEAD,
    FIXES_SHOWN,
    GAIN_WORDS,
    PAIR_WORDS,
    description,
    fix_line,
    subject,
)
from exporter.rules.promql import Series

__all__ = ["asked", "fixes_of", "gateway_limit", "lines", "matchers", "number", "one_of", "place", "text"]


def place(labels: Sequence[str], server: str) -> str:
    """Return code for cluster, namespace and server, as far as they are known: `` (eu/prod/vllm-0)``."""
    parts = [f"$labels.{label}" for label in ("cluster", "namespace", server) if label in labels]
    form = "/".join(["%s"] * len(parts))
    # Labels that are absent leave only their slashes, which are removed.
    slashes = 'reReplaceAll "^/+|/+$|(/)/+" "$1"'
    return f'{{{{ with {slashes} (printf "{form}" {" ".join(parts)}) }}}} ({{{{ . }}}}){{{{ end }}}}'


def matchers(labels: Sequence[str]) -> str:
    """Return code that sets the variable ``$of`` to matchers for the labels of the alert.

    A label that the alert lacks becomes ``name=""``, which matches series that lack it too.
    """
    form = ",".join(f"{label}=%q" for label in labels)
    values = " ".join(f"$labels.{label}" for label in labels)
    return f"{{{{- $of := printf `{form}` {values} -}}}}\n"


def asked(expr: str) -> str:
    """Return code that runs a query; each ``%s`` in it becomes the matchers in ``$of``."""
    return f"query (printf `{expr}` {' '.join(['$of'] * expr.count('%s'))})"


def number(one: Signal, expr: str) -> str:
    """Return code, on a line of its own, that prints a number with its words, or nothing if it is unknown.

    `expr` is PromQL of one value, with ``%s`` for the matchers.
    """
    scale, sign = ("100 * ", "%%") if one.unit == "ratio" else ("", "")
    words = one.phrase(f'{{{{ . | first | value | printf "%.{one.digits}f{sign}" }}}}')
    return f'\n{{{{- with {asked(scale + expr)} }}}}{{{{ $sep }}}}{words}{{{{ $sep = ", " }}}}{{{{ end }}}}'


def gateway_limit(series: Series, within: str = "") -> tuple[str, str]:
    """Return code that puts the limit for a gateway into words, and a condition under which there is none.

    `within` is as of `lines`.
    """
    known = limit_words("{{ . | first | value }}")
    smallest = f"min({series.last('gateway_limit_requests', '%s')}{within})"
    words = f"{{{{ with {asked(smallest)} }}}}{known}{{{{ else }}}}{limit_words(None)}{{{{ end }}}}"
    return words, asked(f"{smallest} == Inf")


def lines(entry: Verdict | Finding, series: Series, within: str = "") -> str:
    """Return code that prints the advised fixes, one per line, by rank at the time of the alert.

    Args:
        entry: has the fixes that are printed by title; others are printed by id.
        series: have the ranks, for a format of ``printf``.
        within: PromQL after the ranks that keeps some of them, with ``%s`` for the matchers.
    """
    ranks = f"min by (fix) ({series.last('fix_rank', '%s')}{within})"
    first = asked(f"sort(bottomk({FIXES_SHOWN}, {ranks}))")
    line = _numbers(series) + fix_line("{{ . | value }}", _titles(entry.fixes), gain="{{ $gain }}{{ $pair }}")
    return f"\n{{{{- with {first} }}}}\n{FIXES_HEAD}\n{{{{- range . }}}}\n{line}\n{{{{- end }}}}{{{{ end }}}}"


def _numbers(series: Series) -> str:
    """Return code that reads the value and the gains of the fix of a line, with their words."""
    code = '{{- $fix := . | label "fix" }}{{- $value := "" }}{{- $gain := "" }}{{- $pair := "" }}\n'
    for variable, name, words in (
        ("value", "fix_value", " %v"),
        ("gain", "fix_gain_ratio", GAIN_WORDS),
        ("pair", "fix_pair_gain_ratio", PAIR_WORDS),
    ):
        found = f"query (printf `max({series.last(name, 'fix=%q,%s')})` $fix $of)"
        put = f'{{{{- ${variable} = . | first | value | printf "{words}" }}}}'
        code += f"{{{{- with {found} }}}}{put}{{{{ end }}}}\n"
    return code


def _titles(fixes: Iterable[str]) -> str:
    """Return code that turns the label ``fix`` into its title and flag."""
    cases = "\n{{- else ".join(f'if eq . "{name}" }}}}{_title(name)}' for name in fixes)
    words = '{{ reReplaceAll "_" " " . }}'
    chosen = f"\n{{{{- {cases}\n{{{{- else }}}}{words}{{{{ end }}}}" if cases else words
    return f'{{{{ with . | label "fix" }}}}{chosen}{{{{ end }}}}'


def _title(name: str, *, ranked: bool = True) -> str:
    fix = catalogue.load().fixes[name]
    flag = fix.flag
    if flag and "{value}" in flag:
        flag = fix.flag_name + ("{{ $value }}" if ranked else "")
    return fix_line("", fix.title, flag, restarts=fix.restarts).removeprefix(". ")


def fixes_of(entry: Verdict | Finding) -> tuple[str, ...]:
    """Return the fixes of an entry without ranks: the first ones of the catalogue."""
    return tuple(
        fix_line(rank, _title(name, ranked=False))
        for rank, name in enumerate(entry.fixes[:FIXES_SHOWN], start=1)
    )


def one_of(label: str, there: str, missing: str) -> str:
    """Return code that chooses a text by whether the alert has a label."""
    return f"{{{{- if $labels.{label} -}}}}\n{there}\n{{{{- else -}}}}\n{missing}\n{{{{- end }}}}"


def text(
    entry: Verdict | Finding,
    scope: Scope,
    where: str,
    numbers: Sequence[str] = (),
    listed: Sequence[str] = (),
    limit: tuple[str, str] | None = None,
) -> str:
    """Return a whole description as code, in the words of the direct push.

    `where` is code of `place`, `numbers` code of `number`; each number writes its own comma, because any may
    be unknown. `listed`: fixes in words, where they are not ranked. `limit`: as of `gateway_limit`.
    """
    words = limit[0] if limit else limit_words(None)
    who = subject(scope, model="{{ $labels.model_name }}", engine="{{ $labels.engine }}", where=where)
    if not numbers:
        return description(entry, who, (), listed, words)
    told = "".join(numbers) + '\n{{- "" }}'
    said = description(entry, who, (told,), listed, words)
    for line in said.splitlines():
        if limit is not None and limit[0] in line:
            said = said.replace(line, f"{{{{- if {limit[1]} }}}}{{{{- else }}}}\n{line}\n{{{{- end }}}}")
    return '{{- $sep := " " -}}\n' + said
