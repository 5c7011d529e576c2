"""Access control: TLS, client certificates, keys of restricted APIs, clients' shared memory."""

import json
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from conftest import BINARIES
from serving import rank


def echoed(client, module=grpcclient, **options) -> list[float]:
    tensor = module.InferInput("INPUT0", [3], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2, 3], dtype=np.float32))
    return client.infer("identity", [tensor], **options).as_numpy("OUTPUT0").tolist()


def test_grpc_serves_only_over_tls(certificates, tmp_path):
    flags = ["--grpc-use-ssl=true", f"--grpc-server-cert={certificates}/server.pem", f"--grpc-server-key={certificates}/server.key"]
    with rank(tmp_path, *flags) as server:
        root = str(certificates / "root.pem")
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=root) as client:
            assert client.is_server_ready() and echoed(client) == [1, 2, 3]
        with grpcclient.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException):
            client.is_server_live(client_timeout=5)


def test_mutual_tls_requires_a_certificate_signed_by_the_root(certificates, tmp_path):
    flags = ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={certificates}/root.pem"]
    flags += [f"--grpc-server-cert={certificates}/server.pem", f"--grpc-server-key={certificates}/server.key"]
    with rank(tmp_path, *flags) as server:
        root = str(certificates / "root.pem")
        own = {"private_key": str(certificates / "client.key"), "certificate_chain": str(certificates / "client.pem")}
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=root, **own) as client:
            assert echoed(client) == [1, 2, 3]
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=root) as client:
            with pytest.raises(InferenceServerException):
                client.is_server_live(client_timeout=5)


def test_http_and_metrics_serve_only_over_tls(certificates, tmp_path):
    flags = ["--http-use-ssl=true", f"--http-server-cert={certificates}/server.pem", f"--http-server-key={certificates}/server.key"]
    with rank(tmp_path, *flags, "--metrics-use-ssl=true") as server:
        trust = ssl.create_default_context(cafile=certificates / "root.pem")
        for url in (f"https://{server.http}/v2/health/ready", f"https://{server.metrics}/metrics"):
            assert urllib.request.urlopen(url, context=trust, timeout=60).status == 200
        with httpclient.InferenceServerClient(server.http, ssl=True, ssl_context_factory=lambda: trust) as client:
            assert echoed(client, httpclient) == [1, 2, 3]
        with pytest.raises((OSError, HTTPException)):
            urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=60)


def test_mutual_tls_over_http_requires_a_certificate_signed_by_the_root(certificates, tmp_path):
    flags = ["--http-use-ssl-mutual=true", f"--http-root-cert={certificates}/root.pem"]
    flags += [f"--http-server-cert={certificates}/server.pem", f"--http-server-key={certificates}/server.key"]
    with rank(tmp_path, *flags) as server:
        trust = ssl.create_default_context(cafile=certificates / "root.pem")
        with pytest.raises(OSError):
            urllib.request.urlopen(f"https://{server.http}/v2/health/ready", context=trust, timeout=60)
        trust.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        assert urllib.request.urlopen(f"https://{server.http}/v2/health/ready", context=trust, timeout=60).status == 200


