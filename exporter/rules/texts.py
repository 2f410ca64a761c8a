"""What an alert over the sidecar's series says, in the words of the table that the direct push uses too."""

from collections.abc import Mapping, Sequence
from typing import Final

from exporter.analysis.catalogue import Finding, Verdict
from exporter.publish.alerts.table import DASHBOARDS, NUMBERS, WORST_ENGINE, Alert
from exporter.rules import template
from exporter.rules.options import Options
from exporter.rules.promql import Series

__all__ = ["Texts"]

_NAMED: Final = 3


class Texts:
    """The annotations of one installation."""

    def __init__(self, options: Options, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Take the options and, by scope, the labels that an alert has."""
        self._options = options
        self._series = Series(options.selector)
        self._labels = labels

    def of(self, alert: Alert, others: Sequence[Alert] = ()) -> dict[str, str]:
        """All annotations of an alert; `others` are told apart from it by having no engine."""
        said = self._description(alert)
        for other in others:
            said = template.one_of("engine", said, self._description(other))
        return self.annotations(alert.name, alert.summary, said, alert.scope)

    def annotations(self, name: str, summary: str, said: str, scope: str) -> dict[str, str]:
        """The four annotations that every alert has."""
        server = self._options.server_label
        variables = {"pod" if label == server else label: label for label in self._labels[scope]}
        return {
            "summary": summary,
            "description": said,
            "runbook_url": f"{self._options.runbook_base.rstrip('/')}/{name}.md",
            "dashboard_url": template.dashboard_url(
                self._options.dashboard_base, DASHBOARDS[scope], variables
            ),
        }

    def place(self, scope: str) -> str:
        """Code that prints where an alert is."""
        return template.place(self._labels[scope], self._options.server_label)

    def _description(self, alert: Alert) -> str:
        entry, scope = alert.entry, alert.scope
        # Under a verdict that a target can have no engine can be read, so no number is known.
        ranked = isinstance(entry, Verdict) and scope != "target" and not entry.of_target
        share = self._share(entry.name) if scope == "model" and isinstance(entry, Verdict) else ""
        if not ranked:
            # Nothing is measured any more, or nobody ranks the fixes: the catalogue's, in its order.
            missing = scope == "target" and isinstance(entry, Finding)
            gone = '\n{{- $sep }}{{ $value | printf "%.0f" }} gone' if missing else ""
            counted = tuple(filter(None, (share or gone,)))
            said = template.text(entry, scope, self.place(scope), counted, template.fixes_of(entry))
            return (template.matchers(self._labels[scope]) if share else "") + said
        within = self._within(entry.name) if share else ""
        numbers = [share] if share else []
        for one in NUMBERS:
            series = self._series.most(one.name, more="%s", printed=True)
            numbers.append(template.number(one, f"max({series}{within})"))
        said = template.text(entry, scope, self.place(scope), numbers)
        return template.matchers(self._labels[scope]) + said + template.lines(entry, self._series, within)

    def _verdict(self, name: str) -> str:
        return self._series.last("verdict", f'verdict="{name}",%s', printed=True)

    def _within(self, name: str) -> str:
        """Keeps the engines that are in the verdict."""
        return f" and on ({', '.join(self._labels['engine'])}) {self._verdict(name)} == 1"

    def _share(self, name: str) -> str:
        """Code that prints ``3 of 20 engines (vllm-3/0 vllm-7/0 vllm-9/0)``, with the first of them."""
        verdict = f"max by ({', '.join(self._labels['engine'])}) ({self._verdict(name)})"
        within, whole = (
            f"\n{{{{- with {template.asked(f'{function}({verdict})')} }}}}{words}{{{{ end }}}}"
            for function, words in (
                ("sum", "{{ $sep }}{{ . | first | value }} of "),
                ("count", "{{ . | first | value }} engines ("),
            )
        )
        server = f'{{{{ . | label "{self._options.server_label}" }}}}/{{{{ . | label "engine" }}}}'
        named = (
            '{{ $sep = "" }}'
            f"\n{{{{- range {template.asked(f'topk({_NAMED}, {verdict} == 1)')} }}}}"
            f'{{{{ $sep }}}}{server}{{{{ $sep = " " }}}}{{{{ end }}}})'
        )
        # What follows are the largest numbers among these engines.
        return f'{within}{whole}{named}{{{{ $sep = ", {WORST_ENGINE}" }}}}'
