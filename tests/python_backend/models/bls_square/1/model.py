import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "IN")
            inner = pb_utils.InferenceRequest(model_name="square", requested_output_names=["OUT"], inputs=[count])
            total = 0
            for answer in inner.exec(decoupled=True):
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                for tensor in answer.output_tensors():
                    total += int(tensor.as_numpy()[0])
            output = pb_utils.Tensor("SUM", np.array([total], dtype=np.int32))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
