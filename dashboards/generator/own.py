"""The dashboard of the exporters themselves: polls, results, configuration, overhead."""

from functools import partial
from typing import Any, Final

from generator.panels import Column, Query, Row, by_query, graph, heatmap, mapping, stat, table, thresholds
from generator.queries import (
    PLACE,
    SERVER,
    WHERE,
    by,
    named,
    nothing,
    or_else,
    or_none,
    ours,
    quantile,
    rate,
    selector,
)
from generator.shared import assembled
from generator.words import AS_TEXT, COLOURED, FINDINGS, FROM_ONE, LIMITS, VERDICT_FIELDS, WRAPPED, runbook

__all__ = ["build"]

Json = dict[str, Any]

lines: Final = partial(graph, fill=0)


def _now() -> Row:
    up = ours("up")
    last = f"time() - {ours('last_success_timestamp_seconds')}"
    # One exporter, which has one version, may watch many servers.
    built = f"{up} * 0 + on (job, instance) group_left (version, python) {ours('exporter_build')}"
    return Row(
        "Now",
        [
            stat(
                "Exporters",
                "Exporter processes that Prometheus scrapes. Should equal the number deployed.",
                Query(f"count({ours('exporter_build')})"),
                size=(4, 5),
            ),
            stat(
                "Servers that answer",
                "Share of watched servers whose last poll succeeded. Should be 100 %.",
                Query(by([], up, "avg")),
                unit="percentunit",
                defaults={"max": 1},
                limits=thresholds((1, "green"), base="red"),
                size=(4, 5),
            )
            | runbook("unreachable"),
            stat(
                "Oldest reading",
                "Age of the oldest last-successful poll of any server. Should be a few seconds.",
                Query(f"max({last})"),
                unit="s",
                defaults={"decimals": 1},
                limits=thresholds((LIMITS.max_age * 3, "orange")),
                size=(4, 5),
            ),
            stat(
                "Failed polls / s",
                "Failed polls per second, sum of all exporters. Should be 0.",
                Query(or_none(f"sum({rate(ours('exporter_poll_errors'))})")),
                defaults={"decimals": 2},
                limits=thresholds((0.01, "orange")),
                size=(4, 5),
            ),
            stat(
                "Unreadable lines",
                "Lines of known metrics that could not be read, in the selected range. Should be 0; "
                "otherwise vLLM may have changed its format.",
                Query(f"sum(increase({ours('exporter_unreadable_lines')}[$__range]))", instant=True),
                defaults={"decimals": 0},
                limits=thresholds((1, "orange")),
                course=False,
                size=(4, 5),
            )
            | runbook("metrics_missing"),
            stat(
                "Failed metrics",
                "Metrics that the exporter could not export, in the selected range. Should be 0; the log "
                "has the cause.",
                Query(or_none(f"sum(increase({ours('exporter_collect_errors')}[$__range]))"), instant=True),
                defaults={"decimals": 0},
                limits=thresholds((1, "red")),
                course=False,
                size=(4, 5),
            ),
            table(
                "Exporters and their servers",
                "One row per watched server. All servers should answer, with a low age and one version.",
                Query(by((*SERVER, "server"), named(up)), instant=True, form="table"),
                Query(by((*SERVER, "server"), named(f"{last}")), instant=True, form="table"),
                Query(by((*SERVER, "server"), named(ours("engines"))), instant=True, form="table"),
                Query(
                    by((*SERVER, "server"), named(ours("exporter_poll_interval_seconds"))),
                    instant=True,
                    form="table",
                ),
                Query(
                    by((*SERVER, "server"), named(ours("exporter_body_bytes"))), instant=True, form="table"
                ),
                Query(
                    by((*SERVER, "server", "version", "python"), named(built)),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("cluster", "Cluster", 100),
                    Column("namespace", "Namespace", 120),
                    Column("server", "Server", None),
                    Column("instance", "Scraped at", 190),
                    Column(
                        "Value #A",
                        "Answers",
                        90,
                        [mapping({"1": ("yes", "green"), "0": ("no", "red")})],
                        look=COLOURED,
                    ),
                    Column("Value #B", "Age", 90, unit="s", look={"decimals": 1}),
                    Column("Value #C", "Engines", 80),
                    Column("Value #D", "Polled every", 110, unit="s"),
                    Column("Value #E", "Page", 100, unit="bytes"),
                    Column("version", "Version", 100, unit=AS_TEXT),
                    Column("python", "Python", 90, unit=AS_TEXT),
                ],
                hidden=("pod", "target", "Value #F"),
                sort=("Age", True),
                size=(24, 10),
            ),
        ],
    )


