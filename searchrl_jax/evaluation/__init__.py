"""Metrics, statistics and reports: from what agents did on held-out tasks to a comparison that holds up."""
