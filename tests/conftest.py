"""Hypothesis draws the same examples in every run, so that a red build is red for everybody."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,  # a busy machine is slow, not wrong
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", parent=settings.get_profile("deterministic"), derandomize=False, max_examples=5000)
settings.load_profile("deterministic")
