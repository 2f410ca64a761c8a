"""One module per command: what it takes and what it does. No command imports another."""