def _polling() -> Row:
    buckets = rate(ours("exporter_poll_duration_seconds", "_bucket"))
    return Row(
        "Polling",
        [
            lines(
                "Polls per second",
                "Polls made, and polls skipped because the previous one took too long. Should be one per "
                "second, with none skipped.",
                Query(by([], rate(ours("exporter_polls_skipped"))), "skipped, all servers"),
                Query(named(rate(ours("exporter_polls"))), WHERE),
                overrides=[by_query("A", color={"mode": "fixed", "fixedColor": "red"})],
                size=(8, 9),
            ),
            lines(
                "Failed polls by reason",
                "Failed polls per second. Should be 0; a refused connection means that the server is down, "
                "a timeout that it hangs.",
                Query(
                    or_else(by(["reason"], rate(ours("exporter_poll_errors"))), nothing("reason")),
                    "{{reason}}",
                ),
                stacked="normal",
                defaults={"color": {"mode": "shades", "fixedColor": "red"}},
                overrides=[FROM_ONE],
                size=(8, 9),
            )
            | runbook("unreachable"),
            lines(
                "Poll interval",
                "Current time between polls. Should equal the configured interval; longer means that the "
                "exporter slowed down for a slow server.",
                Query(named(ours("exporter_poll_interval_seconds")), WHERE),
                unit="s",
                size=(8, 9),
            ),
            lines(
                "Poll duration",
                "Median and 99th percentile of the poll duration. Should be about ten milliseconds; much "
                "more means that vLLM's web server is busy.",
                Query(quantile(0.5, buckets, ()), "median"),
                Query(quantile(0.99, buckets, ()), "99 %"),
                unit="s",
            ),
            lines(
                "Size of vLLM's metrics page",
                "Size of the last response body. Should be steady; growth means that the server keeps "
                "adding series.",
                Query(named(ours("exporter_body_bytes")), WHERE),
                unit="bytes",
            ),
            heatmap(
                "Polls by duration",
                "Number of answered polls at each duration. Should be one strong band near the bottom.",
                Query(
                    by(
                        ["le"],
                        f"increase({ours('exporter_poll_duration_seconds', '_bucket')}[$__rate_interval])",
                    ),
                    "{{le}}",
                    form="heatmap",
                ),
                unit="s",
            ),
        ],
    )


def _watched() -> Row:
    return Row(
        "Results",
        [
            lines(
                "Servers by verdict",
                "Number of servers in each target verdict, which is not reachable if no engine can be read. "
                "All should be reachable.",
                Query(f"{by(['verdict'], ours('target_verdict'))} > 0", "{{verdict}}"),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=VERDICT_FIELDS,
                size=(6, 8),
            ),
            lines(
                "Engines",
                "Engines seen and engines gone. Seen should equal the number deployed, gone should be 0.",
                Query(by([], ours("engines_missing")), "gone"),
                Query(by([], ours("engines")), "seen"),
                overrides=[by_query("A", color={"mode": "fixed", "fixedColor": "red"})],
                defaults={"decimals": 0},
                size=(6, 8),
            ),
            table(
                "Findings about servers",
                'Facts about a whole server, such as a missing engine. Should read "No findings".',
                Query(
                    or_else(
                        by((*SERVER, "server", "finding"), named(ours("target_finding"))), nothing("finding")
                    ),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("server", "Server", 170),
                    Column("finding", "Finding", None, [FINDINGS], look=WRAPPED),
                ],
                hidden=(*SERVER, "Value"),
                size=(6, 8),
            ),
            lines(
                "Alerts pushed",
                "Alerts pushed to Alertmanager per second, by outcome; each Alertmanager and attempt "
                'counts. Should be only "sent", or nothing if the push is off.',
                Query(
                    or_else(by(["outcome"], rate(ours("exporter_notifications"))), nothing("outcome")),
                    "{{outcome}}",
                ),
                overrides=[FROM_ONE],
                size=(6, 8),
            ),
        ],
    )


