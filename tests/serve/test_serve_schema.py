"""The OpenAPI schema: complete, and followed by the server (schemathesis)."""

import hypothesis
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from arpg import Pipeline, SamplingDefaults, TokenizerConfig, VQTokenizer
from arpg.serve.app import create_app
from arpg.serve.schemas import Edit, Expand, Generate, Inpaint, Outpaint
from arpg.serve.server_config import Limits

SETTINGS = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def service(model, served):
    """A tokenizer of eight pixels, so that the sizes of the examples are small grids."""
    torch.manual_seed(0)
    config = TokenizerConfig(
        channels=32, multipliers=(1, 1, 1, 1), res_blocks=1, z_channels=8, codebook_size=24, codebook_dim=4
    )
    pipeline = Pipeline(model, VQTokenizer(config).eval(), sampling=SamplingDefaults(steps=4))
    return served(pipeline=pipeline, limits=Limits(images=4, best_of=2, side=192))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_server_follows_its_schema(service, mode):
    """Requests that fit the schema and requests that do not: every response is a documented one, none a 500."""
    api = schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    tried = 0
    for operation in (found.ok() for found in api.get_all_operations()):
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # it has no parameters

        @SETTINGS
        @hypothesis.seed(1)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def keeps_to_it(case):
            # A schema cannot express that a class exists or that an image can be read.
            answer = case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance])
            assert answer.status_code < 500

        keeps_to_it()
        tried += 1
    assert tried >= 7


def test_the_examples_work(service):
    client = TestClient(create_app(service))
    for kind in (Generate, Inpaint, Edit, Outpaint, Expand):
        for example in kind.model_config["json_schema_extra"]["examples"]:
            answer = client.post(f"/v1/arpg/{kind.__name__.lower()}", json=example)
            assert answer.status_code == 200, answer.text


def test_every_route_is_described(service):
    document = TestClient(create_app(service)).get("/openapi.json").json()
    assert set(document["paths"]) == {
        *(f"/v1/arpg/{name}" for name in ("info", "classes", "thumbnails.webp")),
        *(f"/v1/arpg/{name}" for name in ("generate", "inpaint", "edit", "outpaint", "expand", "condition", "upscale")),
        *(
            "/v1/images/generations",
            "/v1/images/edits",
            "/v1/images/variations",
            "/images/{name}",
            "/v1/models",
            "/v1/models/{model}",
        ),
        *("/healthz", "/readyz", "/metrics"),
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)
            assert "200" in operation["responses"], path
            if method == "post":
                assert {"400", "401", "413", "429", "500", "503", "504"} <= set(operation["responses"])
