//! What clients' tensors and model processes' messages go through, for the fuzz targets in `fuzz/`. Feature `fuzzing` alone.

pub use crate::llm::fuzz::LlmInputs;
pub use crate::python::fuzz::python_message;
