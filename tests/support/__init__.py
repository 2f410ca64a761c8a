"""Shared by tests: bodies, scenes, recordings, servers, processes, real programs."""
