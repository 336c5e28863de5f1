"""The OpenAPI schema: complete, and the server does what it says (schemathesis)."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from starlette.testclient import TestClient

from arpg.serve.app import create_app
from arpg.serve.schemas import Edit, Expand, Generate, Inpaint, Outpaint


@pytest.fixture
def house(served):
    return served()


@pytest.fixture
def api(house):
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(house))


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_server_keeps_to_its_schema(case):
    case.call_and_validate()


def test_the_examples_work(house):
    client = TestClient(create_app(house))
    for kind in (Generate, Inpaint, Edit, Outpaint, Expand):
        for example in kind.model_config["json_schema_extra"]["examples"]:
            answer = client.post(f"/v1/arpg/{kind.__name__.lower()}", json=example)
            assert answer.status_code == 200, answer.text


def test_every_route_is_described(house):
    document = TestClient(create_app(house)).get("/openapi.json").json()
    assert set(document["paths"]) == {
        *(f"/v1/arpg/{name}" for name in ("info", "classes", "thumbnails.webp")),
        *(f"/v1/arpg/{name}" for name in ("generate", "inpaint", "edit", "outpaint", "expand")),
        *("/v1/images/generations", "/v1/images/edits", "/v1/models", "/v1/models/{model}"),
        *("/healthz", "/readyz", "/metrics"),
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)
            assert "200" in operation["responses"], path
            if method == "post":
                assert {"400", "401", "413", "429", "500", "503", "504"} <= set(operation["responses"])