def _targets() -> Row:
    return Row(
        "Targets and configuration",
        [
            lines(
                "Targets",
                "Watched servers by source; empty if an exporter watches only one. Should equal the number "
                "of servers.",
                Query(or_else(by(["source"], ours("exporter_targets")), nothing("source")), "{{source}}"),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=[FROM_ONE],
                size=(6, 8),
            ),
            lines(
                "Targets left out",
                "Servers that are not watched because they exceed poll.max_targets or have the same labels "
                "as another. Should be 0.",
                Query(or_none(by([], ours("exporter_targets_left_out"))), "left out"),
                defaults={"decimals": 0},
                overrides=[FROM_ONE],
                size=(5, 8),
            ),
            lines(
                "Discovery failures / s",
                "Failed DNS look-ups and unreadable target files per second; the known targets stay. Should"
                " be 0.",
                Query(
                    or_else(by(["source"], rate(ours("exporter_discovery_failures"))), nothing("source")),
                    "{{source}}",
                ),
                overrides=[FROM_ONE],
                size=(5, 8),
            ),
            stat(
                "Configuration valid",
                "Whether the last configuration load of every exporter succeeded. Should be yes; otherwise "
                "the log has the errors, and the exporter keeps the previous configuration.",
                Query(f"min({ours('exporter_config_last_reload_successful')})"),
                defaults={"mappings": [mapping({"0": ("no", "red"), "1": ("yes", "green")})]},
                course=False,
                size=(4, 8),
            ),
            stat(
                "Configuration age",
                "Time since an exporter last loaded a valid configuration. Should date from the last change.",
                Query(f"time() - max({ours('exporter_config_last_reload_success_timestamp_seconds')})"),
                unit="s",
                defaults={"decimals": 0},
                course=False,
                size=(4, 8),
            ),
        ],
    )


def _cost() -> Row:
    # vLLM's process exports the same names; if both have the same job, only this selects the exporter's.
    place = selector(*PLACE)
    its = f"and on (job, instance) {ours('exporter_build')}"
    return Row(
        "Overhead",
        [
            lines(
                "CPU",
                "CPU time of each exporter, as a share of one core. Should stay below one per cent at one "
                "poll per second.",
                Query(named(f"rate(process_cpu_seconds_total{place}[$__rate_interval]) {its}"), WHERE),
                unit="percentunit",
            ),
            lines(
                "Memory",
                "Resident memory of each exporter. Should stay flat after the first minutes.",
                Query(named(f"process_resident_memory_bytes{place} {its}"), WHERE),
                unit="bytes",
            ),
            lines(
                "Open files",
                "Open file descriptors of each exporter. Should stay flat; steady growth means a leak.",
                Query(named(f"process_open_fds{place} {its}"), WHERE),
                defaults={"decimals": 0},
            ),
        ],
    )


def build() -> Json:
    """Build the dashboard."""
    return assembled(
        "exporter",
        "The exporters themselves: do polls succeed, how fast are they, what do they find, what is their "
        "overhead.",
        _now(),
        _polling(),
        _watched(),
        _targets(),
        _cost(),
        time="now-1h",
    )
