import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.in_flight = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "IN")
            with self.lock:
                self.in_flight += 1
            thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), number), daemon=True)
            thread.start()
        return None

    def answer(self, sender, number):
        for _ in range(number.as_numpy()[0]):
            output = pb_utils.Tensor("OUT", number.as_numpy())
            sender.send(pb_utils.InferenceResponse(output_tensors=[output]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.in_flight -= 1

    def finalize(self):
        while self.in_flight:
            pass
