"""KServe's clients: probes, metadata and `infer` over REST and gRPC."""

import asyncio

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

from conftest import ANSWER, QUESTION


def request(max_tokens=64) -> InferRequest:
    # The shapes of a model with batches; the demo model is decoupled, and without `stream` it answers once.
    inputs = [
        InferInput("text_input", [1, 1], "BYTES", data=[f"Q: {QUESTION}\nA:"]),
        InferInput("max_tokens", [1, 1], "INT32", data=[max_tokens]),
    ]
    return InferRequest(model_name="ensemble", infer_inputs=inputs)


def text_of(response) -> str:
    (output,) = (output for output in response.outputs if output.name == "text_output")
    (text,) = output.as_numpy().reshape(-1).tolist()
    return text if isinstance(text, str) else text.decode()


def rest() -> InferenceRESTClient:
    return InferenceRESTClient(RESTConfig(protocol="v2", retries=1))


def test_rest_probes_say_what_they_found(server):
    async def probes():
        client = rest()
        return [
            await client.is_server_live(server),
            await client.is_server_ready(server),
            await client.is_model_ready(server, "ensemble"),
            await client.is_model_ready(server, "nosuch"),
        ]

    assert asyncio.run(probes()) == [True, True, True, False]


def test_rest_infer_answers_with_the_whole_text(server):
    async def infer():
        return await rest().infer(server, request(), model_name="ensemble")

    assert text_of(asyncio.run(infer())) == ANSWER


def test_grpc_probes_and_infer(grpc_address):
    async def ask():
        client = InferenceGRPCClient(grpc_address)
        probes = [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready("ensemble")]
        return probes, await client.infer(request())

    probes, response = asyncio.run(ask())
    assert probes == [True, True, True]
    assert text_of(response) == ANSWER
