import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        mark = pb_utils.get_input_tensor_by_name(request, "MARK").as_numpy()[0].decode()
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(7)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("PID", np.array([os.getpid()], np.int32))])
