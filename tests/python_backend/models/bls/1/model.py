import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name=json_parameter(request, "model", "add_sub"),
                requested_output_names=["SUM", "DIFFERENCE"],
                inputs=request.inputs(),
                trace=request.trace(),
            )
            answer = inner.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=answer.output_tensors()))
        return responses


def json_parameter(request, name, default):
    import json

    return json.loads(request.parameters()).get(name, default)
