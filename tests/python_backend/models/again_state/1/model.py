import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            total = value("SO_FAR") + value("STEP")
            is_over = total.item() >= value("LIMIT").item()
            outputs = [pb_utils.Tensor("KEEP", total)]
            # A request with an odd sum is rescheduled once.
            if is_over or total.item() % 2 == 0:
                outputs.append(pb_utils.Tensor("SUM", total))
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_over else 0
            request.get_response_sender().send(pb_utils.InferenceResponse(outputs), flags)
            if not is_over:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
