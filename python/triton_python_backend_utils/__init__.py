"""What a Python model imports: tensors, requests, responses, and the server's services.

A model is a class `TritonPythonModel` in `model.py` with `execute(requests)`, which returns one `InferenceResponse` for
each request, or None when it answers through `get_response_sender()`. `initialize(args)`, `finalize()` and the static
`auto_complete_config(config)` are optional. All of it may be used without a server too, but for what needs one.
"""

from ._datatypes import (
    NUMPY_TO_TRITON_TYPE,
    TRITON_STRING_TO_NUMPY,
    TRITON_TO_NUMPY_TYPE,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from ._errors import TritonError, TritonModelException
from ._inference import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_CPU_PINNED,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ResponseSender,
    get_input_tensor_by_name,
)
from ._model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from ._response import InferenceResponse, get_output_tensor_by_name
from ._services import Logger, MetricFamily, is_model_ready, load_model, unload_model
from ._tensor import Tensor
