"""The alerts without the sidecar: condition, numbers and words of each."""

from dataclasses import dataclass
from typing import Final

from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions.preemption import AS_MANY, LEAST_FINISHED
from exporter.analysis.conditions.queue import TIMES_LONGEST, UNFINISHED_SECONDS
from exporter.analysis.situation import TWICE_MATTERS
from exporter.rules.form import Rule
from exporter.rules.native_signals import DERIVED, RECORDED, recorded
from exporter.rules.options import Thresholds
from exporter.rules.promql import block

__all__ = ["HARM", "NativeAlert", "native_alerts", "storm_rules", "unless"]

# Recorded: the engines in a storm; and those of them that it harms, with the harm as a label.
_STORM: Final = "engine:vllm_preemption_storm"
HARM: Final = "engine:vllm_preemption_harm"

# Recorded series and the signal whose words they have.
_RATE: Final = ("preempting", "preemptions_per_second")
_KV: Final = ("kv_max", "kv_usage_max_ratio")
_RUNNING: Final = ("running", "requests_running")
_WAITING: Final = ("waiting_low", "requests_waiting")
_TOKENS: Final = ("tokens", "generation_tokens_per_second")
_TOKENS_LEVEL: Final = ("tokens_level", "generation_tokens_per_second_recent")
_INTER_TOKEN: Final = ("inter_token", "inter_token_latency_mean_seconds")
_AGAIN: Final = ("again_ratio", "recomputed_ratio")
_DEFERRED: Final = ("deferred_low", "requests_deferred")
_NAMES: Final = {word: recorded(word) for word in (*RECORDED, *DERIVED)}


@dataclass(frozen=True, slots=True)
class NativeAlert:
    """One alert."""

    entry: str  # the verdict or finding whose words, topic and timing it uses
    condition: str  # PromQL per engine
    # Numbers of the description: a recorded series, and the signal whose words it has.
    shown: tuple[tuple[str, str], ...] = ()
    summary: str = ""  # its own sentence, where it proves less than the verdict
    comment: str = ""  # for the reader of the file
    page: bool = False  # whether the model has a paging alert too
    harm: str = ""  # the series of the engines for which it may page, by harm, if not for all
    severity: Severity = Severity.WARNING  # of the alert of one engine

    @property
    def paging(self) -> str:
        """PromQL of the engines for which it pages."""
        return f"group without (harm) ({self.harm})" if self.harm else self.condition

    @property
    def name(self) -> str:
        """The alert's name without ``VllmNative``: that of the entry in camel case."""
        return "".join(part.capitalize() for part in self.entry.split("_"))


def native_alerts(unreachable: str, missing: str, thresholds: Thresholds) -> tuple[NativeAlert, ...]:
    """Return all alerts, in the order of triage.

    Args:
        unreachable: PromQL of the engines on servers that cannot be scraped.
        missing: PromQL of servers without vLLM's series, and of engines without KV usage.
        thresholds: the values that series are compared with.
    """
    c = _Conditions(thresholds)
    queue = (_WAITING, _RUNNING, _KV)
    return (
        NativeAlert(
            "unreachable", unreachable, summary="Prometheus cannot scrape a vLLM server.", page=True,
            comment="A server that was scraped within the last hour, and now every scrape fails.",
        ),
        NativeAlert(
            "metrics_missing", missing,
            comment="A successful scrape without any series of running requests or tokens; or work without\n"
            "any of the names that KV usage has had.",
        ),
        NativeAlert(
            "engine_stalled", f"{c.running}\nand {c.still}", (_RUNNING, _KV), page=True,
            comment="KV usage counts as a sign of work: a long prefill changes nothing else.",
        ),
        NativeAlert(
            "scheduler_deadlock", f"{c.waiting}\nand {c.none_runs}\nand {c.still}", (_WAITING, _KV), page=True
        ),
        NativeAlert(
            "preemption_thrash", _STORM, (_RATE, _KV, _RUNNING, _TOKENS, _TOKENS_LEVEL, _INTER_TOKEN, _AGAIN),
            page=True, harm=HARM,
        ),
        NativeAlert(
            "kv_bound", f"{c.waiting}\nand {c.full}{unless(_STORM, c.deferred)}", (*queue, _RATE),
            summary="Requests wait, and the KV pool is full.",
        ),
        NativeAlert(
            "seat_bound", f"{c.waiting}\nand {c.room}\nand {c.plateau}{unless(c.deferred)}", queue,
            summary="Requests wait, as many run as before, and KV has room, so seats are the likely limit.",
            comment="vLLM exports no max_num_seqs: a plateau is a hint, not a proof.",
        ),
        NativeAlert(
            "deferred_wait", c.deferred, (_WAITING, _DEFERRED, _RUNNING, _KV),
            comment="vLLM reports this from 0.20 on.",
        ),
        NativeAlert(
            "queue_not_kv", f"{c.waiting}\nand {c.room}{unless(c.plateau, c.deferred)}", queue,
            summary="Requests wait, and KV usage is low.",
            comment="A long prompt may still not fit; a percentage does not show that.",
        ),
        NativeAlert("restarted", f"{recorded('resets')} > 0", severity=Severity.INFO),
    )  # fmt: skip


