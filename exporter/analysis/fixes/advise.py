"""Collects the candidate fixes of a verdict and its findings, judges each and ranks them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.fixes.case import QUEUES, Advice, Answer, Case, FixAdvice, RejectedFix
from exporter.analysis.fixes.memory import MEMORY
from exporter.analysis.fixes.ranking import by_cost, by_forecast, explain, merge, pair_up
from exporter.analysis.fixes.rows import ROWS
from exporter.analysis.fixes.seats import SEATS
from exporter.analysis.forecast import FORECAST_VERDICTS, EngineForecast
from exporter.analysis.situation import Situation
from exporter.vllm.names import version_key

__all__ = ["BALANCE", "advise"]

BALANCE: Final = "balance_routing"
# Verdicts under which KV blocks are short, so that more of them help.
_SHORT_KV: Final = frozenset(
    {"preemption_thrash", "preemption_light", "kv_bound", "kv_pressure_rising", "unfittable_request"}
)
# The fixes of this finding precede the verdict's objections: a crashed server preempts no request.
_FIRST_AID: Final = "suspect_out_of_memory"
# Under these verdicts the fixes of findings about the configuration are advised too.
_CALM: Final = frozenset({"healthy", "kv_full_ok", "starting", "sleeping", "runaway_generation"})
# Verdicts that no routing cures: lost progress, and data that cannot be judged.
_NO_ROUTING: Final = frozenset(
    {"engine_stalled", "scheduler_deadlock", "unfittable_request", "metrics_missing", "data_untrusted"}
)
# Each is advised only where its own cause is seen.
_FIRST: Final = frozenset({"raise_max_loras", "check_kv_connector", "disable_async_scheduling"})
_FIRST_IN_QUEUES: Final = frozenset({"abort_request"})
_RULES: Final = {**MEMORY, **SEATS, **ROWS}


def advise(
    s: Situation,
    verdict: str,
    findings: Sequence[str],
    *,
    imbalanced: bool = False,
    forecast: EngineForecast | None = None,
) -> Advice:
    """Return the fixes of a verdict and its findings, and those that will not help.

    This is the only place where a forecast meets them, so every surface shows the same order and numbers.

    Args:
        s: the engine's situation.
        verdict: its verdict.
        findings: its findings.
        imbalanced: whether one engine of the model carries far more than its share; no memory cures that.
        forecast: what was simulated, if anything. Only one that is trusted ranks fixes about capacity.
    """
    case = Case(s, verdict, tuple(findings))
    advised, rejected = _judged(case)
    trusted = forecast is not None and forecast.trusted and verdict in FORECAST_VERDICTS
    if forecast is not None and trusted:
        known = [one for one in forecast.fixes if not _is_too_old(s, one.fix)]
        merge(advised, rejected, known)
        pair_up(advised, forecast.pairs)
    advised = {name: replace(one, flag=_flag(s, one)) for name, one in advised.items()}
    ranked = _ranked(verdict, advised, trusted=trusted)
    if imbalanced and verdict not in _NO_ROUTING:
        ranked.insert(0, FixAdvice(BALANCE))
    useless = tuple(RejectedFix(name, reason) for name, reason in rejected.items())
    return Advice(tuple(ranked), useless, explain(verdict, forecast, ranked))


def _ranked(verdict: str, advised: Mapping[str, FixAdvice], *, trusted: bool) -> list[FixAdvice]:
    """Order the fixes by forecast, or by cost.

    A fix that is advised only where its cause is seen, and one that helps without a restart, comes first.
    """
    first = _FIRST | (_FIRST_IN_QUEUES if verdict in QUEUES else frozenset())
    # Requests that wait for something else wait on every replica, so replicas come last.
    last = "add_replicas" if verdict == "deferred_wait" else ""
    fixes = list(advised.values())
    keys = by_forecast(fixes) if trusted else {one.fix: by_cost(one) for one in fixes}
    keys |= dict.fromkeys(first, ())
    # Sorting is stable: where keys are equal, the catalogue's order stays.
    return sorted(fixes, key=lambda one: (one.fix not in first, one.fix == last, keys[one.fix]))


def _judged(case: Case) -> tuple[dict[str, FixAdvice], dict[str, str]]:
    """Return the advised candidates in the catalogue's order, and the reasons against the others."""
    table, verdict, findings = catalogue.load(), case.verdict, case.findings
    first_aid = table.findings[_FIRST_AID].fixes if _FIRST_AID in findings else ()
    objections = table.verdicts[verdict].not_help
    rejected = {name: reason for name, reason in objections.items() if name not in first_aid}
    advised: dict[str, FixAdvice] = {}
    for name in _candidates(verdict, findings):
        if name in rejected:
            continue
        answer = _judge(name, case)
        if isinstance(answer, RejectedFix):
            rejected[name] = answer.reason
        else:
            advised[name] = answer
    objections_of = (table.findings[name].not_help for name in findings if name in table.findings)
    for name, reason in (pair for not_help in objections_of for pair in not_help.items()):
        if name not in advised:
            rejected.setdefault(name, reason)
    return advised, rejected


def _candidates(verdict: str, findings: Sequence[str]) -> list[str]:
    """Return the catalogue's candidates, each once; memory only where KV is short or all else is well."""
    table = catalogue.load()
    names = list(table.verdicts[verdict].fixes)
    memory_helps = verdict in _SHORT_KV or verdict in _CALM
    for finding in findings:
        fixes = table.entry(finding).fixes
        names += [name for name in fixes if memory_helps or not table.fixes[name].needs_short_kv]
    return list(dict.fromkeys(names))


def _judge(name: str, case: Case) -> Answer:
    rule = _RULES.get(name)
    answer = FixAdvice(name) if rule is None else rule(name, case)
    if isinstance(answer, FixAdvice) and _is_too_old(case.s, name):
        since = catalogue.load().fixes[name].since
        return RejectedFix(name, f"It needs vLLM {since} or newer, and this server looks older.")
    return answer


def _is_too_old(s: Situation, name: str) -> bool:
    """Whether the server is too old for a fix."""
    since = catalogue.load().fixes[name].since
    return since is not None and _is_older(s, since)


def _is_older(s: Situation, since: str) -> bool:
    """Whether the server is certainly older: its labels date it well, its metric names alone do not."""
    snapshot = s.history.snapshot
    version = s.server_facts.get("vllm_version")
    if isinstance(version, str):
        return version_key(version) < version_key(since)
    return snapshot is not None and snapshot.cache is not None and snapshot.version < version_key(since)


def _flag(s: Situation, one: FixAdvice) -> str | None:
    """Return the flag of a fix, of the limit that binds: vLLM refuses more active seats than seats."""
    fix, form = catalogue.load().fixes[one.fix], None
    if fix.flag_if_active is not None and s.number("max_num_active_seqs"):
        most = s.number("max_num_seqs")
        both = most and isinstance(one.value, int | float) and one.value > most
        form = f"{fix.flag} {fix.flag_if_active}" if both else fix.flag_if_active
    return fix.flag_with(_shown(one.value), form)


def _shown(value: float | str | None) -> str | None:
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
