import json

import numpy as np
import triton_python_backend_utils as pb_utils


def response(outputs):
    try:
        return pb_utils.InferenceResponse(output_tensors=outputs, parameters={"kept": True, "n": 3})
    except TypeError:  # Missing in some versions of Triton.
        return pb_utils.InferenceResponse(output_tensors=outputs)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            outputs = []
            for tensor in request.inputs():
                if tensor.name() in ("FP32", "BF16"):
                    outputs.append(pb_utils.Tensor.from_dlpack(tensor.name(), tensor.to_dlpack()))
                else:
                    outputs.append(pb_utils.Tensor(tensor.name(), tensor.as_numpy()[::1]))
            known = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                # Missing in some versions of Triton.
                "priority": request.priority() if hasattr(request, "priority") else None,
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()),
                "cancelled": request.is_cancelled(),
            }
            outputs.append(pb_utils.Tensor("REQUEST", np.array([json.dumps(known)], dtype=object)))
            responses.append(response(outputs))
        return responses
