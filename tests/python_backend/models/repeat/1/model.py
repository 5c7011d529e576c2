import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(
            name="repeat_clients_left", description="Clients that left early", kind=pb_utils.MetricFamily.COUNTER
        )
        self.left = family.Metric(labels={"model": args["model_name"]})

    async def execute(self, requests):
        await asyncio.gather(*[self.answer(request) for request in requests])

    async def answer(self, request):
        sender = request.get_response_sender()
        delay = pb_utils.get_input_tensor_by_name(request, "DELAY_MS")
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        for value in values:
            if request.is_cancelled():
                self.left.increment(1)
                break
            sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", value.reshape(1))]))
            if delay is not None:
                await asyncio.sleep(delay.as_numpy()[0] / 1000)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
