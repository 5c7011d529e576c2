"""`llama-index-llms-nvidia-triton`, which sends the inputs of TensorRT-LLM's first releases (`random_seed`)."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.nvidia_triton import NvidiaTriton

from conftest import ANSWER, QUESTION

PROMPT = f"Q: {QUESTION}\nA:"


def llm(grpc_address, **options) -> NvidiaTriton:
    return NvidiaTriton(server_url=grpc_address, model_name="ensemble", temperature=1.0, top_k=1, tokens=64, triton_load_model_call=False, **options)


def test_a_completion_is_the_answer(grpc_address):
    assert llm(grpc_address).complete(PROMPT).text == ANSWER


def test_the_model_is_found_before_a_completion(grpc_address):
    asked = NvidiaTriton(server_url=grpc_address, model_name="ensemble", temperature=1.0, top_k=1, tokens=64)
    assert asked.complete(PROMPT).text == ANSWER


def test_the_pieces_of_a_stream_join_to_the_answer(grpc_address):
    pieces = list(llm(grpc_address).stream_complete(PROMPT))
    assert len(pieces) > 1 and "".join(piece.delta for piece in pieces) == pieces[-1].text == ANSWER


def test_a_chat_is_answered(grpc_address):
    assert llm(grpc_address).chat([ChatMessage(role="user", content=QUESTION)]).message.content
