"""The catalogue: its vocabulary, its advice and its validation."""

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import yaml

from exporter.analysis import catalogue as catalogue_module
from exporter.analysis.catalogue import TOPICS, Severity, Timing, Verdict, load
from exporter.analysis.conditions import HEALTHY, ORDER

# The vocabulary of the field cases, in the order in which one verdict hides another.
VERDICTS = {
    "unreachable": "critical",
    "starting": "none",
    "reachable": "none",
    "sleeping": "none",
    "metrics_missing": "warning",
    "data_untrusted": "warning",
    "engine_stalled": "critical",
    "unfittable_request": "critical",
    "scheduler_deadlock": "critical",
    "decode_slow": "warning",
    "preemption_thrash": "warning",
    "preemption_not_kv": "info",
    "preemption_light": "info",
    "deferred_wait": "warning",
    "kv_bound": "warning",
    "seat_bound": "warning",
    "prefill_bound": "warning",
    "queue_not_kv": "warning",
    "kv_pressure_rising": "warning",
    "kv_held_no_requests": "warning",
    "runaway_generation": "info",
    "kv_full_ok": "none",
    "healthy": "none",
}
FINDINGS = {
    "kv_too_small",
    "max_model_len_exceeds_pool",
    "capacity_is_estimate",
    "capacity_labels_disagree",
    "speculation_enlarges_kv",
    "prefix_cache_off",
    "dp_imbalance",
    "requests_refused",
    "restarted",
    "suspect_out_of_memory",
    "engine_missing",
    "mass_preemption",
    "preemption_inferred",
    "clients_give_up",
    "duplicate_series",
    "stale_gauges",
}
FIXES = {
    "raise_gpu_memory_utilization",
    "lower_gpu_memory_utilization",
    "fp8_kv_cache",
    "quantize_weights",
    "lower_max_num_seqs",
    "raise_max_num_seqs",
    "lower_max_num_batched_tokens",
    "raise_max_num_batched_tokens",
    "lower_max_model_len",
    "raise_tensor_parallel",
    "raise_pipeline_parallel",
    "reserve_full_prompt",
    "drop_full_prompt_reservation",
    "set_watermark",
    "enable_prefix_caching",
    "add_replicas",
    "balance_routing",
    "split_prefill_decode",
    "raise_max_loras",
    "check_kv_connector",
    "check_encoder_cache",
    "check_client_limits",
    "abort_request",
    "disable_speculation",
    "restart_engine",
    "upgrade_vllm",
    "enable_log_stats",
    "check_endpoint",
    "scrape_pod_not_service",
    "send_probe_request",
    "stop_cache_resets",
    "limit_long_prefills",
    "disable_async_scheduling",
    "lengthen_client_timeouts",
}
# Verdicts that are critical in a case that the catalogue names.
RAISED = {
    "decode_slow",
    "preemption_thrash",
    "deferred_wait",
    "kv_bound",
    "seat_bound",
    "prefill_bound",
    "queue_not_kv",
}
MORE_KV = {
    "raise_gpu_memory_utilization",
    "fp8_kv_cache",
    "quantize_weights",
    "raise_tensor_parallel",
    "raise_pipeline_parallel",
}
MEMORY_ADVICE = MORE_KV | {"lower_max_num_seqs", "set_watermark"}
NOT_KV = [
    "seat_bound",
    "prefill_bound",
    "deferred_wait",
    "queue_not_kv",
    "scheduler_deadlock",
    "engine_stalled",
    "decode_slow",
    "runaway_generation",
    "kv_held_no_requests",
    "kv_full_ok",
    "preemption_not_kv",
    "healthy",
]
PREEMPTION = ["preemption_thrash", "preemption_light", "kv_pressure_rising"]


def entries():
    """Every verdict and every finding."""
    return [*load().verdicts.values(), *load().findings.values()]


def texts():
    """Every text of the catalogue with the name of its entry."""
    for entry in entries():
        yield entry.name, entry.summary
        yield entry.name, entry.meaning
        yield entry.name, entry.impact
        for check in entry.confirm:
            yield entry.name, check.text
        for reason in entry.not_help.values():
            yield entry.name, reason
    for verdict in load().verdicts.values():
        yield verdict.name, verdict.critical_when or ""
    for fix in load().fixes.values():
        for text in (fix.title, fix.flag or "", fix.action, fix.effect, *fix.conditions, fix.risk):
            yield fix.name, text


# --- the vocabulary ------------------------------------------------------------------------------