def test_a_certificate_that_cannot_be_read_is_named_with_its_flag(tmp_path):
    command = [BINARIES / "trireme", "rank", f"--model-repository={tmp_path}", "--device=cpu", "--http-port=0", "--grpc-port=0"]
    command += ["--metrics-port=0", f"--backend-config=python,shm-region-prefix-name=tls{tmp_path.name[-12:]}_"]
    command += ["--http-use-ssl=true", "--http-server-cert=/nonexistent/cert.pem", "--http-server-key=/nonexistent/key.pem"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "--http-server-cert: cannot read a certificate from /nonexistent/cert.pem" in ended.stderr


def status(url: str, headers: dict[str, str], body: bytes | None = None) -> tuple[int, str | None]:
    """The status of the response, and the authentication scheme that it requests."""
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.headers["www-authenticate"]


def test_inference_needs_a_key_of_the_file_or_the_environment(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("# team a\none\n\n# team b\ntwo\n")
    keys.chmod(0o600)
    monkeypatch.setenv("TRIREME_API_KEYS", "three, four")
    with rank(tmp_path, f"--api-key-file={keys}") as server:
        body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
        infer = f"http://{server.http}/v2/models/identity/infer"
        assert status(infer, {}, body) == (401, "Bearer")
        assert status(infer, {"Authorization": "Bearer five"}, body) == (401, "Bearer")
        for key in ("one", "two", "three", "four"):
            assert status(infer, {"Authorization": f"Bearer {key}"}, body)[0] == 200
            assert status(infer, {"x-api-key": key}, body)[0] == 200
        assert status(f"http://{server.http}/v1/completions", {}, b"{}") == (401, "Bearer")
        assert status(f"http://{server.http}/v1/completions", {"Authorization": "Bearer one"}, b"{}")[0] != 401
        for path in ("/v1/models", "/v1/models/identity"):
            assert status(f"http://{server.http}{path}", {}) == (401, "Bearer"), path
            assert status(f"http://{server.http}{path}", {"Authorization": "Bearer one"})[0] in (200, 404), path
        for path in ("/v2/health/ready", "/v2", "/version", "/health"):
            assert status(f"http://{server.http}{path}", {})[0] == 200, path
        with grpcclient.InferenceServerClient(server.grpc) as client:
            with pytest.raises(InferenceServerException, match="authorization: Bearer KEY"):
                echoed(client)
            assert echoed(client, headers={"authorization": "Bearer two"}) == [1, 2, 3]
        log = server.log.read_text()
        assert not any(key in log for key in ("three", "Bearer one")) and "command line" not in log


def test_keys_of_rules_come_from_files_and_a_literal_one_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\ntwo\n")
    monkeypatch.setenv("OF_METRICS", "m3trics")
    flags = [f"--http-restricted-api=logging:k=@{tmp_path}/keys", "--http-restricted-api=metrics:k=env:OF_METRICS"]
    flags += ["--grpc-restricted-protocol=reflection,logging:k=s3cret"]
    with rank(tmp_path, *flags) as server:
        for key, expected in ((None, 403), ("three", 403), ("one", 200), ("two", 200)):
            assert status(f"http://{server.http}/v2/logging", {"k": key} if key else {})[0] == expected
        assert status(f"http://{server.metrics}/metrics", {})[0] == 403
        assert status(f"http://{server.metrics}/metrics", {"k": "m3trics"})[0] == 200
        log = server.await_log("--grpc-restricted-protocol has a key on the command line").string
        assert "--http-restricted-api has a key" not in log and "s3cret" not in log
        assert "every user of this machine can read the keys in" in log


def test_pages_of_an_allowed_origin_may_call_the_api(tmp_path):
    with rank(tmp_path, "--http-allowed-origins=https://chat.example") as server:

        def call(method, origin, body=None, **headers):
            headers = {"Origin": origin} | {name.replace("_", "-"): value for name, value in headers.items()}
            request = urllib.request.Request(f"http://{server.http}/v1/completions", body, headers, method=method)
            try:
                return urllib.request.urlopen(request, timeout=60)
            except urllib.error.HTTPError as error:
                return error

        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
        preflight = call("OPTIONS", "https://chat.example", **asked)
        assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        body = json.dumps({"model": "nobody", "prompt": "x"}).encode()
        answer = call("POST", "https://chat.example", body, Content_Type="application/json")
        assert answer.status == 404 and json.load(answer)["error"]["code"] == "model_not_found", "the request was read"
        assert answer.headers["access-control-allow-origin"] == "https://chat.example" and answer.headers["vary"] == "origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = call("POST", "https://other.example", body, Content_Type="application/json")
        assert refused.status == 403 and refused.headers["access-control-allow-origin"] is None


def test_a_port_full_of_silent_clients_answers_new_ones(certificates, tmp_path):
    flags = ["--max-connections=40", "--grpc-use-ssl=true", f"--grpc-server-cert={certificates}/server.pem"]
    with rank(tmp_path, *flags, f"--grpc-server-key={certificates}/server.key") as server:
        root = str(certificates / "root.pem")
        held = []
        for address in (server.http, server.grpc):
            host, port = address.split(":")
            held += [socket.create_connection(("127.0.0.1", int(port)), timeout=60) for _ in range(200)]
        assert urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=60).status == 200
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=root) as client:
            assert echoed(client) == [1, 2, 3]
        [client.close() for client in held]


