"""Makes the Grafana dashboards: one module for each, and what they share."""
