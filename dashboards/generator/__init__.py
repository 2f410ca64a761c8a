"""Generates the Grafana dashboards: one module for each, and shared parts."""
