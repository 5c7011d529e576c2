import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT", "data_type": "TYPE_INT64", "dims": [-1]})
        config.add_output({"name": "BATCHED", "data_type": "TYPE_INT64", "dims": [1]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        assert self.config["max_batch_size"] == 16
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().shape[0]
            output = pb_utils.Tensor("BATCHED", np.full((rows, 1), len(requests), dtype=np.int64))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