def test_a_restricted_api_needs_its_key(tmp_path):
    flags = ["--http-restricted-api=model-repository,logging:admin-key=s3cret", "--grpc-restricted-protocol=model-repository:admin-key=s3cret"]
    with rank(tmp_path, *flags) as server:
        with httpclient.InferenceServerClient(server.http) as http:
            assert echoed(http, httpclient) == [1, 2, 3]
            with pytest.raises(InferenceServerException, match="expecting header 'admin-key'"):
                http.get_model_repository_index()
            with pytest.raises(InferenceServerException, match="restricted"):
                http.get_log_settings()
            assert http.get_model_repository_index(headers={"admin-key": "s3cret"})[0]["name"] == "identity"
        with grpcclient.InferenceServerClient(server.grpc) as grpc:
            assert echoed(grpc) == [1, 2, 3] and grpc.get_log_settings()
            with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-admin-key'"):
                grpc.get_model_repository_index()
            key = {"triton-grpc-protocol-admin-key": "s3cret"}
            assert grpc.get_model_repository_index(headers=key).models[0].name == "identity"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_tensors_pass_through_shared_memory_if_allowed(is_allowed, tmp_path):
    with rank(tmp_path, f"--allow-client-shm={str(is_allowed).lower()}") as server:
        values = np.arange(4, dtype=np.float32)
        region = shared_memory.create_shared_memory_region("in", f"/trireme_test_{tmp_path.name[-12:]}", values.nbytes)
        try:
            shared_memory.set_shared_memory_region(region, [values])
            with grpcclient.InferenceServerClient(server.grpc) as client:
                if not is_allowed:
                    with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                        client.register_system_shared_memory("in", f"/trireme_test_{tmp_path.name[-12:]}", values.nbytes)
                    return
                client.register_system_shared_memory("in", f"/trireme_test_{tmp_path.name[-12:]}", values.nbytes)
                tensor = grpcclient.InferInput("INPUT0", [4], "FP32")
                tensor.set_shared_memory("in", values.nbytes)
                assert client.infer("identity", [tensor]).as_numpy("OUTPUT0").tolist() == [0, 1, 2, 3]
                client.unregister_system_shared_memory("in")
        finally:
            shared_memory.destroy_shared_memory_region(region)


def test_memory_of_the_server_and_of_other_programs_is_refused(tmp_path):
    own = f"clients{tmp_path.name[-12:]}_ring"
    link, ours = f"trireme_test_link_{tmp_path.name[-12:]}", f"trireme_test_ring_{tmp_path.name[-12:]}"
    Path("/dev/shm", link).symlink_to("/etc/hostname")
    Path("/dev/shm", ours).write_bytes(b"trireme\x01" + bytes(120))
    try:
        with rank(tmp_path, "--allow-client-shm=true") as server, grpcclient.InferenceServerClient(server.grpc) as client:
            for key in (own, ours, link, "vader_segment.host.0", "nccl-abc", "sem.lock", "../../etc/passwd"):
                with pytest.raises(InferenceServerException):
                    client.register_system_shared_memory("r", f"/{key}", 8)
            for offset, byte_size in ((0, 2**64 - 1), (2**64 - 1, 1), (2**64 - 1, 2**64 - 1)):
                with pytest.raises(InferenceServerException):
                    client.register_system_shared_memory("r", f"/{ours}", byte_size, offset)
            assert echoed(client) == [1, 2, 3]
    finally:
        Path("/dev/shm", link).unlink()
        Path("/dev/shm", ours).unlink()
