"""Who may do what: TLS, client certificates, keys of restricted APIs, clients' shared memory."""

import subprocess

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from serving import rank


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A root, and a server's and a client's certificate from it."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=root", "-days", "2")
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


def echoed(client, module=grpcclient, **options) -> list[float]:
    tensor = module.InferInput("INPUT0", [3], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2, 3], dtype=np.float32))
    return client.infer("identity", [tensor], **options).as_numpy("OUTPUT0").tolist()


def test_grpc_serves_within_tls_alone(certificates, tmp_path):
    flags = ["--grpc-use-ssl=true", f"--grpc-server-cert={certificates}/server.pem", f"--grpc-server-key={certificates}/server.key"]
    with rank(tmp_path, *flags) as server:
        root = str(certificates / "root.pem")
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=root) as client:
            assert client.is_server_ready() and echoed(client) == [1, 2, 3]
        with grpcclient.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException):
            client.is_server_live(client_timeout=5)


def test_mutual_tls_asks_for_a_certificate_of_the_root(certificates, tmp_path):
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
def test_tensors_pass_through_shared_memory_where_that_is_allowed(is_allowed, tmp_path):
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