def storm_rules(t: Thresholds) -> tuple[Rule, ...]:
    """Return the recording rules of a storm and of its harm, which is that of the exporter's verdict."""
    r = _NAMES
    storm = (
        f"{r['preempted']} >= {t.preemptions:g}\n"
        f"and {r['preempted']}\n"
        f"  >= {t.preemptions_per_request:g} * clamp_min({r['finished']} or 0 * {r['preempted']}, 1)\n"
        f"and {r['preempting']} * {t.seconds_between:g} > {r['running']}\n"
        f"and {r['kv_max']} >= {t.kv_full:g}"
    )
    harm = {
        # Fewer requests get fewer tokens.
        "tokens per second fell": f"{r['tokens']}\n  < {t.tokens_fallen:g} * {r['tokens_level']}\n"
        f"    * clamp_max({r['requests']} / {r['requests_level']}, 1)",
        "inter-token latency grew": f"{r['inter_token']} > {t.latency_grown:g} * {r['inter_token_level']}",
        "request latency grew": f"{r['requests']} * 120\n"
        f"  > {t.latency_grown:g} * {r['latency_level']} * clamp_min({r['finished']}, {LEAST_FINISHED})",
        # While requests ran, and for far longer than usual.
        "no request finished": f"{r['finished_long']} == 0\nand min_over_time({r['running_min']}[10m]) > 0\n"
        f"and {r['running_min']} offset 10m\n"
        f"unless {TIMES_LONGEST:g} * {r['latency_level']} > {UNFINISHED_SECONDS:g}",
        # Only where no calm times with about as many requests are known.
        "much is computed twice": f"{r['again_ratio']} >= {TWICE_MATTERS:g}\n"
        f"unless {r['requests_most']} >= {AS_MANY:g} * {r['requests']}",
    }
    comment = (
        "About as many preemptions as finished requests, and more than long answers have in a healthy\n"
        "engine; the pool was full at its peak, whatever it reads now."
    )
    return (
        Rule(_STORM, storm, comment),
        *(
            Rule(HARM, f"{_STORM}\nand (\n{block(expr)}\n)", labels={"harm": name})
            for name, expr in harm.items()
        ),
    )


class _Conditions:
    """Conditions that several alerts share or exclude."""

    def __init__(self, t: Thresholds) -> None:
        r = _NAMES
        self.running, self.waiting = f"{r['running_min']} > 0", f"{r['waiting_low']} > 0"
        self.none_runs = f"{r['running_max']} == 0"
        self.full = f"{r['kv_max']} >= {t.kv_full:g}"
        self.room = f"{r['kv_max']} < {t.kv_room:g}"
        self.still = "\nunless ".join(
            (f"{r['tokens']} == 0", *(f"{r[word]} > 0" for word in ("prompts", "steps", "kv_changes")))
        )
        self.plateau = f"{r['running_low']} >= {t.seats:g}\nand {r['running_max']} - {r['running_low']} <= 1"
        self.deferred = (
            f"{r['deferred_low']} > 0\nand {r['deferred_low']} >= {t.deferred_share:g} * {r['waiting_low']}"
        )


def unless(*conditions: str) -> str:
    """Return the end of an expression that leaves out engines for which a condition applies."""
    return "".join(f"\nunless (\n{block(condition)}\n)" for condition in conditions)
