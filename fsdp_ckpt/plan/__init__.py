"""Arithmetic on the catalog: pure functions and data, no input or output."""
