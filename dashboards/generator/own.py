"""The exporters themselves: do they get answers, what do they cost."""

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
    # One exporter of a version may watch many servers.
    built = f"{up} * 0 + on (job, instance) group_left (version, python) {ours('exporter_build')}"
    return Row(
        "Now",
        [
            stat(
                "Exporters",
                "Processes that Prometheus scrapes. As many as there should be is good.",
                Query(f"count({ours('exporter_build')})"),
                size=(4, 5),
            ),
            stat(
                "Servers answering",
                "Share of watched servers whose last poll succeeded. 100 % is good.",
                Query(by([], up, "avg")),
                unit="percentunit",
                defaults={"max": 1},
                limits=thresholds((1, "green"), base="red"),
                size=(4, 5),
            )
            | runbook("unreachable"),
            stat(
                "Oldest reading",
                "Seconds since the last good poll, of the server it is longest ago for. A few seconds are"
                " good.",
                Query(f"max({last})"),
                unit="s",
                defaults={"decimals": 1},
                limits=thresholds((LIMITS.max_age * 3, "orange")),
                size=(4, 5),
            ),
            stat(
                "Failed polls / s",
                "Polls without a usable answer, all exporters together. 0 is good.",
                Query(or_none(f"sum({rate(ours('exporter_poll_errors'))})")),
                defaults={"decimals": 2},
                limits=thresholds((0.01, "orange")),
                size=(4, 5),
            ),
            stat(
                "Lines not understood",
                "Lines of known metrics that could not be read, in the range shown. 0 is good; others"
                " point at a new vLLM.",
                Query(f"sum(increase({ours('exporter_unreadable_lines')}[$__range]))", instant=True),
                defaults={"decimals": 0},
                limits=thresholds((1, "orange")),
                course=False,
                size=(4, 5),
            )
            | runbook("metrics_missing"),
            stat(
                "Metrics that failed",
                "Exported metrics that could not be built, in the range shown. 0 is good; the log says why.",
                Query(or_none(f"sum(increase({ours('exporter_collect_errors')}[$__range]))"), instant=True),
                defaults={"decimals": 0},
                limits=thresholds((1, "red")),
                course=False,
                size=(4, 5),
            ),
            table(
                "Exporters and what they watch",
                "One line per watched server. Answering, young, and of one version is good.",
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
                "Polls made, and polls left out because the one before took too long. One a second and"
                " none left out is good.",
                Query(by([], rate(ours("exporter_polls_skipped"))), "left out, all together"),
                Query(named(rate(ours("exporter_polls"))), WHERE),
                overrides=[by_query("A", color={"mode": "fixed", "fixedColor": "red"})],
                size=(8, 9),
            ),
            lines(
                "Failed polls by reason",
                "Polls without a usable answer. None is good; a refused connection is a server that is"
                " down, a timeout one that hangs.",
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
                "Time between polls at the moment. As configured is good; longer means that the exporter"
                " spares a slow server.",
                Query(named(ours("exporter_poll_interval_seconds")), WHERE),
                unit="s",
                size=(8, 9),
            ),
            lines(
                "Poll duration",
                "Half and 99 of 100 polls were answered within this time. Some ten milliseconds are good;"
                " much more means that vLLM's web server is busy.",
                Query(quantile(0.5, buckets, ()), "median"),
                Query(quantile(0.99, buckets, ()), "99 %"),
                unit="s",
            ),
            lines(
                "Size of vLLM's page",
                "Bytes of the last answer. Steady is good; growth is a server with ever more series.",
                Query(named(ours("exporter_body_bytes")), WHERE),
                unit="bytes",
            ),
            heatmap(
                "Polls by duration",
                "Every answered poll by how long it took. One strong band near the bottom is good.",
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
        "What it sees",
        [
            lines(
                "Servers by verdict",
                "The verdict of each target as a whole, which is its own where no engine can be read. All"
                " healthy is good.",
                Query(f"{by(['verdict'], ours('target_verdict'))} > 0", "{{verdict}}"),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=VERDICT_FIELDS,
                size=(6, 8),
            ),
            lines(
                "Engines",
                "Engines on all pages, and engines that are gone from theirs. The configured number and"
                " none gone is good.",
                Query(by([], ours("engines_missing")), "gone"),
                Query(by([], ours("engines")), "seen"),
                overrides=[by_query("A", color={"mode": "fixed", "fixedColor": "red"})],
                defaults={"decimals": 0},
                size=(6, 8),
            ),
            table(
                "Facts about servers",
                "What holds of a whole server, such as an engine that is gone. Nothing to add is good.",
                Query(
                    or_else(
                        by((*SERVER, "server", "finding"), named(ours("target_finding"))), nothing("finding")
                    ),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("server", "Server", 170),
                    Column("finding", "Fact", None, [FINDINGS], look=WRAPPED),
                ],
                hidden=(*SERVER, "Value"),
                size=(6, 8),
            ),
            lines(
                "Alerts pushed",
                "Straight to Alertmanager, by outcome, once for each Alertmanager and try. Sent alone, or"
                " none where the push is off, is good.",
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
                "Servers that are watched, by where they come from; nothing where an exporter watches one. As"
                " many as there are servers is good.",
                Query(or_else(by(["source"], ours("exporter_targets")), nothing("source")), "{{source}}"),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=[FROM_ONE],
                size=(6, 8),
            ),
            lines(
                "Targets left out",
                "Servers that are not watched: beyond poll.max_targets, or not to be told apart. 0 is good.",
                Query(or_none(by([], ours("exporter_targets_left_out"))), "left out"),
                defaults={"decimals": 0},
                overrides=[FROM_ONE],
                size=(5, 8),
            ),
            lines(
                "Discovery failures / s",
                "Look-ups and files that brought no targets; those known before stay. 0 is good.",
                Query(
                    or_else(by(["source"], rate(ours("exporter_discovery_failures"))), nothing("source")),
                    "{{source}}",
                ),
                overrides=[FROM_ONE],
                size=(5, 8),
            ),
            stat(
                "Configuration good",
                "Whether every exporter could use its configuration when it was last read. Yes is good; else"
                " the log says what is wrong, and the old one is used.",
                Query(f"min({ours('exporter_config_last_reload_successful')})"),
                defaults={"mappings": [mapping({"0": ("no", "red"), "1": ("yes", "green")})]},
                course=False,
                size=(4, 8),
            ),
            stat(
                "Configuration read",
                "Time since an exporter last read its configuration and could use it. Since the last change"
                " is good.",
                Query(f"time() - max({ours('exporter_config_last_reload_success_timestamp_seconds')})"),
                unit="s",
                defaults={"decimals": 0},
                course=False,
                size=(4, 8),
            ),
        ],
    )


def _cost() -> Row:
    # vLLM's process has the same names; under one job only this tells whose they are.
    place = selector(*PLACE)
    its = f"and on (job, instance) {ours('exporter_build')}"
    return Row(
        "Its own cost",
        [
            lines(
                "CPU",
                "Share of one core that each exporter takes. Below one per cent is good at one poll a"
                " second.",
                Query(named(f"rate(process_cpu_seconds_total{place}[$__rate_interval]) {its}"), WHERE),
                unit="percentunit",
            ),
            lines(
                "Memory",
                "Resident memory of each exporter. Level after the first minutes is good.",
                Query(named(f"process_resident_memory_bytes{place} {its}"), WHERE),
                unit="bytes",
            ),
            lines(
                "Open files",
                "File descriptors of each exporter. Level is good; a slope is a leak.",
                Query(named(f"process_open_fds{place} {its}"), WHERE),
                defaults={"decimals": 0},
            ),
        ],
    )


def build() -> Json:
    """The dashboard."""
    return assembled(
        "exporter",
        "The exporters themselves: do they get answers, how fast, what is not understood, what do they cost.",
        _now(),
        _polling(),
        _watched(),
        _targets(),
        _cost(),
        time="now-1h",
    )
