"""Responses: output tensors, or an error."""

import json

from ._errors import TritonError, TritonModelException
from ._tensor import Tensor


class InferenceResponse:
    """Output tensors, or an error in their place."""

    __slots__ = ("_tensors", "_error", "_parameters")

    def __init__(self, output_tensors=(), error=None, parameters=None):
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        for tensor in output_tensors or ():
            if not isinstance(tensor, Tensor):
                raise TritonModelException("`output_tensors` holds %s; expected Tensor" % type(tensor).__name__)
        self._tensors = output_tensors if output_tensors is not None else []
        self._error = error
        self._parameters = checked_parameters(parameters)

    @classmethod
    def _received(cls, wire):
        error, tensors, parameters, _ = wire
        response = cls.__new__(cls)
        response._tensors = [Tensor._received(tensor) for tensor in tensors]
        response._error = None if error is None else TritonError(error[1], error[0])
        response._parameters = dict(parameters)
        return response

    def output_tensors(self):
        """The tensors."""
        return list(self._tensors)

    def has_error(self):
        """Whether it is an error."""
        return self._error is not None

    def error(self):
        """The TritonError, or None."""
        return self._error

    def parameters(self):
        """The parameters as a JSON object."""
        return json.dumps(self._parameters)

    def _wire(self, places):
        if self._error is not None:
            return (self._error.code(), self._error.message()), (), {}
        if places:
            tensors = [tensor._wire(places.get(tensor._name)) for tensor in self._tensors]
        else:
            tensors = [tensor._wire() for tensor in self._tensors]
        return None, tuple(tensors), self._parameters


def checked_parameters(parameters):
    """Parameters of a request or a response, of JSON or as a dictionary."""
    if not parameters:
        return {}
    if isinstance(parameters, str):
        parameters = json.loads(parameters)
    for key, value in parameters.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(
                "parameter %r is %r: names are strings, and values bool, int, float or str" % (key, value)
            )
    return dict(parameters)


def get_output_tensor_by_name(inference_response, name):
    """The output called `name`, or None. TritonModelException when the response is an error."""
    if inference_response.has_error():
        raise TritonModelException(inference_response.error().message())
    for tensor in inference_response._tensors:
        if tensor._name == name:
            return tensor
    return None
