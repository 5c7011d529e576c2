"""Helpers that send requests and return their responses."""

import queue

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype


def tensors(**arrays):
    made = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def text(value):
    return np.array([value], dtype=object)


def infer(client, model, arrays, **options):
    return client.infer(model, tensors(**arrays), **options)


def stream(client, model, arrays, timeout=20, **options):
    """All responses of one request. An error is the last item, as an exception."""
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put(error or result))
    client.async_stream_infer(model, tensors(**arrays), enable_empty_final_response=True, **options)
    results = []
    while True:
        item = responses.get(timeout=timeout)
        if isinstance(item, Exception):
            results.append(item)
            break
        is_final = item.get_response().parameters["triton_final_response"].bool_param
        if item.get_response().outputs:
            results.append(item)
        if is_final:
            break
    client.stop_stream()
    return results
