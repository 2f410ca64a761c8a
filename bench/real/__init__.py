"""Checks verdicts, forecasts and advice against a real vLLM on this machine's CPU: ``make real``.

Each load runs on the server as it is, then with the first advised change, then with each named change.
A CPU is no GPU: this shows that advice depends on the time of a step, not how long a step of an H100 takes.
"""
