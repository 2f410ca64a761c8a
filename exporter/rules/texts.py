"""The annotations of the alerts on the sidecar's series, in the words of the direct push."""

from collections.abc import Mapping, Sequence
from typing import Final

from exporter.analysis.catalogue import Finding, Verdict
from exporter.publish.alerts.table import NUMBERS, WORST_ENGINE, Alert, dashboard_url, runbook_url
from exporter.rules import template
from exporter.rules.options import Options
from exporter.rules.promql import Series

__all__ = ["Texts"]

_NAMED: Final = 3


class Texts:
    """The annotations of one installation."""

    def __init__(self, options: Options, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Keep the options and, by scope, the labels of an alert."""
        self._options = options
        self._series = Series(options.selector.replace("%", "%%"))  # for a format of printf
        self._labels = labels

    def of(self, alert: Alert, others: Sequence[Alert] = ()) -> dict[str, str]:
        """Return the annotations of an alert; `others` share its rule and have no engine."""
        description = self._description(alert)
        for other in others:
            description = template.one_of("engine", description, self._description(other))
        return self.annotations(alert.name, alert.entry.summary, description, alert.scope)

    def annotations(self, name: str, summary: str, description: str, scope: str) -> dict[str, str]:
        """Return the four annotations of every alert."""
        options = self._options
        variables = {
            "pod" if label == options.server_label else label: f"{{{{ $labels.{label} | urlquery }}}}"
            for label in self._labels[scope]
        }
        return {
            "summary": summary,
            "description": description,
            "runbook_url": runbook_url(name, options.runbook_base),
            "dashboard_url": dashboard_url(scope, options.dashboard_base, variables),
        }

    def place(self, scope: str) -> str:
        """Return code that prints the place of an alert."""
        return template.place(self._labels[scope], self._options.server_label)

    def _description(self, alert: Alert) -> str:
        entry, scope = alert.entry, alert.scope
        # Under a verdict that a target can have no engine can be read, so no number is known.
        ranked = isinstance(entry, Verdict) and scope != "target" and not entry.of_target
        share = self._share(entry.name) if scope == "model" and isinstance(entry, Verdict) else ""
        if not ranked:
            # Without readings, or without ranks: the fixes of the catalogue, in its order.
            missing = scope == "target" and isinstance(entry, Finding)
            gone = '\n{{- $sep }}{{ $value | printf "%.0f" }} gone' if missing else ""
            counted = tuple(filter(None, (share or gone,)))
            said = template.text(entry, scope, self.place(scope), counted, template.fixes_of(entry))
            return (template.matchers(self._labels[scope]) if share else "") + said
        # PromQL that keeps the engines in the verdict.
        on = f" and on ({', '.join(self._labels['engine'])})"
        within = f"{on} {self._verdict(entry.name)} == 1" if share else ""
        numbers = [share] if share else []
        numbers += [
            template.number(one, f"max({self._series.most(one.name, '%s')}{within})") for one in NUMBERS
        ]
        limit = template.gateway_limit(self._series, within)
        said = template.text(entry, scope, self.place(scope), numbers, (), limit)
        return template.matchers(self._labels[scope]) + said + template.lines(entry, self._series, within)

    def _verdict(self, name: str) -> str:
        return self._series.last("verdict", f'verdict="{name}",%s')

    def _share(self, name: str) -> str:
        """Return code that prints ``3 of 20 engines (vllm-3/0 vllm-7/0 vllm-9/0)``, with the first three."""
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
        # The numbers that follow are the highest among these engines.
        return f'{within}{whole}{named}{{{{ $sep = ", {WORST_ENGINE}" }}}}'
