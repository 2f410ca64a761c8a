"""One scenario explained: its parameters, the truth with its figures, the verdicts and the signals."""

from collections.abc import Iterator

from bench.judge.draw import Scenario, draw
from bench.judge.machine import Said
from bench.judge.trial import Trial, trial
from bench.judge.truth import Figures

__all__ = ["explain"]


def explain(seed: int, kind: str | None = None) -> str:
    """Return the explanation of a seed."""
    scenario, judged = draw(seed, kind), trial(seed, kind)
    return "\n".join([*_scenario(scenario), *_truth(judged), *_verdicts(judged), *_signals(judged)])


def _scenario(scenario: Scenario) -> Iterator[str]:
    engine, view, step = scenario.engine, scenario.view, scenario.engine.step_time
    calm, trouble = round(scenario.calm), round(scenario.trouble)
    yield f"seed {scenario.seed}, {scenario.kind}: {calm} s calm, {trouble} s trouble"
    yield (
        f"engine: {engine.usable_blocks} blocks of {engine.block_size}"
        f" (+{engine.blocks_per_request} per request), {engine.max_num_seqs} seats,"
        f" budget {engine.max_num_batched_tokens}, longest {engine.max_model_len},"
        f" watermark {engine.watermark:g},"
        f" prefix cache {engine.enable_prefix_caching}, whole prompts {engine.reserve_full_prompt},"
        f" async {engine.async_scheduling}"
    )
    yield (
        f"step: {step.fixed / 1e6:.1f} ms + {step.per_token / 1e3:.1f} us per token"
        f" + {step.per_sequence / 1e3:.1f} us per request"
    )
    for number, traffic in enumerate(scenario.traffic):
        for name, phase in zip(("calm", "trouble"), traffic.phases, strict=False):
            load = (
                f"{phase.clients} clients"
                if traffic.closed
                else f"{phase.rate[0]:.2f} to {phase.rate[1]:.2f}/s"
            )
            yield (
                f"load {number} {name}: {load}, burst {phase.burst}, prompts {phase.prompts.mean:.0f},"
                f" answers {phase.outputs.mean:.0f}, patience {traffic.patience},"
                f" prefixes {traffic.prefixes} of {traffic.prefix_tokens}"
            )
    yield f"fault: {scenario.fault}"
    yield (
        f"seen as {view.dialect.version}, every {view.interval:g} s from {view.since:.0f} s,"
        f" jitter {view.jitter:g}, missed {view.missed:g} and {view.outage}, {view.api_servers} API servers,"
        f" told {dict(view.facts)}"
    )


def _truth(judged: Trial) -> Iterator[str]:
    truth = judged.truth
    yield f"truth: {truth.family}, onset {truth.onset}, work lost {truth.harm:.0%}, page {truth.page}"
    scores = ", ".join(f"{name} {score:.2f}" for name, score in truth.scores.items())
    yield f"removed: {scores or 'nothing tried'}"
    yield f"as it is: {_figures(truth.base)}"
    yield f"without shortage: {_figures(truth.ample)}"
    yield f"acceptable: {', '.join(sorted(truth.acceptable))}"
    words = [
        "right" if judged.right else "WRONG",
        *(["FALSE PAGE"] if judged.false_page else []),
        *(["MISSED PAGE"] if judged.missed_page else []),
    ]
    yield (
        f"verdict: {judged.verdict}: {', '.join(words)}; after {judged.seconds} s, {judged.flaps} flaps"
        f"{', others ' + ', '.join(judged.others) if judged.others else ''}"
    )


def _figures(figures: Figures) -> str:
    return (
        f"waiting {figures.waiting:.1f}, running {figures.running:.1f}, work {figures.work:.3f},"
        f" {figures.finished:.2f} finished/s, {figures.preempted:.2f} preempted per finished,"
        f" {figures.again:.0%} twice, KV peak {figures.kv_peak:.0%}"
    )


def _verdicts(judged: Trial) -> Iterator[str]:
    for number, begin, end in judged.pages:
        yield f"critical without reason: engine {number} from {begin:.1f} to {end:.1f} s"
    if judged.recovery is not None:
        warned, paged, flaps = judged.recovery
        yield f"after the trouble: warned for {warned:.0f} s, critical for {paged:.0f} s, {flaps} flaps"
    before: tuple[str, str] | None = None
    for said in judged.said:
        now = (said.verdict, said.severity)
        if now != before:
            yield f"{said.t:7.1f} s  {said.verdict} ({said.severity})  {_findings(said)}"
        before = now


def _findings(said: Said) -> str:
    return " ".join(said.findings)


def _signals(judged: Trial) -> Iterator[str]:
    yield "      t running waiting deferred   KV  tokens/s prompt/s finished/s preempted/s"
    last = judged.samples[0]
    for sample in judged.samples[1:]:
        if sample.t - last.t < 10:
            continue
        span = sample.t - last.t
        yield (
            f"{sample.t:7.1f} {sample.running:7} {sample.waiting:7} {sample.deferred:8}"
            f" {sample.kv_usage:4.0%}"
            f" {(sample.output_tokens - last.output_tokens) / span:9.1f}"
            f" {(sample.prompt_tokens - last.prompt_tokens) / span:8.0f}"
            f" {(sample.finished - last.finished) / span:10.2f}"
            f" {(sample.preemptions - last.preemptions) / span:11.2f}"
        )
        last = sample