def test_every_verdict_has_an_entry_in_order_of_precedence():
    """The verdicts are the known ones, no other, and in the order in which one hides another."""
    assert list(load().verdicts) == list(VERDICTS)


def test_verdicts_are_tried_in_the_order_of_the_catalogue():
    """First places only: a verdict may be tried again further down, as `preemption_light` is."""
    order = list(dict.fromkeys(rule.verdict for rule in ORDER))
    untried = {"unreachable", "starting", "reachable", HEALTHY}
    assert order == [name for name in load().verdicts if name not in untried]


def test_only_verdicts_with_a_sentence_for_it_become_critical():
    """The catalogue explains each verdict that has a function that makes it critical."""
    lifted = {rule.verdict for rule in ORDER if rule.is_critical is not None}
    assert lifted == {name for name, verdict in load().verdicts.items() if verdict.critical_when}


def test_every_verdict_has_its_severity():
    """Each verdict has the severity of the vocabulary."""
    assert {name: verdict.severity.value for name, verdict in load().verdicts.items()} == VERDICTS


def test_a_case_that_raises_a_verdict_to_critical_is_named():
    """Queues of which nothing finishes, a storm that does harm, an engine that has nearly stopped."""
    assert {name for name, verdict in load().verdicts.items() if verdict.critical_when} == RAISED


def test_every_finding_has_an_entry():
    """The findings are the known ones and no other."""
    assert set(load().findings) == FINDINGS


def test_findings_add_no_severity_but_three():
    """A finding alone matters only when it concerns a whole model or target, or requests are refused."""
    warnings = {name for name, finding in load().findings.items() if finding.severity is not Severity.NONE}
    assert warnings == {"dp_imbalance", "engine_missing", "requests_refused"}
    assert {load().findings[name].severity for name in warnings} == {Severity.WARNING}


def test_findings_have_their_scope():
    """Imbalance is of the model, a missing engine of the target, all else of an engine."""
    elsewhere = {
        name: finding.scope for name, finding in load().findings.items() if finding.scope != "engine"
    }
    assert elsewhere == {"dp_imbalance": "model", "engine_missing": "target"}


def test_every_fix_has_an_entry():
    """The fixes are the known ones and no other."""
    assert set(load().fixes) == FIXES


def test_a_target_without_engines_has_three_verdicts():
    """Only what can be said of a server without any engine is a verdict of the target."""
    of_target = {name for name, verdict in load().verdicts.items() if verdict.of_target}
    assert of_target == {"unreachable", "starting", "metrics_missing", "reachable"}


# --- alerts and runbooks -------------------------------------------------------------------------


def test_alerts_are_named_after_their_entry():
    """An alert is called Vllm and its entry's name, the model's page VllmModel and the same."""
    for entry in entries():
        camel = "".join(part.capitalize() for part in entry.name.split("_"))
        assert entry.alert in {None, f"Vllm{camel}"}
        assert getattr(entry, "model_alert", None) in {None, f"VllmModel{camel}"}


def test_every_verdict_that_can_be_critical_pages_for_its_model():
    """Pages are by model, so these verdicts have a second alert, and no other has."""
    paging = {name for name, verdict in load().verdicts.items() if verdict.model_alert}
    assert paging == {name for name, severity in VERDICTS.items() if severity == "critical"} | {*RAISED}


def test_what_matters_has_an_alert_and_its_runbook():
    """From warning on there is an alert; its runbook has the alert's name."""
    for entry in entries():
        assert entry.alert is not None or entry.severity < Severity.WARNING


# --- the advice ----------------------------------------------------------------------------------


def test_kv_bound_never_advises_seats():
    """The head of that queue lacks blocks; more seats lengthen nothing but the list of the waiting."""
    verdict = load().verdicts["kv_bound"]
    assert "raise_max_num_seqs" not in verdict.fixes
    assert "raise_max_num_seqs" in verdict.not_help


def test_kv_bound_asks_for_more_kv_or_less_of_it_per_server():
    """Each way to more KV is among its fixes, and so are more servers."""
    assert set(load().verdicts["kv_bound"].fixes) >= MORE_KV | {"add_replicas", "split_prefill_decode"}


def test_what_kv_did_not_cause_gets_no_memory_advice():
    """More KV, or fewer requests sharing it, never cures what is not a shortage of KV.

    Raising the utilization is everybody's first thought, so it is named with its reason.
    """
    table = load().verdicts
    assert [name for name in NOT_KV if MEMORY_ADVICE & set(table[name].fixes)] == []
    silent = [name for name in NOT_KV if "raise_gpu_memory_utilization" not in table[name].not_help]
    assert silent == ["healthy"]


