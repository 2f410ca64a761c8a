"""The scheduler simulation: the effect of each change on a load. No clock, no chance but seeds, no I/O.

From the inside out: `pool` (blocks), `kv` (blocks of each request), `running` (the running requests),
`scheduler` (one engine), `run` (arrivals, gates, time, results), `from_status` (an engine as an exporter
sees it), `whatif` (candidates compared with the present). Times are whole nanoseconds, so a workload and a
seed give the same result everywhere.

Not modelled: speculative decoding, KV offloading, encoder caches, pipeline parallelism,
``long_prefill_token_threshold``; stop tokens (lengths are known in advance); reuse of generated text by
another request; slower attention over a long context; and the milliseconds over which a burst of HTTP
requests arrives, which change the preemptions of a run by 2 or 3 on real servers.
"""
