"""Responses to unusual requests are byte for byte those of Triton 2.51 for models with the same names and signatures."""

import http.client
import struct
import uuid
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from serving import rank

ECHO = """
backend: "identity"
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
KINDS = 'backend: "identity"\nmax_batch_size: 0\n' + "".join(
    f"""
input [ {{ name: "INPUT_{kind}" data_type: TYPE_{kind} dims: [ -1 ] optional: true }} ]
output [ {{ name: "OUTPUT_{kind}" data_type: TYPE_{kind} dims: [ -1 ] }} ]
"""
    for kind in ["BOOL", "UINT8", "INT32", "FP16", "FP64", "STRING"]
)
RAW = "".join(
    f"""
backend: "identity"
max_batch_size: 0
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
SPLIT"""
    for dims in ["4", "2, -1", "-1, -1"]
).split("SPLIT")
JSON, TEXT = "application/json", "text/plain"
NOT_ALLOWED = '{"error":"Method Not Allowed"}'
ECHOED = '{"model_name":"echo","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32",'
ASKED = '{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"FP32","data":[1,2]}],'
UNKNOWN = "[request id: <id_unknown>]"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    four, pairs, open_twice, _ = RAW
    models = {"echo": ECHO, "kinds": KINDS, "four": four, "pairs": pairs, "open_twice": open_twice}
    with rank(tmp_path_factory.mktemp("wire"), "--allow-client-shm=true", prefix="wire", **models) as serving:
        yield serving


def request(server, method, path, body=b"", address=None, **headers):
    """Status, content type and body."""
    connection = http.client.HTTPConnection(address or server.http, timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body.encode() if isinstance(body, str) else body, names)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read().decode()
    finally:
        connection.close()


def tensor(name, datatype, shape, data):
    return f'{{"inputs":[{{"name":"{name}","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'


def error(message):
    return f'{{"error":"{message}"}}'


@pytest.mark.parametrize(
    "method, path, kind",
    [
        ("GET", "/v2/repository/index", JSON),
        ("POST", "/v2/models/echo/config", JSON),
        ("PUT", "/v2/logging", JSON),
        ("GET", "/v2/models/echo/infer", TEXT),
        ("POST", "/v2/health/live", TEXT),
    ],
)
def test_a_wrong_method_is_refused_in_the_type_of_its_path(server, method, path, kind):
    assert request(server, method, path) == (405, kind, NOT_ALLOWED)


@pytest.mark.parametrize("method, path, status", [("GET", "/metrics", 200), ("GET", "/metrics/", 200), ("POST", "/metrics", 405), ("GET", "/elsewhere", 404)])
def test_the_metrics_port(server, method, path, status):
    found, kind, text = request(server, method, path, address=server.metrics)
    assert found == status and (status == 200 or (kind, text) == (TEXT, NOT_ALLOWED if status == 405 else error("Not Found")))


SHAPE = "unexpected shape for input 'INPUT_BOOL' for model 'kinds'. Expected [-1], got"
INFERS = {
    "another model": ("nobody", '{"inputs":[]}', 404, TEXT, error("Request for unknown model: 'nobody' is not found")),
    "a number with a leading zero": ("echo", '{"a":01}', 500, JSON, error("failed to parse the request JSON buffer: Missing a comma or '}' after an object member. at 6")),
    "a number beyond doubles": ("echo", tensor("INPUT0", "FP32", "[1,1]", "[1e400]"), 500, JSON, error("failed to parse the request JSON buffer: Number too big to be stored in double. at 68")),
    "fewer elements than the shape": ("echo", tensor("INPUT0", "FP32", "[1,2,3,4,5]", "[1,2]"), 500, JSON, error("Unable to parse 'data': Shape does not match true shape of 'data' field")),
    "fewer strings than the shape": ("kinds", tensor("INPUT_STRING", "BYTES", "[2]", '["a"]'), 400, JSON, error(f"{UNKNOWN} expected 2 string elements for inference input 'INPUT_STRING' for model 'kinds', got 1")),
    "no elements, and data that is no array": ("echo", tensor("INPUT0", "FP32", "[1,0]", "7"), 200, JSON, ECHOED + '"shape":[1,0],"data":[]}]}'),
    "no shape where there are batches": ("echo", tensor("INPUT0", "FP32", "[]", "[1]"), 400, JSON, error(f"{UNKNOWN} input 'INPUT0' has no shape but model requires batch dimension for 'echo'")),
    "no shape where there are none": ("kinds", tensor("INPUT_BOOL", "BOOL", "[]", "[1]"), 400, JSON, error(f"{UNKNOWN} {SHAPE} []. ")),
    "a dimension too many": ("kinds", tensor("INPUT_BOOL", "BOOL", "[1,2]", "[true,false]"), 400, JSON, error(f"{UNKNOWN} {SHAPE} [1,2]. ")),
    "numbers at the ends of plain notation": ("kinds", tensor("INPUT_FP64", "FP64", "[6]", "[1e15,1e16,-1e20,1e21,0.00001,0.0000001]"), 200, JSON, '{"model_name":"kinds","model_version":"1","outputs":[{"name":"OUTPUT_FP64","datatype":"FP64","shape":[6],"data":[1000000000000000.0,10000000000000000.0,-100000000000000000000.0,1e21,0.00001,1e-7]}]}'),
    "an output twice, first as JSON": ("echo", ASKED + '"outputs":[{"name":"OUTPUT0"},{"name":"OUTPUT0","parameters":{"binary_data":true}}]}', 200, JSON, ECHOED + '"shape":[1,2],"data":[1.0,2.0]}]}'),
    "binary outputs, but named ones": ("echo", ASKED + '"outputs":[{"name":"OUTPUT0"}],"parameters":{"binary_data_output":true}}', 200, JSON, ECHOED + '"shape":[1,2],"data":[1.0,2.0]}]}'),
    "FP16 out as JSON": ("kinds", tensor("INPUT_FP16", "FP16", "[0]", "[]"), 400, TEXT, error("sending FP16 data via JSON is not supported. Please use the binary data format for output")),
    "FP16 in as JSON": ("kinds", tensor("INPUT_FP16", "FP16", "[1]", "[1]"), 400, JSON, error("receiving FP16 data via JSON is not supported. Please use the binary data format for input INPUT_FP16")),
}


@pytest.mark.parametrize("case", INFERS)
def test_infer_over_http(server, case):
    model, body, *answer = INFERS[case]
    assert request(server, "POST", f"/v2/models/{model}/infer", body) == tuple(answer)


def test_booleans_cannot_be_classified(server):
    outputs = '"outputs":[{"name":"OUTPUT_BOOL","parameters":{"classification":1}}]}'
    body = tensor("INPUT_BOOL", "BOOL", "[2]", "[true,false]")[:-1] + "," + outputs
    status, kind, text = request(server, "POST", "/v2/models/kinds/infer", body)
    assert (status, kind) == (400, TEXT)
    assert text.startswith('{"error":"class result not available for output due to unsupported type \'BOOL\'')


TAILS = {
    bytes(7): "incomplete string length indicator for inference input 'INPUT_STRING' for model 'kinds', expecting 4 bytes but only 3 bytes available. Please make sure the string length indicator is in one buffer.",
    bytes(9): "unexpected number of string elements 2 for inference input 'INPUT_STRING' for model 'kinds', expecting 1",
    bytes(16): "unexpected number of string elements 2 for inference input 'INPUT_STRING' for model 'kinds', expecting 1",
    b"": "expected 1 string elements for inference input 'INPUT_STRING' for model 'kinds', got 0",
}


@pytest.mark.parametrize("tail", TAILS)
def test_strings_with_a_wrong_length_prefix(server, tail):
    head = f'{{"inputs":[{{"name":"INPUT_STRING","shape":[1],"datatype":"BYTES","parameters":{{"binary_data_size":{len(tail)}}}}}]}}'
    answer = request(server, "POST", "/v2/models/kinds/infer", head.encode() + tail, Inference_Header_Content_Length=str(len(head)))
    assert answer == (400, JSON, error(f"{UNKNOWN} {TAILS[tail]}"))


def test_binary_tensors_without_a_header_length(server):
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'
    answer = request(server, "POST", "/v2/models/echo/infer", head + struct.pack("<2f", 1, 2))
    assert answer == (400, JSON, error("unexpected size for input 'INPUT0', expecting 8 additional bytes for model 'echo'"))


RAWS = {
    "less than the shape": ("four", 4, "input byte size mismatch for input 'raw_input' for model 'four'. Expected 16, got 4"),
    "more than the shape": ("four", 32, "input byte size mismatch for input 'raw_input' for model 'four'. Expected 16, got 32"),
    "half of an element": ("echo", 6, "input byte size mismatch for input 'raw_input' for model 'echo'. Expected 4, got 6"),
    "half of a pair": ("pairs", 12, "input byte size mismatch for input 'raw_input' for model 'pairs'. Expected 8, got 12"),
    "a shape that is open twice": ("open_twice", 4, "The shape of the raw input 'INPUT0' can not be deduced because there are more than one variable-sized dimension"),
    "several inputs": ("kinds", 4, "Raw request must only have 1 input (found 1) to be deduced but got 6 inputs in 'kinds' model configuration"),
}


@pytest.mark.parametrize("case", RAWS)
def test_a_raw_body_that_does_not_fit_the_model(server, case):
    model, size, words = RAWS[case]
    answer = request(server, "POST", f"/v2/models/{model}/infer", bytes(size), Inference_Header_Content_Length="0")
    assert answer == (400, JSON, error(f"{UNKNOWN} {words}"))


def test_an_unknown_content_encoding(server):
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/echo/infer", ASKED[:-1] + "}", {"Content-Encoding": "br"})
    response = connection.getresponse()
    kind, codings, text = response.getheader("Content-Type"), response.getheader("Accept-Encoding"), response.read().decode()
    connection.close()
    assert (response.status, kind, codings) == (501, TEXT, "gzip, deflate")
    assert text.startswith('{"error":"Unsupported compression type')
    for path in ["generate", "generate_stream"]:
        status, kind, text = request(server, "POST", f"/v2/models/kinds/{path}", '{"INPUT_INT32":3}', Content_Encoding="br")
        assert (status, kind) == (400, JSON) and text.startswith('{"error":"Unsupported content-encoding, only ')
    assert request(server, "POST", "/v2/models/nobody/infer", "{}", Content_Encoding="br")[0] == 404
    assert request(server, "POST", "/v2/repository/index", "{}", Content_Encoding="br")[0] == 200  # The body is ignored there.


GENERATES = {
    '{"INPUT_STRING":"x","INPUT_FP64":0.5,"id":"7"}': (200, JSON, '{"OUTPUT_FP64":0.5,"OUTPUT_STRING":"x","id":"7","model_name":"kinds","model_version":"1"}'),
    '{"parameters":{"INPUT_INT32":"x"}}': (500, JSON, error("Converting keyword: 'parameters': Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer")),
    '{"parameters":{"other":[]}}': (400, JSON, error("Converting keyword: 'parameters': parameter 'other' has invalid type. It should be either 'int', 'bool', or 'string'.")),
}


@pytest.mark.parametrize("body", GENERATES)
def test_generate(server, body):
    assert request(server, "POST", "/v2/models/kinds/generate", body) == GENERATES[body]


def test_members_of_an_event_are_sorted_by_name(server):
    _, _, text = request(server, "POST", "/v2/models/kinds/generate_stream", '{"INPUT_INT32":[3,4]}')
    assert text == 'data: {"OUTPUT_INT32":[3,4],"model_name":"kinds","model_version":"1"}\n\n'


def test_settings_keep_their_order_and_errors_name_their_range(server):
    _, _, text = request(server, "GET", "/v2/logging")
    keys = ["log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"]
    assert sorted(keys, key=text.index) == keys
    for setting, range_ in [("trace_rate", "[ 0, 4294967295 ]"), ("trace_count", "[ -1, 2147483647 ]")]:
        answer = request(server, "POST", "/v2/trace/setting", f'{{"{setting}":"99999999999"}}')
        assert answer == (400, JSON, error(f"Unable to parse '{setting}', value is out of range {range_}, got: 99999999999"))


def test_a_configuration_has_its_fields_in_the_order_of_the_schema(server):
    _, _, text = request(server, "GET", "/v2/models/echo/config")
    fields = ["name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output", "batch_input", "batch_output", "optimization", "instance_group", "default_model_filename", "cc_model_filenames", "metric_tags", "parameters", "model_warmup"]
    assert sorted(fields, key=lambda field: text.index(f'"{field}":')) == fields


def infer_request(model="echo", name="INPUT0", datatype="FP32", parameters=(), raw=struct.pack("<2f", 1, 2)):
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    request.inputs.add(name=name, datatype=datatype, shape=[1, 2])
    for key, field, value in parameters:
        setattr(request.parameters[key], field, value)
    return request


def unsigned(key):
    return infer_request(parameters=[(key, "uint64_param", 5)])


def two_contents(first, second):
    request = pb.ModelInferRequest(model_name="echo")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    for field in (first, second):
        getattr(tensor.contents, field).append(1)
    return request


def beside_region(**contents):
    request = pb.ModelInferRequest(model_name="echo")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    tensor.parameters["shared_memory_region"].string_param = "any"
    tensor.parameters["shared_memory_byte_size"].int64_param = 8
    tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return request


BESIDE_REGION = "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'echo'"
EXPLICIT = "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo'"
CALLS = {
    "contents after those of the type": ("ModelInfer", two_contents("fp32_contents", "fp64_contents"), f"{EXPLICIT}, binary data was already supplied."),
    "contents before those of the type": ("ModelInfer", two_contents("fp32_contents", "int_contents"), f"{EXPLICIT} of type 'INT32', expected datatype 'FP32'"),
    "contents beside a region": ("ModelInfer", beside_region(fp32_contents=[1, 2]), BESIDE_REGION),
    "empty contents beside a region": ("ModelInfer", beside_region(), BESIDE_REGION),
    "a type that is none": ("ModelInfer", infer_request(datatype="fp32"), f"{UNKNOWN} inference input 'INPUT0' data-type is '<invalid>', but model 'echo' expects 'FP32'"),
    "an unknown input of such a type": ("ModelInfer", infer_request(name="X", datatype="fp32"), "unexpected inference input 'X' for model 'echo'"),
    "an unsigned parameter": ("ModelInfer", unsigned("x"), "invalid value type for 'x' parameter, expected int64_param, bool_param, or string_param."),
    "an unsigned sequence_id": ("ModelInfer", unsigned("sequence_id"), "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
    "an unsigned sequence_start": ("ModelInfer", unsigned("sequence_start"), "invalid value type for 'sequence_start' parameter, expected bool_param."),
    "an unsigned timeout": ("ModelInfer", unsigned("timeout"), "invalid value type for 'timeout' parameter, expected int64_param."),
    "a reserved parameter": ("ModelInfer", unsigned("triton_x"), "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with 'triton_' are allowed: triton_enable_empty_final_response"),
    "an empty final response that is a number": ("ModelInfer", infer_request(parameters=[("triton_enable_empty_final_response", "int64_param", 1)]), "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param."),
    "a load parameter": ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo", parameters={"foo": pb.ModelRepositoryParameter(int64_param=1)}), "unrecognized load parameter 'foo'."),
    "a load's file that is none": ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo", parameters={"file:1/x": pb.ModelRepositoryParameter(bool_param=True)}), "invalid value type for load parameter 'file:1/x', expected bytes_param."),
    "two trace rates": ("TraceSetting", pb.TraceSettingRequest(settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["5", "6"])}), "expect only 1 value for 'trace_rate'"),
}


@pytest.mark.parametrize("case", CALLS)
def test_errors_over_grpc(server, case):
    call, request, words = CALLS[case]
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), call)(request, timeout=60)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, words)


@pytest.mark.parametrize("service", [b"", b"inference.GRPCInferenceService", b"any"])
def test_health_is_that_of_the_server_for_any_service_name(server, service):
    request = b"\x0a" + bytes([len(service)]) + service  # HealthCheckRequest { service = 1 }
    with grpc.insecure_channel(server.grpc) as channel:
        answer = channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=60)
    assert answer == b"\x08\x01"  # HealthCheckResponse { status = 1: SERVING }


def test_bytes_that_are_no_valid_message(server):
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff\xff", timeout=60)
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    assert refused.value.details().startswith("Unable to parse request")


def test_invalid_requests_are_not_counted(server):
    assert request(server, "POST", "/v2/models/kinds/infer", tensor("INPUT_BOOL", "BOOL", "[1,2]", "[true,false]"))[0] == 400
    _, _, text = request(server, "GET", "/v2/models/kinds/stats")
    assert '"fail":{"count":0,"ns":0}' in text


def status_of(server, kind, region):
    return request(server, "GET", f"/v2/{kind}sharedmemory/region/{region}/status")


def test_errors_of_shared_memory_regions(server):
    key = f"trireme_wire_{uuid.uuid4().hex[:12]}"
    Path("/dev/shm", key).write_bytes(bytes(16))
    try:
        register, region = "/v2/systemsharedmemory/region/x/register", f'{{"name":"x","key":"/{key}","offset":0,"byte_size":16}}'
        too_large = request(server, "POST", register, region.replace('"byte_size":16', '"byte_size":17'))
        assert too_large == (400, JSON, error("failed to register shared memory region 'x': invalid args"))
        assert request(server, "POST", register, region) == (200, JSON, "")
        assert request(server, "POST", register, region) == (400, JSON, error("shared memory region 'x' already in manager"))
        assert status_of(server, "system", "x") == (200, JSON, f"[{region}]")
        assert request(server, "POST", "/v2/systemsharedmemory/region/x/unregister") == (200, JSON, "")
    finally:
        Path("/dev/shm", key).unlink()
    for kind in ["system", "cuda"]:
        assert request(server, "GET", f"/v2/{kind}sharedmemory/status") == (200, JSON, "[]")
        assert status_of(server, kind, "x") == (404, JSON, error(f"Unable to find {kind} shared memory region: 'x'"))
        assert request(server, "POST", f"/v2/{kind}sharedmemory/region/x/unregister") == (200, JSON, "")


def test_the_key_is_checked_before_the_method(tmp_path):
    restricted = (403, TEXT, error("This API is restricted, expecting header 'k'"))
    models = str(tmp_path / "models")
    flags = ["--http-restricted-api=inference,logging:k=v", "--grpc-restricted-protocol=logging:k=v", f"--model-repository={models}/."]
    with rank(tmp_path, *flags, prefix="wkey", echo=ECHO) as server:
        for method, path, kind in [("GET", "/v2/models/echo/infer", TEXT), ("PUT", "/v2/logging", JSON)]:
            assert request(server, method, path) == restricted
            assert request(server, method, path, k="v") == (405, kind, NOT_ALLOWED)
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).LogSettings(pb.LogSettingsRequest(), timeout=60)
        words = "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, words)
        # A repository that is given twice is listed once.
        assert request(server, "POST", "/v2/repository/index")[2] == '[{"name":"echo","version":"1","state":"READY"}]'
