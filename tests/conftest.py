"""What several test files share."""

from hypothesis import HealthCheck, Phase, settings

# For properties that run torch: slow examples, and the same ones every time.
settings.register_profile(
    "torch",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
