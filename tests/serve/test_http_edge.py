"""The HTTP edge: what a connection, its headers and its body may be, before any of it reaches a route."""

import datetime
import ipaddress
import json
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.testclient import TestClient

from arpg import InputError
from arpg.serve.app import create_app
from arpg.serve.auth import ApiKeys, check_exposure, is_loopback
from arpg.serve.middleware import POST_ROUTES, allowed_hosts
from arpg.serve.server import tls_options
from arpg.serve.server_config import Limits
from support.http import ask, error, until

KEY = "a-key-of-more-than-16"


class Connection:
    """A connection whose bytes are written by the test."""

    def __init__(self, address):
        where = urlsplit(address)
        self.socket = socket.create_connection((where.hostname, where.port), timeout=30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, *parts):
        self.socket.sendall(b"".join(part if isinstance(part, bytes) else part.encode() for part in parts))
        return self

    def send_until_closed(self, part, *, times, pause=0.0):
        """Send `part` again and again until the server has closed the connection; return how often."""
        for i in range(times):
            try:
                self.send(part)
            except OSError:
                return i
            time.sleep(pause)
        raise AssertionError(f"the connection is still open after {times} parts")

    def closed(self):
        """Wait until the server has closed the connection; return what it sent before."""
        received = b""
        try:
            while part := self.socket.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        return received

    def response(self):
        """Read one response: its status and its JSON."""
        file = self.socket.makefile("rb")
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, json.loads(file.read(int(headers["content-length"])))


def head(*more, path="/v1/arpg/generate", method="POST", length=None):
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *more]
    return "\r\n".join(lines + ([] if length is None else [f"content-length: {length}"])) + "\r\n\r\n"


def status_of(received):
    return int(received.split()[1])


# Headers


@pytest.mark.parametrize(
    "headers",
    [
        "\r\n".join(f"x-{i}: 1" for i in range(101)),
        "x: " + "y" * (1 << 15),
        "\r\n".join(f"x-{i}: {'y' * 500}" for i in range(80)),
    ],
    ids=["many", "long", "both"],
)
def test_too_many_or_too_long_headers_are_a_431(live_edge, headers):
    address, _ = live_edge
    with Connection(address) as connection:
        connection.send(head(headers, path="/healthz", method="GET"))
        status, body = connection.response()
        assert status == 431
        assert "32768 bytes and 100 headers" in body["error"]["message"]
        assert connection.closed() == b""


def test_headers_without_an_end_are_not_collected(live_edge):
    """The server closes the connection after 32 KiB; 160 MiB took it 17 seconds with another parser."""
    address, _ = live_edge
    with Connection(address) as connection:
        connection.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
        assert connection.send_until_closed(b"x: " + b"y" * (1 << 16) + b"\r\n", times=2000) < 200


def test_99_headers_are_accepted(live_edge):
    address, _ = live_edge
    with Connection(address) as connection:
        lines = [f"x-{i}: {'y' * 200}" for i in range(99)]
        connection.send(head(*lines, path="/healthz", method="GET"))
        assert connection.response() == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /healthz HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),
        ("GET /healthz HTTP/9\r\nhost: localhost\r\n\r\n", 400),
        ("\x16\x03\x01 not http\r\n\r\n", 400),
        (head("transfer-encoding: chunked", length=5) + "0\r\n\r\n", 400),
        (head("content-length: 5", length=6), 400),
        (head("transfer-encoding: chunked") + "zz\r\n", 400),
    ],
)
def test_what_is_not_plain_http_is_refused(live_edge, caplog, request_, status):
    address, _ = live_edge
    with Connection(address) as connection:
        found, body = connection.send(request_).response()
        assert found == status
        assert set(body) == {"error"}
    assert "Traceback" not in caplog.text


def test_a_chunk_that_is_not_valid_ends_the_request_and_nothing_else(live_edge, caplog):
    """Also while a response is being sent."""
    address, service = live_edge
    with Connection(address) as connection:
        connection.send(head("transfer-encoding: chunked", "content-type: application/json"))
        connection.send("11\r\n", '{"class":1,"stream', "\r\n", "no number\r\n")
        assert connection.closed()
    assert until(lambda: service.admission.num_admitted == 0)
    assert "Traceback" not in caplog.text


def test_a_forwarded_address_is_ignored(live_edge, caplog):
    address, _ = live_edge
    caplog.set_level("INFO", logger="arpg")
    with Connection(address) as connection:
        connection.send(head("x-forwarded-for: 203.0.113.9", path="/v1/models", method="GET"))
        assert connection.response()[0] == 200
    assert until(lambda: [r for r in caplog.records if getattr(r, "route", "") == "/v1/models"])
    assert {r.client for r in caplog.records if hasattr(r, "client")} == {"127.0.0.1"}


