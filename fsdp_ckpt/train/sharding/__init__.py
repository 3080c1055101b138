"""Shard a model as a configuration says: which modules, over which ranks, in which precision, and with which values."""