def test_memory_advice_is_marked_as_bound_to_a_shortage():
    """The fixes that need a shortage of KV are the memory advice and the reservation of whole prompts."""
    marked = {name for name, fix in load().fixes.items() if fix.needs_short_kv}
    assert marked == MEMORY_ADVICE | {"reserve_full_prompt"}


def test_preemption_is_never_answered_with_less_memory_or_a_smaller_step():
    """Lower utilization makes it worse and fewer batched tokens change nothing; both are said."""
    refused = {"lower_gpu_memory_utilization", "lower_max_num_batched_tokens"}
    assert [name for name in PREEMPTION if not refused <= set(load().verdicts[name].not_help)] == []


def test_lower_utilization_and_smaller_steps_are_for_out_of_memory_only():
    """These two are advised after a suspected out-of-memory crash and nowhere else."""
    for fix in ("lower_gpu_memory_utilization", "lower_max_num_batched_tokens"):
        assert [entry.name for entry in entries() if fix in entry.fixes] == ["suspect_out_of_memory"]


def test_out_of_memory_is_not_answered_with_more_utilization():
    """The cure of preemption is the cause of a crash outside the pool."""
    assert "raise_gpu_memory_utilization" in load().findings["suspect_out_of_memory"].not_help


def test_a_deadlock_is_not_answered_with_any_capacity():
    """No limit and no replica moves a queue that the scheduler cannot schedule."""
    capacity = MEMORY_ADVICE | {"raise_max_num_seqs", "lower_max_model_len", "add_replicas"}
    assert not capacity & set(load().verdicts["scheduler_deadlock"].fixes)


def test_a_possible_hang_is_probed_before_it_is_restarted():
    """A request of one token is cheaper than a restart and tells a hang from old gauges."""
    for name in ("engine_stalled", "scheduler_deadlock"):
        fixes = load().verdicts[name].fixes
        assert fixes.index("send_probe_request") < fixes.index("restart_engine")


def test_imbalance_is_cured_by_routing_alone():
    """The memory is there, on the other engines."""
    assert load().findings["dp_imbalance"].fixes == ("balance_routing",)


def test_full_and_fine_asks_for_nothing():
    """Usage alone is no reason to change anything."""
    for name in ("kv_full_ok", "healthy", "starting", "sleeping"):
        assert load().verdicts[name].fixes == ()


def test_swap_is_named_only_to_say_that_there_is_none():
    """V1 has no swap space, so no text may send anybody there."""
    for name, text in texts():
        assert not re.search(r"(?<!no )\bswap", text, re.IGNORECASE), name


def test_no_text_sends_anybody_to_a_preemption_log_line():
    """V1 logs no preemption; the only mention says so."""
    mentions = [text for _, text in texts() if re.search(r"log line", text)]
    assert len(mentions) == 1
    assert "no log line reports a preemption" in mentions[0]


def test_flags_have_the_version_that_brought_them():
    """Flags that older servers refuse say from which version on they are known."""
    since = {name: fix.since for name, fix in load().fixes.items() if fix.since}
    assert since == {
        "set_watermark": "0.24",
        "disable_async_scheduling": "0.14",
        "reserve_full_prompt": "0.19",
        "drop_full_prompt_reservation": "0.19",
    }


def test_default_utilization_is_that_of_the_version():
    """The default rose from 0.9 to 0.92 with 0.20."""
    conditions = " ".join(load().fixes["raise_gpu_memory_utilization"].conditions)
    assert "0.92 from vLLM 0.20 on and 0.9 before" in conditions


def test_texts_are_plain():
    """Texts go to terminals, HTML and notifications alike, so they hold no markup and no template."""
    for name, text in texts():
        assert not re.search(r"[`*]|</|\{\{", text), (name, text)


def test_summaries_have_no_numbers():
    """A summary is the same for every instance."""
    for entry in entries():
        assert not re.search(r"\d", entry.summary.replace("V1", "")), entry.name


def test_expressions_name_series_of_ours_or_of_vllm():
    """Each expression to confirm by reads our series, vLLM's own, or those of Kubernetes."""
    for entry in entries():
        for check in entry.confirm:
            if check.promql is not None:
                assert re.search(r"vllm_pressure_\w+|vllm:\w+|\"vllm:|kube_\w+", check.promql), entry.name


# --- values --------------------------------------------------------------------------------------


