"""Everything that knows vLLM: the table of names, the reader of a metrics body, the HTTP client."""
