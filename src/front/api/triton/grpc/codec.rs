//! Messages of gRPC calls: prost's codec, with Triton's words for bytes that are none.

use bytes::Buf as _;
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use crate::transport::large_work::block_in_place_if_large;

/// The codec of the inference service: answers `Answer`, asks `Ask`.
#[derive(Debug)]
pub struct MessageCodec<Answer, Ask>(ProstCodec<Answer, Ask>);

impl<Answer, Ask> Default for MessageCodec<Answer, Ask> {
    fn default() -> Self {
        Self(ProstCodec::default())
    }
}

impl<Answer, Ask> Codec for MessageCodec<Answer, Ask>
where
    Answer: Message + Send + 'static,
    Ask: Message + Default + Send + 'static,
{
    type Encode = Answer;
    type Decode = Ask;
    type Encoder = <ProstCodec<Answer, Ask> as Codec>::Encoder;
    type Decoder = MessageDecoder<<ProstCodec<Answer, Ask> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        self.0.encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        MessageDecoder(self.0.decoder())
    }
}

/// A decoder whose errors begin as Triton's do.
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