def test_severities_are_ordered():
    """None < info < warning < critical, by rank and by comparison."""
    ordered = [Severity.NONE, Severity.INFO, Severity.WARNING, Severity.CRITICAL]
    assert sorted([ordered[2], ordered[0], ordered[3], ordered[1]]) == ordered
    assert [severity.rank for severity in ordered] == [0, 1, 2, 3]
    assert Severity("critical") is max(ordered)


def test_a_severity_is_not_compared_with_a_word():
    """Words would compare by their letters."""
    with pytest.raises(TypeError):
        assert Severity.NONE < "critical"


def test_a_flag_takes_its_number():
    """The number stands where the template has its place, and a placeholder where it is unknown."""
    seats = load().fixes["lower_max_num_seqs"]
    assert seats.flag_with(48) == "--max-num-seqs 48"
    assert seats.flag_with(None) == "--max-num-seqs VALUE"
    assert load().fixes["add_replicas"].flag_with(2) is None


def test_a_flag_with_braces_of_its_own_takes_its_number():
    """JSON in a flag keeps its braces."""
    limit = load().fixes["check_client_limits"]
    assert limit.flag_with(4096) == "--override-generation-config '{\"max_new_tokens\": 4096}'"


def test_entries_are_found_by_name_among_both_kinds():
    """A name that is no verdict is looked up among the findings."""
    assert load().entry("seat_bound") is load().verdicts["seat_bound"]
    assert load().entry("restarted") is load().findings["restarted"]
    with pytest.raises(KeyError):
        load().entry("no_such_word")


def test_the_catalogue_is_read_once_and_cannot_be_changed():
    """All callers share one catalogue, so nobody may change it."""
    assert load() is load()
    with pytest.raises(TypeError):
        load().verdicts["healthy"] = None
    with pytest.raises(TypeError):
        load().verdicts["kv_bound"].not_help["add_replicas"] = "No."
    with pytest.raises(FrozenInstanceError):
        load().verdicts["healthy"].severity = Severity.CRITICAL


# --- the form of the file ------------------------------------------------------------------------


class UniqueKeyLoader(yaml.SafeLoader):
    """Rejects a key written twice, of which YAML would silently keep the second."""

    def construct_mapping(self, node, deep=False):
        """Read a mapping after looking at its keys."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice among {keys} {node.start_mark}"
        return super().construct_mapping(node, deep=deep)


def test_the_cost_of_a_fix_is_what_its_action_and_risk_say():
    """An action that restarts the server says so in its cost, and so does one that changes answers."""
    table = load().fixes
    starting = [name for name, fix in table.items() if re.match("Restart|Remove|Serve", fix.action)]
    assert [name for name in starting if not table[name].restarts] == []
    changing = {name for name, fix in table.items() if fix.risk.startswith("Answers change")}
    assert {name for name, fix in table.items() if fix.cost == "numerics"} == changing
    assert [name for name, fix in table.items() if fix.restarts and fix.cost == "none"] == []
    assert not table["add_replicas"].restarts


@pytest.fixture(scope="module")
def document():
    """The file as YAML has it."""
    text = Path(catalogue_module.__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=UniqueKeyLoader)  # it is a SafeLoader


ONE_SENTENCE = {"summary", "critical_when", "not_help"}
SENTENCES = {*ONE_SENTENCE, "meaning", "impact", "action", "effect", "conditions", "risk", "text"}
FORMS = {
    "alert": r"Vllm([A-Z][a-z0-9]+)+",
    "model_alert": r"VllmModel([A-Z][a-z0-9]+)+",
    "cost": "none|flag|numerics|gpus",
    "flag": r"--[a-z0-9-]+( [^{]*(\{\\?\"?.*)?)?",
    "since": r"\d+\.\d+(\.\d+)?",
    "wait": r"[1-9]\d*[smh]",
    "keep": r"[1-9]\d*[smh]",
    "scope": "engine|model|target",
    "topic": "|".join(TOPICS),
    "title": r".*[^.]",
}
TRUTHS = {"of_target", "needs_short_kv", "may_harm"}


def leaves(key, value, path):
    """Every value with its key and path; those of lists and of `not_help` have the key of the whole."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves("not_help" if key == "not_help" else name, inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(key, inner, f"{path}[{index}]")
    else:
        yield key, value, path


def wrong_form(key, value):
    """What is wrong with one value, None if nothing is."""
    if key in TRUTHS:
        return None if isinstance(value, bool) else "wanted true or false"
    if value is None:
        return None if key in {"alert", "flag"} else "wanted text"
    if not isinstance(value, str) or not value.strip() or "\n" in value.strip():
        return "wanted one line of text (fold it with >-)"
    if key in SENTENCES and value[-1] not in ".!?":
        return "wanted a sentence's end"
    if key in ONE_SENTENCE and re.search(r"[.!?] ", value):
        return "wanted one sentence, got several"
    if key in FORMS and not re.fullmatch(FORMS[key], value):
        return f"wanted the form {FORMS[key]}"
    return "wanted at most one {value}" if key == "flag" and value.count("{value}") > 1 else None


