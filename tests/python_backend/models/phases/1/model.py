import json
import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.stay_in = parameters.get("stay_in", {}).get("string_value")
        self.enter("initialize")

    def enter(self, phase):
        pb_utils.Logger.log_info("in " + phase)
        while self.stay_in == phase:
            time.sleep(0.01)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        mark = pb_utils.get_input_tensor_by_name(request, "MARK")
        if mark is not None:
            # Creates a file and stays busy until it is removed.
            path = mark.as_numpy()[0].decode()
            open(path, "w").close()
            while os.path.exists(path):
                time.sleep(0.005)
        values = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT", values)])

    def finalize(self):
        self.enter("finalize")
