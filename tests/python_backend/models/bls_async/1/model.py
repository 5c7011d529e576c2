import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[np.newaxis]
        inner = [
            pb_utils.InferenceRequest(
                model_name="add_sub",
                requested_output_names=["SUM"],
                inputs=[pb_utils.Tensor("INPUT0", values * factor), pb_utils.Tensor("INPUT1", values)],
            )
            for factor in (1, 10)
        ]
        answers = await asyncio.gather(*[request.async_exec() for request in inner])
        sums = sum(pb_utils.get_output_tensor_by_name(answer, "SUM").as_numpy()[0] for answer in answers)
        stream = await pb_utils.InferenceRequest(
            model_name="repeat",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.arange(40, dtype=np.int32))],
        ).async_exec(decoupled=True)
        if json.loads(request.parameters()).get("async_for"):
            answers = [answer async for answer in stream]
        else:
            answers = list(stream)
        tensors = [tensor for answer in answers for tensor in answer.output_tensors()]
        pieces = [tensor.as_numpy()[0] for tensor in tensors]
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor("SUMS", sums), pb_utils.Tensor("PIECES", np.array(pieces, np.int32))]
        )
