"""Prometheus exporter and preemption alerting sidecar for vLLM.

Data flows one way: bytes -> snapshot -> history -> signals -> publication. ``vllm/`` knows the
server, ``analysis/`` is pure, ``publish/`` shows the result; ``watch.py`` moves data between them.
"""

__version__ = "0.1.0"
