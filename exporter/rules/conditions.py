"""The conditions of the alerts on the sidecar's series, in PromQL."""

from collections.abc import Mapping

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity, Verdict
from exporter.publish.alerts.table import PAGE_SHARE, Alert
from exporter.rules.promql import Series, aggregated, equals

__all__ = ["Conditions"]


class Conditions:
    """The conditions of one installation.

    Aggregations merge the scrapes of the same engine by several jobs, and drop job, instance, container and
    endpoint.
    """

    def __init__(self, series: Series, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Keep the series and, by scope, the labels of an alert."""
        self._series = series
        self._labels = labels
        self._engine, self._model, self._target = labels["engine"], labels["model"], labels["target"]

    def of(self, alert: Alert) -> str:
        """Return the expression of one alert."""
        entry = alert.entry
        if not isinstance(entry, Verdict):
            return self._missing() if alert.scope == "target" else self._finding(alert)
        if alert.scope == "target":
            return self._target_in(entry)
        condition = self._critical(entry) if alert.critical_only else self._in(entry.name)
        if alert.scope == "model":
            return self._share(entry, condition)
        if all(finding.instead_of != entry.name for finding in catalogue.load().findings.values()):
            return condition
        # An engine that is gone is in this verdict too, and has an alert of its own.
        return f"{condition}\nunless on ({', '.join(self._target)})\n{self._missing()}"

    def down(self, job: str) -> str:
        """Return the exporters whose scrapes fail: of the job, or with our series within the last hour."""
        seen = f"last_over_time({self._series.of('exporter_build')}[1h])"
        of_job, all_jobs = self._series.scrape(equals("job", job)), self._series.scrape()
        scrapes = f"{of_job}\nor\n{all_jobs} and on (job, instance) {seen}"
        return f"{aggregated('max', self._target, scrapes)} == 0"

    def absent(self, job: str) -> str:
        """Return 1 if there is neither a target of the job nor a series of any exporter."""
        target = self._series.scrape(equals("job", job))
        return f"absent({target})\nunless on ()\n{self._series.last('exporter_build')}"

    def _verdict(self, name: str) -> str:
        """Return 1 for each engine in the verdict, 0 for the others."""
        return aggregated("max", self._engine, self._series.last("verdict", equals("verdict", name)))

    def _in(self, name: str) -> str:
        return f"{self._verdict(name)} == 1"

    def _critical(self, verdict: Verdict) -> str:
        """Return engines in the verdict, where it is not always critical those in which it is."""
        if verdict.severity is Severity.CRITICAL:
            return self._in(verdict.name)
        severity = aggregated("max", self._engine, self._series.last("severity"))
        return f"{self._in(verdict.name)}\nand\n{severity} == {Severity.CRITICAL.rank}"

    def _share(self, verdict: Verdict, condition: str) -> str:
        """Return the share of a model's engines for which a condition applies."""
        engines = self._verdict(verdict.name)
        simple = condition == self._in(verdict.name)
        part = ("sum", self._model, engines) if simple else ("count", self._model, condition)
        return f"{aggregated(*part)}\n/\n{aggregated('count', self._model, engines)}\n>= {PAGE_SHARE}"

    def _target_in(self, verdict: Verdict) -> str:
        """Return the verdict of a server, unless one of its engines is in that verdict too.

        A critical one is of a server whose engines were never read: others page by their model.
        """
        equal, on = equals("verdict", verdict.name), ", ".join(self._target)
        whole = aggregated("max", self._target, self._series.last("target_verdict", equal))
        in_it = "" if verdict.severity is Severity.CRITICAL else " == 1"
        engines = aggregated("max", self._target, self._series.last("verdict", equal) + in_it)
        return f"{whole} == 1\nunless on ({on})\n{engines}"

    def _missing(self) -> str:
        return f"{aggregated('max', self._target, self._series.most('engines_missing'))} > 0"

    def _finding(self, alert: Alert) -> str:
        row = {"model": "model_finding", "engine": "finding"}[alert.scope]
        series = self._series.last(row, equals("finding", alert.entry.name))
        return f"{aggregated('max', self._labels[alert.scope], series)} == 1"
