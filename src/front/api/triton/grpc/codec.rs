//! The codec of gRPC messages: prost's, with Triton's message for undecodable bytes.

use bytes::Buf as _;
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use crate::transport::large_work::block_in_place_if_large;

/// The codec of the inference service.
#[derive(Debug)]
pub struct MessageCodec<Response, Request>(ProstCodec<Response, Request>);

impl<Response, Request> Default for MessageCodec<Response, Request> {
    fn default() -> Self {
        Self(ProstCodec::default())
    }
}

impl<Response, Request> Codec for MessageCodec<Response, Request>
where
    Response: Message + Send + 'static,
    Request: Message + Default + Send + 'static,
{
    type Encode = Response;
    type Decode = Request;
    type Encoder = <ProstCodec<Response, Request> as Codec>::Encoder;
    type Decoder = MessageDecoder<<ProstCodec<Response, Request> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        self.0.encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        MessageDecoder(self.0.decoder())
    }
}

/// A decoder whose errors start with Triton's prefix.
#[derive(Debug)]
pub struct MessageDecoder<Inner>(Inner);

impl<Inner: Decoder<Error = Status>> Decoder for MessageDecoder<Inner> {
    type Item = Inner::Item;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        let num_bytes = bytes.remaining();
        block_in_place_if_large(num_bytes, || self.0.decode(bytes)).map_err(|error| {
            let words = format!("Unable to parse request: {}", error.message());
            Status::new(error.code(), words)
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}
