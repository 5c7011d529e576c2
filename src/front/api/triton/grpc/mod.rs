//! The KServe v2 protocol over gRPC.

pub(crate) mod call_context;
pub(crate) mod codec;
pub(crate) mod codings;
pub(crate) mod health;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod paths;
pub(crate) mod proto;
pub(crate) mod redact;
pub(crate) mod request;
pub(crate) mod response;
pub(crate) mod scan;
pub(crate) mod service;
pub(crate) mod stream_call;
pub(crate) mod stream_infer;

use std::sync::Arc;

use repository::ModelConfig;
use serving::{ErrorKind, InferError, Limit};
use tonic::{Request, Response, Status};

use crate::api::status::grpc_status;
use crate::api::triton::grpc::call_context::CallContext;
use crate::api::triton::grpc::messages::KeptMessage;
use crate::api::triton::grpc::proto::grpc_inference_service_server::GrpcInferenceService;
use crate::api::triton::grpc::proto::*;
use crate::api::triton::grpc::response::InferReply;
use crate::api::triton::header_parameters::forward;
use crate::api::triton::shared_memory::{MemoryKind, run_device_work};
use crate::api::triton::single_response::{Transactions, single_response};
use crate::state::State;
use crate::telemetry::log_settings::LogValue;
use crate::telemetry::recording::Recorded;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_in_turn;

/// The inference service.
pub struct KserveGrpc {
    state: Arc<State>,
}

