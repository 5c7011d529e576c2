"""A model like TensorRT-LLM's `gpt`: each rank has a part of the weights; rank 0 gets the requests and broadcasts them."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils
from mpi4py import MPI

VOCABULARY = 1000


class TritonPythonModel:
    def initialize(self, args):
        self.comm = MPI.COMM_WORLD
        self.rank = self.comm.Get_rank()
        # This rank's shard of the weights in tensor parallelism.
        weights = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, 64))
        self.weights = np.array_split(weights, self.comm.Get_size(), axis=1)[self.rank].copy()
        self.name = args["model_instance_name"]
        # Other ranks get no requests from clients.
        while self.rank != 0:
            self.execute([None])

    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = None
            if self.rank == 0:
                inputs = [
                    pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                    for name in ("input_ids", "request_output_len")
                ]
            ids, count = self.comm.bcast(inputs, root=0)
            outputs = self.generate(ids.reshape(-1), int(count.reshape(-1)[0]))
            who = self.comm.gather((self.rank, self.comm.Get_size(), os.getpid(), self.weights.shape[1]), root=0)
            if self.rank == 0:
                tensors = [
                    pb_utils.Tensor("output_ids", np.array([outputs], np.int32)),
                    pb_utils.Tensor("ranks", np.array([who], np.int32)),
                ]
                responses.append(pb_utils.InferenceResponse(tensors))
        return responses

    def generate(self, ids, count):
        """Greedy generation, from the sum of all ranks' partial results."""
        ids = list(ids)
        for _ in range(count):
            part = self.weights[ids].sum(axis=1)[-8:].sum()
            ids.append(int(self.comm.allreduce(int(part)) % VOCABULARY))
        return ids