def test_every_value_of_the_file_has_its_form(document):
    """Unknown and missing keys do not get this far: they are arguments of the classes."""
    assert document.keys() == {"verdicts", "findings", "fixes", "watching", "relief"}
    wrong = [
        f"{path}: {fault}, got {value!r}"
        for key, value, path in leaves("", document, "")
        if (fault := wrong_form(key, value))
    ]
    assert wrong == []
    names = [name for table in document.values() for name in table]
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)] == []


def test_a_wrong_form_is_seen():
    """One value of each kind."""
    wrong = {
        "alert": "vllmBad",
        "summary": "Two. Sentences.",
        "meaning": "No end",
        "action": "One.\nTwo.",
        "flag": "max-num-seqs {value}",
        "title": "A title.",
        "since": 0.1,
        "wait": "5 minutes",
        "topic": "pods",
        "of_target": "yes",
        "impact": None,
    }
    assert [key for key, value in wrong.items() if wrong_form(key, value) is None] == []


def test_an_unknown_key_is_an_error():
    """So is a missing one."""
    for row in ({"titel": "Mend"}, {"title": "Mend"}):
        with pytest.raises(TypeError):
            catalogue_module._table(catalogue_module.Fix, {"mend": row})


def alerts_of(entry):
    """The alerts of an entry: of one engine, and of the model."""
    return [name for name in (entry.alert, getattr(entry, "model_alert", None)) if name]


def can_page(verdict):
    """Whether a verdict is, or can become, critical."""
    return verdict.severity is Severity.CRITICAL or verdict.critical_when is not None


def contradictions(entry):
    """What is wrong between the keys of one entry."""
    fixes = load().fixes.keys()
    if (entry.severity >= Severity.WARNING) > (entry.alert is not None):
        yield "wanted an alert, because of its severity"
    if entry.alert is not None and entry.severity is Severity.NONE:
        yield "wanted no alert, because its severity is none"
    if entry.alert is not None and (entry.timing is None or not entry.timing.wait):
        yield "wanted a timing, because it has an alert"
    if entry.timing is not None and bool(entry.timing.keep) != bool(entry.timing.why_keep):
        yield "wanted keep and why_keep together"
    if len(set(entry.fixes)) != len(entry.fixes) or not {*entry.fixes, *entry.not_help} <= fixes:
        yield "unknown fix, or one that stands twice"
    if {*entry.fixes} & entry.not_help.keys():
        yield "a fix is advised and said not to help"
    if isinstance(entry, Verdict) and can_page(entry) != (entry.model_alert is not None):
        yield "wanted a model's alert exactly where the verdict can be critical"
    if isinstance(entry, Verdict) and entry.critical_when and entry.severity is Severity.CRITICAL:
        yield "critical_when, and critical already"


def test_no_entry_contradicts_itself_or_another():
    """Each alert belongs to one entry, each name to one table, and each fix is advised somewhere."""
    all_of_them = [*entries(), *load().watching.values()]
    assert [f"{entry.name}: {fault}" for entry in all_of_them for fault in contradictions(entry)] == []
    names = [name for entry in all_of_them for name in alerts_of(entry)]
    assert len(names) == len(set(names))
    assert not load().verdicts.keys() & load().findings.keys()
    assert load().fixes.keys() == {fix for entry in entries() for fix in entry.fixes}
    assert {finding.instead_of for finding in load().findings.values()} <= {None, *load().verdicts}


def test_a_contradiction_is_seen():
    """One entry of each kind of fault."""
    good = load().verdicts["engine_stalled"]
    assert not list(contradictions(good))
    for change in (
        {"alert": None},
        {"severity": Severity.NONE},
        {"timing": None},
        {"timing": Timing("why", "1m", "2m")},
        {"fixes": ("add_replicas", "add_replicas")},
        {"fixes": ("mend",)},
        {"fixes": ("add_replicas",)},
        {"model_alert": None},
        {"critical_when": "It lasts."},
    ):
        assert list(contradictions(replace(good, **change))), change


def test_the_module_exports_what_it_says():
    """Every public name of the module exists."""
    assert all(hasattr(catalogue_module, name) for name in catalogue_module.__all__)
