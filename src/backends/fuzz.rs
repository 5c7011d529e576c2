//! Parsers of clients' tensors and of model processes' messages, for the fuzz targets in `fuzz/`. Needs the feature `fuzzing`.

pub use crate::llm::fuzz::LlmInputs;
pub use crate::python::fuzz::python_message;
