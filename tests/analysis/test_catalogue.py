"""The catalogue: its vocabulary, its advice and its validation."""

import copy
import itertools
import re
from dataclasses import FrozenInstanceError

import pytest
import yaml

from exporter.analysis import catalogue as catalogue_module
from exporter.analysis.catalogue import CatalogueError, Severity, load, parse, parse_text
from exporter.analysis.conditions import HEALTHY, ORDER

# The vocabulary of the field cases, in the order in which one verdict hides another.
VERDICTS = {
    "unreachable": "critical",
    "starting": "none",
    "sleeping": "none",
    "metrics_missing": "warning",
    "data_untrusted": "warning",
    "engine_stalled": "critical",
    "unfittable_request": "critical",
    "scheduler_deadlock": "critical",
    "preemption_thrash": "critical",
    "preemption_not_kv": "info",
    "preemption_light": "info",
    "kv_bound": "warning",
    "seat_bound": "warning",
    "prefill_bound": "warning",
    "deferred_wait": "warning",
    "queue_not_kv": "warning",
    "kv_pressure_rising": "warning",
    "kv_held_no_requests": "warning",
    "decode_slow": "warning",
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
    "restarted",
    "suspect_out_of_memory",
    "engine_missing",
    "mass_preemption",
    "preemption_inferred",
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
    untried = {"unreachable", "starting", HEALTHY}
    assert order == [name for name in load().verdicts if name not in untried]


def test_only_verdicts_with_a_sentence_for_it_become_critical():
    """The catalogue explains each verdict that has a function that makes it critical."""
    lifted = {rule.verdict for rule in ORDER if rule.is_critical is not None}
    assert lifted == {name for name, verdict in load().verdicts.items() if verdict.critical_when}


def test_every_verdict_has_its_severity():
    """Each verdict has the severity of the vocabulary."""
    assert {name: verdict.severity.value for name, verdict in load().verdicts.items()} == VERDICTS


def test_only_deferred_wait_can_become_critical():
    """Severity is lifted in one case: deferred requests while little finishes."""
    lifted = [name for name, verdict in load().verdicts.items() if verdict.critical_when]
    assert lifted == ["deferred_wait"]


def test_every_finding_has_an_entry():
    """The findings are the known ones and no other."""
    assert set(load().findings) == FINDINGS


def test_findings_add_no_severity_but_two():
    """A finding alone matters only when it concerns a whole model or target."""
    warnings = {name for name, finding in load().findings.items() if finding.severity is not Severity.NONE}
    assert warnings == {"dp_imbalance", "engine_missing"}
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
    assert of_target == {"unreachable", "starting", "metrics_missing"}


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
    assert paging == {name for name, severity in VERDICTS.items() if severity == "critical"} | {
        "deferred_wait"
    }


def test_what_matters_has_an_alert_and_its_runbook():
    """From warning on there is an alert; its runbook has the alert's name."""
    for entry in entries():
        assert entry.alert is not None or entry.severity < Severity.WARNING
        assert entry.runbook == entry.alert


# --- the advice ----------------------------------------------------------------------------------


def test_kv_bound_never_advises_seats():
    """The head of that queue lacks blocks; more seats lengthen nothing but the list of the waiting."""
    verdict = load().verdicts["kv_bound"]
    assert "raise_max_num_seqs" not in verdict.fixes
    assert "raise_max_num_seqs" in verdict.not_help


def test_kv_bound_asks_for_more_kv_or_less_of_it_per_server():
    """Each way to more KV is among its fixes, and so are more servers."""
    assert set(load().verdicts["kv_bound"].fixes) >= MORE_KV | {"add_replicas", "split_prefill_decode"}


@pytest.mark.parametrize("name", NOT_KV)
def test_what_kv_did_not_cause_gets_no_memory_advice(name):
    """More KV, or fewer requests sharing it, never cures what is not a shortage of KV."""
    assert not MEMORY_ADVICE & set(load().verdicts[name].fixes)


@pytest.mark.parametrize("name", sorted(set(NOT_KV) - {"healthy"}))
def test_what_kv_did_not_cause_says_that_memory_will_not_help(name):
    """Raising the utilization is everybody's first thought, so it is named with its reason."""
    assert "raise_gpu_memory_utilization" in load().verdicts[name].not_help


def test_memory_advice_is_marked_as_bound_to_a_shortage():
    """The fixes that need a shortage of KV are the memory advice and the reservation of whole prompts."""
    marked = {name for name, fix in load().fixes.items() if fix.needs_short_kv}
    assert marked == MEMORY_ADVICE | {"reserve_full_prompt"}


@pytest.mark.parametrize("name", PREEMPTION)
def test_preemption_is_never_answered_with_less_memory_or_a_smaller_step(name):
    """Lower utilization makes it worse and fewer batched tokens change nothing; both are said."""
    assert {"lower_gpu_memory_utilization", "lower_max_num_batched_tokens"} <= set(
        load().verdicts[name].not_help
    )


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
    assert "no log line tells of a preemption" in mentions[0]


def test_flags_have_the_version_that_brought_them():
    """Flags that older servers refuse say from which version on they are known."""
    since = {name: fix.since for name, fix in load().fixes.items() if fix.since}
    assert since == {
        "set_watermark": "0.24",
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


# --- validation ----------------------------------------------------------------------------------


@pytest.fixture
def document():
    """A small catalogue without a fault."""
    common = {
        "severity": "none",
        "alert": None,
        "summary": "All is well.",
        "meaning": "It works.",
        "impact": "None.",
        "confirm": [{"text": "Look.", "promql": "vllm_pressure_up"}],
        "fixes": [],
        "not_help": {},
        "runbook": None,
    }
    alarm = {"severity": "critical", "alert": "VllmBad", "model_alert": "VllmModelBad", "runbook": "VllmBad"}
    return {
        "verdicts": {
            "bad": {**copy.deepcopy(common), **alarm, "fixes": ["mend"], "not_help": {"wait": "It stays."}},
            "healthy": copy.deepcopy(common),
        },
        "findings": {"odd": {**copy.deepcopy(common), "scope": "engine", "fixes": ["wait"]}},
        "fixes": {
            name: {
                "title": name.capitalize(),
                "flag": None,
                "action": "Do it.",
                "effect": "None.",
                "conditions": ["Always."],
                "risk": "None.",
            }
            for name in ("mend", "wait")
        },
    }


def problems_of(document):
    """Everything that is wrong with a document, in the words of the error."""
    with pytest.raises(CatalogueError) as raised:
        parse(document)
    assert str(raised.value) == "\n".join(raised.value.problems)
    return list(raised.value.problems)


def test_a_faultless_document_is_taken(document):
    """The document that the following tests break is a good one."""
    catalogue = parse(document)
    assert list(catalogue.verdicts) == ["bad", "healthy"]
    assert catalogue.verdicts["bad"].fixes == ("mend",)
    assert catalogue.verdicts["bad"].can_page
    assert catalogue.findings["odd"].scope == "engine"


BAD = "verdicts.bad"
FAULTS = {
    "unknown key": ((BAD, "sevrity"), "info", "verdicts.bad.sevrity: unknown key"),
    "bad severity": (
        (BAD, "severity"),
        "fatal",
        "verdicts.bad.severity: wanted one of none, info, warning, critical, got 'fatal'",
    ),
    "no sentence end": (
        (BAD, "summary"),
        "It is bad",
        "verdicts.bad.summary: wanted a sentence's end, got ...'It is bad'",
    ),
    "two sentences": (
        (BAD, "summary"),
        "Bad. So bad.",
        "verdicts.bad.summary: wanted one sentence, got several",
    ),
    "empty text": ((BAD, "meaning"), " ", "verdicts.bad.meaning: is empty"),
    "number for text": ((BAD, "meaning"), 7, "verdicts.bad.meaning: wanted text, got int"),
    "several lines": (
        (BAD, "impact"),
        "One.\nTwo.",
        "verdicts.bad.impact: wanted one line (fold it with >-)",
    ),
    "unknown fix": ((BAD, "fixes"), ["mend", "mned"], "verdicts.bad.fixes[1]: unknown fix 'mned'"),
    "fix twice": ((BAD, "fixes"), ["mend", "mend"], "verdicts.bad.fixes[1]: 'mend' stands twice"),
    "fix not a list": ((BAD, "fixes"), {"mend": 1}, "verdicts.bad.fixes: wanted a list, got dict"),
    "unknown reason": ((BAD, "not_help"), {"mned": "It stays."}, "verdicts.bad.not_help.mned: unknown fix"),
    "advised and not": (
        (BAD, "not_help"),
        {"mend": "It stays."},
        "verdicts.bad.not_help.mend: advised in fixes as well",
    ),
    "reason without end": (
        (BAD, "not_help"),
        {"wait": "It stays"},
        "verdicts.bad.not_help.wait: wanted a sentence's end, got ...'It stays'",
    ),
    "no reasons": ((BAD, "not_help"), None, "verdicts.bad.not_help: wanted a mapping, got nothing"),
    "no alert": ((BAD, "alert"), None, "verdicts.bad.alert: wanted, because the severity is critical"),
    "no page": (
        (BAD, "model_alert"),
        None,
        "verdicts.bad.model_alert: wanted, because the verdict can be critical",
    ),
    "no runbook": ((BAD, "runbook"), None, "verdicts.bad.runbook: wanted, because there is an alert VllmBad"),
    "lifted already": (
        (BAD, "critical_when"),
        "It lasts.",
        "verdicts.bad.critical_when: it is critical already",
    ),
    "needless alert": (
        ("verdicts.healthy", "alert"),
        "VllmHealthy",
        "verdicts.healthy.alert: must be null, because the severity is none",
    ),
    "needless page": (
        ("verdicts.healthy", "model_alert"),
        "VllmModelHealthy",
        "verdicts.healthy.model_alert: only for a verdict that can be critical",
    ),
    "not a truth": (
        ("verdicts.healthy", "of_target"),
        "yes",
        "verdicts.healthy.of_target: wanted true or false, got 'yes'",
    ),
    "check without text": (
        ("verdicts.healthy", "confirm"),
        [{"promql": "up"}],
        "verdicts.healthy.confirm[0].text: missing",
    ),
    "bare check": (
        ("verdicts.healthy", "confirm"),
        ["Look."],
        "verdicts.healthy.confirm[0]: wanted a mapping, got str",
    ),
    "bad scope": (
        ("findings.odd", "scope"),
        "pod",
        "findings.odd.scope: wanted one of engine, model, target, got 'pod'",
    ),
    "flag without dashes": (
        ("fixes.mend", "flag"),
        "max-num-seqs {value}",
        "fixes.mend.flag: wanted --a-flag with at most one {value}, got 'max-num-seqs {value}'",
    ),
    "title with a stop": (("fixes.mend", "title"), "Mend.", "fixes.mend.title: a title has no full stop"),
    "bare version": (
        ("fixes.mend", "since"),
        0.1,
        r"fixes.mend.since: wanted the form \d+\.\d+(\.\d+)?, got 0.1",
    ),
    "condition without end": (
        ("fixes.mend", "conditions"),
        ["Always"],
        "fixes.mend.conditions[0]: wanted a sentence's end, got ...'Always'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_path(document, fault):
    """Each kind of fault gives a problem that says where it is and what was wanted."""
    (where, key), value, problem = FAULTS[fault]
    kind, name = where.split(".")
    document[kind][name][key] = value
    assert problem in problems_of(document)


@pytest.mark.parametrize(
    "key", ["severity", "alert", "summary", "meaning", "impact", "confirm", "fixes", "not_help", "runbook"]
)
def test_a_missing_key_is_named(document, key):
    """Every key is wanted, even where it would be null or empty, and one missing is one problem."""
    del document["verdicts"]["bad"][key]
    document["findings"]["odd"]["fixes"] = ["wait", "mend"]
    assert problems_of(document) == [f"verdicts.bad.{key}: missing"]


def test_all_faults_are_listed_at_once(document):
    """Whoever edits the catalogue sees everything that is wrong after one run."""
    expected = []
    for (where, key), value, problem in map(
        FAULTS.get, ("unknown key", "bad severity", "no sentence end", "unknown fix", "bad scope")
    ):
        kind, name = where.split(".")
        document[kind][name][key] = value
        expected.append(problem)
    document["extras"] = {}
    expected.append("extras: unknown key")
    assert sorted(problems_of(document)) == sorted(expected)


def test_versions_in_the_wrong_order_are_refused(document):
    """Versions compare by number: 0.9 is before 0.10."""
    document["fixes"]["mend"] |= {"since": "0.10", "until": "0.9"}
    assert problems_of(document) == ["fixes.mend.until: before since (0.10)"]


def test_a_name_is_a_verdict_or_a_finding(document):
    """One word cannot be both."""
    document["findings"]["healthy"] = document["findings"]["odd"]
    assert "findings.healthy: is a verdict as well" in problems_of(document)


def test_an_alert_belongs_to_one_entry(document):
    """Two entries with one alert could not be told apart by whoever is paged."""
    document["verdicts"]["healthy"] |= {"severity": "info", "alert": "VllmBad", "runbook": "VllmBad"}
    assert problems_of(document) == ["verdicts.healthy: alert VllmBad is used before"]


def test_a_fix_that_nobody_advises_is_refused(document):
    """A fix without a verdict is a leftover or a forgotten line."""
    document["findings"]["odd"]["fixes"] = []
    assert problems_of(document) == ["fixes.wait: no verdict and no finding advises it"]


def test_names_are_lower_case(document):
    """Names become label values, so they have one form."""
    document["fixes"]["Mend-It"] = document["fixes"]["mend"]
    assert "fixes.Mend-It: wanted a lower_case name" in problems_of(document)


@pytest.mark.parametrize("top", [None, [], "text", {}])
def test_a_document_of_another_shape_is_refused(top):
    """Whatever is not a mapping of the three tables gives problems and no other error."""
    assert problems_of(top)


def test_a_key_written_twice_is_refused(document):
    """YAML would silently keep the second one."""
    text = yaml.safe_dump(document) + "\nfixes: {}\n"
    with pytest.raises(CatalogueError, match="the key 'fixes' stands twice"):
        parse_text(text)


@pytest.mark.parametrize("text", ["a: [", "? [a]\n: b\n", "\t- x", "%"])
def test_text_that_is_no_yaml_is_refused_with_one_problem(text):
    """A broken file is the same kind of error as a wrong one."""
    with pytest.raises(CatalogueError) as raised:
        parse_text(text)
    assert len(raised.value.problems) == 1


def test_any_wrong_type_anywhere_is_a_problem_and_no_other_error(document):
    """Validation reads on after a fault, so no stand-in may make it fall over."""
    for kind, value in itertools.product(
        ("verdicts", "findings", "fixes"), (None, 3, "x", [1], {"a": 1}, {1: 2})
    ):
        for name, entry in document[kind].items():
            for key in entry:
                broken = copy.deepcopy(document)
                broken[kind][name][key] = value
                try:
                    parse(broken)
                except CatalogueError as error:
                    assert error.problems  # noqa: PT017  # null is right for some keys, so it need not raise


def test_the_module_exports_what_it_says():
    """Every public name of the module exists."""
    assert all(hasattr(catalogue_module, name) for name in catalogue_module.__all__)
