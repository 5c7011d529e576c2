import collections

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = collections.Counter()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        times = pb_utils.get_input_tensor_by_name(request, "TIMES").as_numpy()[0]
        self.seen[request.request_id()] += 1
        seen = self.seen[request.request_id()]
        if seen <= times:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SEEN", np.array([seen], np.int32))])