# Connections


@pytest.fixture(scope="module")
def live_edge(live_module):
    return live_module()


@pytest.fixture(scope="module")
def live_quick(live_module):
    """A server that waits for nobody."""
    return live_module(header_timeout_s=0.2, keep_alive_s=0.2, io_timeout_s=0.4)


@pytest.mark.parametrize("sent", ["", "GET /healthz HT", "GET /healthz HTTP/1.1\r\nhost: local"])
def test_silent_connections_are_closed(live_quick, sent):
    address, _ = live_quick
    connections = [Connection(address).send(sent) for _ in range(40)]
    for connection in connections:
        with connection:
            received = connection.closed()
            assert received == b"" if not sent else status_of(received) == 408


def test_headers_that_drip_are_a_408(live_quick):
    address, _ = live_quick
    with Connection(address) as connection:
        connection.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        connection.send_until_closed(b"y", times=300, pause=0.05)


def test_an_idle_connection_is_closed_after_a_request(live_quick):
    address, _ = live_quick
    with Connection(address) as connection:
        for _ in range(3):
            assert connection.send(head(path="/healthz", method="GET")).response()[0] == 200
        assert connection.closed() == b""
    with Connection(address) as connection:
        connection.send(head(path="/healthz", method="GET")).response()
        assert status_of(connection.send("GET /healthz HTT").closed()) == 408


def test_a_body_that_nobody_reads_is_discarded_for_a_while(live_quick):
    """The client gets its 404 although it is still sending; then it is disconnected."""
    address, service = live_quick
    with Connection(address) as connection:
        connection.send(head(path="/nowhere", length=1 << 40))
        assert connection.send(b"x" * (1 << 18)).response()[0] == 404
        connection.send_until_closed(b"x" * 1000, times=6000, pause=0.005)
    assert service.admission.num_admitted == 0


def test_a_discarded_body_leaves_the_connection_usable(live_edge):
    address, _ = live_edge
    with Connection(address) as connection:
        connection.send(head(path="/nowhere", length=100000))
        assert connection.response()[0] == 404
        connection.send(b"x" * 100000, head(path="/healthz", method="GET"))
        assert connection.response()[0] == 200


def test_idle_connections_make_room_for_new_ones(live):
    address, service = live(max_connections=4)
    silent = [Connection(address) for _ in range(20)]
    with Connection(address) as connection:
        assert connection.send(head(path="/healthz", method="GET")).response()[0] == 200
    assert silent[0].closed() == b""
    for connection in silent:
        connection.socket.close()
    busy = [Connection(address).send(head(length=50), "{") for _ in range(4)]

    def bodies():
        return service.metrics.registry.get_sample_value("arpg_body_bytes")

    assert until(lambda: bodies() == 4)
    with Connection(address) as refused:
        status, body = refused.response()
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
    for connection in busy:
        connection.socket.close()
    assert until(lambda: bodies() == 0)


# Bodies


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (head(length=1 << 24), 401),
        (head(f"authorization: Bearer {KEY}", path="/v1/nowhere", length=1 << 24), 404),
        (head(f"authorization: Bearer {KEY}", method="PUT", length=1 << 24), 405),
        (head(f"authorization: Bearer {KEY}", length=(1 << 24) + 1), 413),
        (head(f"authorization: Bearer {KEY}", path="/v1/images/generations", length=1 << 20), 413),
        (head("transfer-encoding: chunked"), 401),
    ],
)
def test_the_answer_comes_before_the_body(live_keys, request_, status):
    address, _ = live_keys
    with Connection(address) as connection:
        assert connection.send(request_).response()[0] == status


@pytest.fixture(scope="module")
def live_keys(live_module):
    return live_module(keys=ApiKeys([KEY]))


def test_all_bodies_together_are_limited(live):
    address, service = live(max_body_bytes=3 << 20, io_timeout_s=60)
    held = [Connection(address).send(head(length=1 << 24), b" " * (1 << 20)) for _ in range(2)]
    metric = service.metrics.registry.get_sample_value
    assert until(lambda: metric("arpg_body_bytes") == 2 << 20)
    with Connection(address) as connection:
        status, body = connection.send(head(length=2 << 20), b" " * (2 << 20)).response()
        assert (status, body["error"]["code"]) == (503, "bodies_full")
    with Connection(address) as connection:
        small = b'{"class": 1, "steps": 1}'
        connection.send(head("content-type: application/json", length=len(small)), small)
        assert connection.response()[0] == 200
    for connection in held:
        connection.socket.close()
    assert until(lambda: metric("arpg_body_bytes") == 0)


