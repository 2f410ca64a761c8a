"""Pure judgement: no I/O, no clock, nothing of HTTP or of the ways results are published."""