impl KserveGrpc {
    /// A service with shared state.
    pub fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// `num_bytes`: the decoded size of the message.
    async fn infer(
        &self,
        message: ModelInferRequest,
        num_bytes: usize,
        call: Option<CallContext>,
    ) -> Result<InferReply, InferError> {
        let decoupled = || {
            let words = "ModelInfer RPC doesn't support models with decoupled transaction policy";
            InferError::new(ErrorKind::Unsupported, words)
        };
        let transactions = Transactions::of(&self.state.server, &message.model_name, &message.model_version)?;
        if transactions == Transactions::Decoupled {
            return Err(decoupled());
        }
        let read = || request::read(message, &self.state.memory, &self.state.declared_datatype());
        let parsed = block_in_place_in_turn(num_bytes, read).await?;
        let mut request = parsed.request;
        if transactions.may_answer_more_than_once(&request) {
            return Err(decoupled());
        }
        let span = call.as_ref().and_then(|call| call.span);
        if let Some(CallContext { headers, .. }) = call {
            forward(&mut request, &headers);
        }
        let trace = self.state.sample_trace(&request.model_name, span);
        trace.iter().for_each(|trace| trace.mark("GRPC_WAITREAD_END"));
        request.trace = trace.clone();
        let model = request.model_name.clone();
        let responses = block_in_place_in_turn(num_bytes, || self.state.server.infer(request)).await?;
        let response = single_response(&model, responses).await?;
        trace.iter().for_each(|trace| trace.mark("GRPC_SEND_START"));
        let response = self.state.deliver(&parsed.outputs, response)?;
        Ok(InferReply { response, final_response: None })
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for KserveGrpc {
    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: self.state.server.is_live() }))
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.state.is_ready() }))
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Result<Response<InferReply>, Status> {
        // The charge is kept until the request is answered.
        let charge = charge_of(&request, &self.state);
        let call = request.extensions().get().cloned();
        let kept = request.extensions().get().and_then(KeptMessage::get);
        let recorder = self.state.config.recorder.as_ref();
        let recorded =
            kept.and_then(|bytes| Recorded::begin_message(recorder, paths::MODEL_INFER, bytes, &request.get_ref().id));
        let answer = self.infer(request.into_inner(), charge.held(), call).await.map_err(grpc_status);
        if let Some(mut recorded) = recorded {
            match &answer {
                Ok(reply) => recorded.message(reply.parts()),
                Err(status) => recorded.fail(status),
            }
            recorded.finish();
        }
        answer.map(Response::new)
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Result<Response<ModelReadyResponse>, Status> {
        let model = request.into_inner();
        let is_ready = self.state.server.probe_model(&model.name, &model.version).await.map_err(grpc_status)?;
        Ok(Response::new(ModelReadyResponse { ready: is_ready && !self.state.is_draining() }))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<SystemSharedMemoryStatusResponse>, Status> {
        use system_shared_memory_status_response::RegionStatus;
        let regions = self.state.memory.status(&request.into_inner().name).map_err(grpc_status)?;
        let regions = regions.into_iter().map(|region| {
            let name = region.name.clone();
            let status =
                RegionStatus { name: region.name, key: region.key, offset: region.offset, byte_size: region.byte_size };
            (name, status)
        });
        Ok(Response::new(SystemSharedMemoryStatusResponse { regions: regions.collect() }))
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<SystemSharedMemoryRegisterResponse>, Status> {
        let region = request.into_inner();
        let registered = self.state.memory.register(&region.name, &region.key, region.offset, region.byte_size);
        registered.map(|()| Response::new(SystemSharedMemoryRegisterResponse {})).map_err(grpc_status)
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<SystemSharedMemoryUnregisterResponse>, Status> {
        self.state.memory.unregister(MemoryKind::System, &request.into_inner().name);
        Ok(Response::new(SystemSharedMemoryUnregisterResponse {}))
    }

    async fn cuda_shared_memory_status(
        &self,
        request: Request<CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<CudaSharedMemoryStatusResponse>, Status> {
        let regions = self.state.memory.cuda_status(&request.into_inner().name).map_err(grpc_status)?;
        let regions = regions.into_iter().map(|region| {
            let (name, device_id, byte_size) = (region.name, region.device, region.byte_size);
            (name.clone(), cuda_shared_memory_status_response::RegionStatus { name, device_id, byte_size })
        });
        Ok(Response::new(CudaSharedMemoryStatusResponse { regions: regions.collect() }))
    }

    async fn cuda_shared_memory_register(
        &self,
        request: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<CudaSharedMemoryRegisterResponse>, Status> {
        let CudaSharedMemoryRegisterRequest { name, raw_handle, device_id, byte_size } = request.into_inner();
        let state = self.state.clone();
        run_device_work(move || state.memory.register_cuda(&name, &raw_handle, device_id, byte_size))
            .await
            .map(|()| Response::new(CudaSharedMemoryRegisterResponse {}))
            .map_err(grpc_status)
    }

    async fn cuda_shared_memory_unregister(
        &self,
        request: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<CudaSharedMemoryUnregisterResponse>, Status> {
        let (state, name) = (self.state.clone(), request.into_inner().name);
        let unregister = move || {
            state.memory.unregister(MemoryKind::Cuda, &name);
            Ok(())
        };
        run_device_work(unregister)
            .await
            .map(|()| Response::new(CudaSharedMemoryUnregisterResponse {}))
            .map_err(grpc_status)
    }

    async fn trace_setting(
        &self,
        request: Request<TraceSettingRequest>,
    ) -> Result<Response<TraceSettingResponse>, Status> {
        let TraceSettingRequest { settings, model_name } = request.into_inner();
        let limits = self.state.server.limits();
        let mut counts = settings.values().map(|setting| setting.value.len()).chain([settings.len()]);
        counts.try_for_each(|count| limits.check(Limit::Parameters, count)).map_err(grpc_status)?;
        let changes = settings.into_iter().map(|(key, setting)| (key, Some(setting.value))).collect();
        let values = self.state.update_trace(&model_name, changes).map_err(grpc_status)?;
        let settings = values
            .into_iter()
            .map(|(key, value)| (key.to_owned(), trace_setting_response::SettingValue { value }))
            .collect();
        Ok(Response::new(TraceSettingResponse { settings }))
    }

    async fn log_settings(
        &self,
        request: Request<LogSettingsRequest>,
    ) -> Result<Response<LogSettingsResponse>, Status> {
        use log_settings_request::setting_value::ParameterChoice as RequestChoice;
        use log_settings_response::{SettingValue, setting_value::ParameterChoice};
        let settings = request.into_inner().settings;
        self.state.server.limits().check(Limit::Parameters, settings.len()).map_err(grpc_status)?;
        let settings = settings.into_iter().map(|(key, setting)| {
            let value = match setting.parameter_choice {
                Some(RequestChoice::BoolParam(value)) => LogValue::Bool(value),
                Some(RequestChoice::Uint32Param(value)) => LogValue::Uint(value),
                Some(RequestChoice::StringParam(value)) => LogValue::String(value),
                // An absent value becomes a value of the wrong type, which is refused.
                None if key == "log_format" => LogValue::Bool(false),
                None => LogValue::String(String::new()),
            };
            (key, value)
        });
        let values = self.state.log.update(settings.collect()).map_err(grpc_status)?;
        let settings = values.into_iter().map(|(key, value)| {
            let choice = match value {
                LogValue::Bool(value) => ParameterChoice::BoolParam(value),
                LogValue::Uint(value) => ParameterChoice::Uint32Param(value),
                LogValue::String(value) => ParameterChoice::StringParam(value),
            };
            (key.to_owned(), SettingValue { parameter_choice: Some(choice) })
        });
        Ok(Response::new(LogSettingsResponse { settings: settings.collect() }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        let serving::ServerMetadata { name, version, extensions } = self.state.server.server_metadata();
        Ok(Response::new(ServerMetadataResponse { name, version, extensions }))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let model = request.into_inner();
        let metadata = self.state.server.model_metadata(&model.name, &model.version).map_err(grpc_status)?;
        Ok(Response::new(models::metadata(metadata)))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        let model = request.into_inner();
        let config = self.state.server.model_config(&model.name, &model.version).map_err(grpc_status)?;
        Ok(Response::new(ModelConfigResponse { config: Some(ModelConfig::clone(&config)) }))
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        let model = request.into_inner();
        let models = self.state.server.model_statistics(&model.name, &model.version).map_err(grpc_status)?;
        let model_stats = models.into_iter().map(models::statistics).collect();
        Ok(Response::new(ModelStatisticsResponse { model_stats }))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let request = request.into_inner();
        no_repository_name(&request.repository_name)?;
        let index = self.state.server.repository_index(request.ready);
        let models = index.into_iter().map(|model| repository_index_response::ModelIndex {
            name: model.name,
            version: model.version,
            state: model.state.name().to_owned(),
            reason: model.reason,
        });
        Ok(Response::new(RepositoryIndexResponse { models: models.collect() }))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Result<Response<RepositoryModelLoadResponse>, Status> {
        let _charge = charge_of(&request, &self.state); // The charge covers files until they are written.
        let request = request.into_inner();
        no_repository_name(&request.repository_name)?;
        let overrides = models::load_overrides(request.parameters).map_err(grpc_status)?;
        self.state.server.load_model(&request.model_name, overrides).await.map_err(grpc_status)?;
        Ok(Response::new(RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Result<Response<RepositoryModelUnloadResponse>, Status> {
        let request = request.into_inner();
        no_repository_name(&request.repository_name)?;
        let unload_dependents = models::unload_dependents(request.parameters).map_err(grpc_status)?;
        self.state.server.unload_model(&request.model_name, unload_dependents).await.map_err(grpc_status)?;
        Ok(Response::new(RepositoryModelUnloadResponse {}))
    }
}

/// The charge of the messages of a call.
fn charge_of<T>(request: &Request<T>, state: &State) -> Arc<Charge> {
    request.extensions().get().cloned().unwrap_or_else(|| Arc::new(state.budget.charge()))
}

fn no_repository_name(name: &str) -> Result<(), Status> {
    if name.is_empty() {
        Ok(())
    } else {
        Err(Status::unimplemented("'repository_name' specification is not supported"))
    }
}
