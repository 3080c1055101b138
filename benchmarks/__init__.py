"""Benchmarks: fsdp-ckpt beside `cp`, Accelerate and torch's own converter, in one alternating run.

Run `python -m benchmarks` (or `make bench`). Nothing here is imported by the package or timed by a test.
"""
