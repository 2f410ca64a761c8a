"""Prometheus exporter and preemption alerting sidecar for vLLM.

Data flows one way: bytes -> snapshot -> history -> signals -> verdicts -> publication. ``vllm/`` reads the
server, ``analysis/`` and ``simulation/`` are pure, ``publish/`` and ``rules/`` write results, ``runtime/``
moves data between them, and ``commands/`` is the command line. ``standin/`` is a vLLM without a model.
"""

__version__ = "0.1.0"
