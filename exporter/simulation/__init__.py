"""The scheduler simulation: what would each fix do to this load? No clock, no chance, no I/O.

From the inside out: `pool` (blocks), `kv` (what each request holds), `roster` (who runs, and when
something will happen to whom), `scheduler` (one engine), `run` (arrivals, time, a summary), `present`
(what a running exporter tells of an engine), `whatif` (candidates against the present), `scenarios`
(stories for the demo). Times are whole nanoseconds, so a workload and a seed give the same result
everywhere.

Not modelled: speculative decoding, LoRA slots, KV connectors and offloading, encoder caches, hybrid
models with several kinds of KV, pipeline parallelism, ``long_prefill_token_threshold``; stop tokens
(lengths are given beforehand); reuse of generated text by another request; that attention over a long
context takes longer than over a short one; and, since a request is seen between two steps, the
milliseconds in which a burst of HTTP requests trickles in (on real servers that moves the preemptions
of a run by 2 or 3).
"""
