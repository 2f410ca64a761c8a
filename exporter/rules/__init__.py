"""Prometheus rules, generated: with the sidecar's series (``sidecar.py``) or on vLLM's own (``native.py``).

Names, severities and texts come from the same table as the direct push (``publish/alerts.py``), names of
series from ``publish/metrics.py`` and ``vllm/names.py``. ``form.py`` writes the files, ``template.py`` the
code that Prometheus runs to fill in numbers and fixes.
"""
