// A minimal backend of Triton: returns each request's inputs as its outputs, INPUTn as OUTPUTn.
//
// `bench_front` builds it to measure the reference server without Python. The declarations are those of Triton's backend API
// (tritonbackend.h), which the server's wheel does not contain.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

extern "C" {
struct TRITONSERVER_Error;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Output;

TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t*);
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char**, int*, const int64_t**, uint32_t*, uint64_t*, uint32_t*);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t, const void**, uint64_t*, int*, int64_t*);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char*, int, const int64_t*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output*, void**, uint64_t, int*, int64_t*);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t, TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool, uint64_t, uint64_t, uint64_t, uint64_t);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

static uint64_t now_ns()
{
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

static void echo(TRITONBACKEND_Request* request, TRITONBACKEND_Response* response, uint32_t index)
{
  TRITONBACKEND_Input* input = nullptr;
  const char* name = nullptr;
  const int64_t* shape = nullptr;
  int datatype = 0;
  uint32_t rank = 0, parts = 0;
  uint64_t size = 0;
  TRITONBACKEND_RequestInputByIndex(request, index, &input);
  TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &rank, &size, &parts);

  TRITONBACKEND_Output* output = nullptr;
  const std::string output_name = std::string("OUTPUT") + (name + std::strlen("INPUT"));
  TRITONBACKEND_ResponseOutput(response, &output, output_name.c_str(), datatype, shape, rank);
  void* to = nullptr;
  int memory = 0;
  int64_t memory_id = 0;
  TRITONBACKEND_OutputBuffer(output, &to, size, &memory, &memory_id);

  char* at = static_cast<char*>(to);
  for (uint32_t part = 0; part < parts; ++part) {
    const void* from = nullptr;
    uint64_t length = 0;
    TRITONBACKEND_InputBuffer(input, part, &from, &length, &memory, &memory_id);
    std::memcpy(at, from, length);
    at += length;
  }
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count)
{
  const uint64_t start = now_ns();
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Response* response = nullptr;
    uint32_t inputs = 0;
    TRITONBACKEND_ResponseNew(&response, requests[i]);
    TRITONBACKEND_RequestInputCount(requests[i], &inputs);
    for (uint32_t index = 0; index < inputs; ++index) echo(requests[i], response, index);
    TRITONBACKEND_ResponseSend(response, 1 /* final */, nullptr);
    const uint64_t end = now_ns();  // perf_analyzer requires that the statistics change.
    TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, start, start, end, end);
    TRITONBACKEND_RequestRelease(requests[i], 1 /* all */);
  }
  const uint64_t end = now_ns();
  TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, start, start, end, end);
  return nullptr;
}
}
