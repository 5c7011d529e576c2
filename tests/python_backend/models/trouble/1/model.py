import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(1000)
        if how == "sleep":
            time.sleep(0.5)
        if how == "raise":
            raise ValueError("asked to raise")
        if how == "garbage":
            os.write(3, b"\xff\xff\xff\xff not a message")
        if how == "drop":
            request.get_response_sender()
            return None
        if how == "nothing":
            return "not a response"
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", np.array([how], dtype=object))])
