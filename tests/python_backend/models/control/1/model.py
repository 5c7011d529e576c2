import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy()[0].decode()
        ready = [pb_utils.is_model_ready(name)]
        pb_utils.load_model(name)
        ready.append(pb_utils.is_model_ready(model_name=name, model_version="1"))
        pb_utils.unload_model(name)
        ready.append(pb_utils.is_model_ready(name))
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("READY", np.array(ready))])
