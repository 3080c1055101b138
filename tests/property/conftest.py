"""Examples are the same in every run; what failed once stays in the code as an ordinary test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fsdp-ckpt",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fsdp-ckpt")
