"""Renderers of a report."""
