"""How long each condition must hold before its alert fires, each with its reason."""

from collections.abc import Mapping
from typing import Final

from exporter.rules.form import Hold

__all__ = [
    "ABSENT",
    "DOWN",
    "FLAPS",
    "HOLDS",
    "MODEL_HOLDS",
    "NEVER_READ",
    "PAGE",
    "QUEUED",
    "RESTARTS",
]

FLAPS: Final = "what comes again within minutes is the same trouble, and no second page"
_BACK: Final = "one failed poll or scrape more is no second alert"

# Shorter than the four minutes for which Alertmanager keeps an alert that is not told again: a restart of
# Prometheus, which begins to wait anew, closes no page.
PAGE: Final = Hold(
    "1m", "a page needs its verdict held for a minute, and a restart of Prometheus closes none", "2m", FLAPS
)
RESTARTS: Final = Hold("2m", "a small model is back within two minutes of a restart", "2m", FLAPS)
QUEUED: Final = Hold(
    "5m",
    "a queue that drains within minutes needs nobody",
    "5m",
    "a queue that fills again within minutes is the same one",
)
NEVER_READ: Final = Hold("1m", "the start-up grace of a quarter of an hour is over", "2m", FLAPS)
DOWN: Final = Hold("5m", "a container that restarts is back by then", "5m", _BACK)
ABSENT: Final = Hold(
    "10m", "a new Prometheus, or a roll-out of all pods, knows no target for a while", "5m", _BACK
)
_LOST: Final = Hold("1m", "the verdict itself has waited until it was sure that nothing moves", "2m", FLAPS)

# By the name of the verdict or finding, for the alert that names one engine, server or model.
HOLDS: Final[Mapping[str, Hold]] = {
    "unreachable": RESTARTS,
    "metrics_missing": Hold("5m", "a roll-out shows odd pages for a while", "5m", _BACK),
    "data_untrusted": Hold(
        "5m", "a single odd reading is left out anyway", "15m", "two servers behind one address come and go"
    ),
    "engine_stalled": _LOST,
    "scheduler_deadlock": _LOST,
    "unfittable_request": _LOST,
    "preemption_thrash": Hold("1m", "a wave that ends within a minute needs nobody", "2m", FLAPS),
    "kv_bound": QUEUED,
    "seat_bound": QUEUED,
    "prefill_bound": QUEUED,
    "queue_not_kv": QUEUED,
    "deferred_wait": QUEUED,
    "kv_pressure_rising": Hold(
        "30s",
        "minutes are left, and a longer wait would be most of them",
        "2m",
        "a climb falters and goes on",
    ),
    "kv_held_no_requests": Hold("5m", "a lease may run out late", "5m", _BACK),
    "decode_slow": Hold(
        "5m",
        "a neighbour's short job on the host ends by itself",
        "10m",
        "throttling comes and goes with heat",
    ),
    "runaway_generation": Hold(
        "1m", "the verdict itself has waited ten minutes", "5m", "the next long answer is the same trouble"
    ),
    "dp_imbalance": Hold(
        "5m",
        "a router that has just begun to share needs a moment",
        "5m",
        "load that swings is the same trouble",
    ),
    "engine_missing": Hold("5m", "an engine that restarts is back by then", "5m", _BACK),
}
MODEL_HOLDS: Final[Mapping[str, Hold]] = {"unreachable": RESTARTS}
