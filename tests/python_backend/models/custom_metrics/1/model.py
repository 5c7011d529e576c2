import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily
        self.families = [
            kinds(name="test_requests_total", description="Requests", kind=kinds.COUNTER),
            kinds(name="test_last_value", description="The last value", kind=kinds.GAUGE),
            kinds(name="test_values", description="All values", kind=kinds.HISTOGRAM),
        ]
        counter, gauge, histogram = self.families
        self.counter = counter.Metric(labels={"model": args["model_name"], "version": args["model_version"]})
        self.gauge = gauge.Metric()
        self.histogram = histogram.Metric(labels={"model": args["model_name"]}, buckets=[0.5, 5, 50])

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()[0]
            self.counter.increment(1)
            self.gauge.set(value)
            self.histogram.observe(value)
            pb_utils.Logger.log_info("the value is now %s" % value)
            values = np.array([self.counter.value(), self.gauge.value()])
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("VALUES", values)]))
        return responses
