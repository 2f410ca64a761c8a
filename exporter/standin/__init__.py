"""A stand-in for a vLLM server: simulated or recorded, for the demo, tests and benches."""
