"""The service against its OpenAPI document, by schemathesis."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig
from served import Scripted, on_loopback

from vramcast.collocation.service.app import make_app
from vramcast.collocation.service.settings import Settings

ACCEPTED = ["2xx", "3xx", "401", "403", "404", "409", "413", "422", "429"]
"""With 413 and 422, because no schema states the size of a body, or that heads divide a width; and without 5xx."""
REFUSED = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
"""The list of schemathesis and 413: a bad body may also be too large, which is checked first."""
SETTINGS = Settings(port=0, log_requests=False)


def make_schema() -> Any:
    document = make_app(SETTINGS, Scripted).app.openapi()  # type: ignore[attr-defined]
    # the coverage phase sends some thousand requests and takes a minute: `schemathesis run` against a service has it
    config = SchemathesisConfig.from_dict(
        {
            "checks": {
                "positive_data_acceptance": {"expected-statuses": ACCEPTED},
                "negative_data_rejection": {"expected-statuses": REFUSED},
            },
            "phases": {"coverage": {"enabled": False}},
        }
    )
    return schemathesis.openapi.from_dict(document, config=config)


schema = make_schema()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with on_loopback(SETTINGS) as response:
        yield response


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_service_follows_its_openapi_document(url: str, case: Any) -> None:
    case.call_and_validate(base_url=url, timeout=20)
