"""Puts a run on machines: submission, jobs, the demo."""