def test_every_route_with_a_body_has_a_limit(served_module):
    schema = create_app(served_module()).openapi()
    posts = {path: item["post"] for path, item in schema["paths"].items() if "post" in item}
    assert posts.keys() == POST_ROUTES.keys()
    images = ("image", "control")
    for path, operation in posts.items():
        (content,) = operation["requestBody"]["content"].values()
        fields = content["schema"].get("properties")
        if fields is None:
            fields = schema["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]["properties"]
        assert POST_ROUTES[path] == any(name in fields for name in images), path


def test_a_route_without_images_takes_less(served):
    client = TestClient(create_app(served(limits=Limits(bytes=5000, json_bytes=500))))
    long = {"prompt": "1", "user": "x" * 500}
    assert "500 bytes" in error(client.post("/v1/images/generations", json=long), 413)["message"]
    assert client.post("/v1/arpg/generate", json={"class": 1, "steps": 1, "prompt": "x" * 600}).status_code == 400


# Addresses


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("127.255.1.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("::ffff:10.0.0.1", False),
        ("192.168.1.2", False),
        ("localhost.example.org", False),
    ],
)
def test_all_loopback_addresses_are_treated_alike(host, alone):
    assert is_loopback(host) == alone
    hosts = allowed_hosts(host, ApiKeys())
    assert (hosts is not None) == alone
    if alone:
        check_exposure(host, ApiKeys(), insecure=False)
        assert {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()} == set(hosts)
    assert allowed_hosts(host, ApiKeys([KEY])) is None


def test_a_server_on_another_loopback_address_checks_the_host(served_module):
    app = create_app(served_module(), hosts=allowed_hosts("127.0.0.2", ApiKeys()))
    for host, status in ((b"127.0.0.2:8000", 200), (b"Localhost", 200), (b"evil.example", 421), (b"127.0.0.3", 421)):
        assert ask(app, (b"host", host))[0] == status
    twice = ask(app, (b"host", b"localhost"), (b"Host", b"localhost"))
    assert twice[0] == 400
    assert b"host is given twice" in twice[1]


@pytest.mark.parametrize("origin", [b"http://[", b"null", b"http://[::1", b"//", b"http://evil.example", b"\xff"])
def test_any_other_origin_is_a_403(served_module, origin):
    app = create_app(served_module())
    headers = [(b"host", b"localhost"), (b"origin", origin), (b"content-type", b"application/json")]
    assert ask(app, *headers, method="POST", path="/v1/arpg/generate", body=b"{}")[0] == 403


def test_slow_connections_do_not_block_others(live_edge):
    """While 30 clients send large bodies slowly, a probe is answered at once."""
    address, _ = live_edge
    stop = threading.Event()

    def drip():
        with Connection(address) as connection:
            connection.send(head(path="/nowhere", length=1 << 24))
            while not stop.wait(0.01):
                connection.send(b"x" * 4096)

    threads = [threading.Thread(target=drip, daemon=True) for _ in range(30)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with Connection(address) as connection:
                assert connection.send(head(path="/healthz", method="GET")).response()[0] == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that is its own authority, and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "arpg test")])
    day = datetime.datetime(2020, 1, 1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(day)
        .not_valid_after(day + datetime.timedelta(days=365 * 100))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
    (folder / "key.pem").write_bytes(pem)
    password = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
    (folder / "encrypted.pem").write_bytes(pem)
    return folder


def test_https(live, certificate):
    address, _ = live(tls=tls_options(certificate / "cert.pem", certificate / "key.pem"))
    assert address.startswith("https://")
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with httpx.Client(base_url=address, verify=trust) as client:
        assert client.get("/readyz").json() == {"status": "ok"}
        assert client.post("/v1/arpg/generate", json={"class": 1, "steps": 1}).json()["images"]
    with Connection(address) as connection:  # plain HTTP
        assert connection.send(head(path="/healthz", method="GET")).closed() == b""
    with httpx.Client(base_url=address) as stranger, pytest.raises(httpx.ConnectError):
        stranger.get("/readyz")


def test_a_key_that_is_encrypted_is_refused(certificate):
    with pytest.raises(InputError, match="not encrypted"):
        tls_options(certificate / "cert.pem", certificate / "encrypted.pem")
