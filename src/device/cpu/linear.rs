//! Linear layers and their inputs. Weights are used in the checkpoint's type, copied to panels, or quantized when they
//! are loaded.

use kernels::cpu::{
    self as k, Isa, Matrix, PackedInput, PanelInput, PanelMatrix, Pool, QuantInput, QuantMatrix, QuantType, WeightType,
};
use settings::WeightPrecision;

/// The type that a linear layer's weights are quantised to; the output head has at least 8 bits.
pub(super) fn quant_type(precision: WeightPrecision, is_head: bool) -> Option<QuantType> {
    match (precision, is_head) {
        // Weights in fp8 are expanded when they are read.
        (WeightPrecision::Checkpoint | WeightPrecision::Fp8, _) => None,
        (WeightPrecision::Int4, false) => Some(QuantType::Int4),
        (WeightPrecision::Int8, _) | (WeightPrecision::Int4, true) => Some(QuantType::Int8),
    }
}

/// Bytes of a linear layer `[rows, cols]` in this precision; `None` if the device does not quantize it.
pub(crate) fn quantized_bytes(precision: WeightPrecision, is_head: bool, [rows, cols]: [usize; 2]) -> Option<usize> {
    quant_type(precision, is_head).map(|quant_type| QuantMatrix::bytes_of(rows, cols, quant_type))
}

/// The weights of a linear layer.
pub enum Linear {
    /// Used directly in the mapped checkpoint.
    Plain(Matrix),
    /// Copied from the checkpoint to the memory layout that is fastest on this processor.
    Panels(PanelMatrix),
    /// Quantized, in memory of this device.
    Quantized(QuantMatrix),
}

impl Linear {
    pub(super) fn new(pool: &mut Pool, isa: Isa, matrix: Matrix, quant_type: Option<QuantType>) -> Self {
        match quant_type {
            Some(quant_type) => Self::Quantized(QuantMatrix::new(pool, &matrix, quant_type)),
            None if in_panels(isa, matrix.weight_type()) => Self::Panels(PanelMatrix::new(pool, &matrix)),
            None => Self::Plain(matrix),
        }
    }

    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Plain(matrix) => matrix.rows(),
            Self::Panels(matrix) => matrix.rows(),
            Self::Quantized(matrix) => matrix.rows(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Plain(matrix) => matrix.bytes(),
            // Without the rows that fill the last panel.
            Self::Panels(matrix) => matrix.rows() * matrix.cols() * WeightType::Bf16.size(),
            Self::Quantized(matrix) => matrix.bytes(),
        }
    }
}

/// Whether weights of this type are copied to panels.
pub(super) fn in_panels(isa: Isa, weight_type: WeightType) -> bool {
    weight_type == WeightType::Bf16 && PanelMatrix::is_supported(isa)
}

/// Buffers for the input of the current layer, in the form that its kernel needs.
pub(super) struct Inputs {
    plain: PackedInput,
    panels: PanelInput,
    quantized: QuantInput,
    max_rows: usize,
    widest: Widest,
}

/// Numbers of inputs of the widest layers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Widest {
    /// With weights as they are stored.
    pub(crate) plain: usize,
    /// With weights in panels.
    pub(crate) panels: usize,
    /// With quantized weights.
    pub(crate) quantized: usize,
}

impl Widest {
    /// Bytes of the buffers for `max_rows` inputs.
    pub(crate) fn input_bytes(self, max_rows: usize) -> usize {
        // Plain inputs are kept in f32 and in bf16; quantized ones have a scale and an offset for each 64 steps.
        max_rows * self.plain * (size_of::<f32>() + size_of::<u16>())
            + PanelInput::bytes(max_rows, self.panels)
            + max_rows * self.quantized * 72 / 64
    }
}

impl Inputs {
    pub(super) fn new(max_rows: usize) -> Self {
        Self {
            plain: PackedInput::new(0, 0),
            panels: PanelInput::new(0, 0),
            quantized: QuantInput::new(0, 0),
            max_rows,
            widest: Widest::default(),
        }
    }

    /// Enlarges the buffers for a layer's inputs.
    pub(super) fn fit(&mut self, linear: &Linear) {
        match linear {
            Linear::Plain(matrix) => self.fit_plain(matrix.cols()),
            Linear::Panels(matrix) if matrix.cols() > self.widest.panels => {
                self.widest.panels = matrix.cols();
                self.panels = PanelInput::new(0, 0);
                self.panels = PanelInput::new(self.max_rows, self.widest.panels);
            }
            Linear::Quantized(matrix) if matrix.cols() > self.widest.quantized => {
                self.widest.quantized = matrix.cols();
                self.quantized = QuantInput::new(0, 0);
                self.quantized = QuantInput::new(self.max_rows, self.widest.quantized);
            }
            _ => {}
        }
    }

    fn fit_plain(&mut self, cols: usize) {
        if cols > self.widest.plain {
            self.widest.plain = cols;
            self.plain = PackedInput::new(0, 0);
            self.plain = PackedInput::new(self.max_rows, cols);
        }
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> usize {
        self.widest.input_bytes(self.max_rows)
    }

    /// `out [rows, N]` = `x [rows, K]` times the layer's weights, plus its bias.
    pub(super) fn project(&mut self, pool: &mut Pool, isa: Isa, out: &mut [f32], x: &[f32], rows: usize, by: &Linear) {
        match by {
            #[cfg(target_arch = "x86_64")]
            Linear::Panels(panels) => {
                self.panels.pack(pool, x, rows, panels.cols());
                k::panel_linear(pool, out, &self.panels, panels);
            }
            #[cfg(not(target_arch = "x86_64"))]
            Linear::Panels(_) => unreachable!("panels are made only on processors that support them"),
            Linear::Plain(matrix) => {
                self.fit_plain(matrix.cols());
                self.plain.pack(pool, x, rows, matrix.cols(), matrix.weight_type());
                k::linear(pool, isa, out, &self.plain, matrix);
            }
            Linear::Quantized(matrix) => {
                self.quantized.pack(pool, x, rows, matrix.cols(), matrix.quant_type());
                k::quantized_linear(pool, isa, out, &self.quantized, matrix);
            }
        }
    }

    /// `out [rows, N / 2]` = activation(gate) * up of the product `[gate | up]`. The product is written to `scratch` if
    /// the kernel cannot fuse the gate.
    pub(super) fn project_gated(
        &mut self,
        pool: &mut Pool,
        isa: Isa,
        [out, scratch]: [&mut [f32]; 2],
        x: &[f32],
        rows: usize,
        (by, gate): (&Linear, k::Gate),
    ) {
        #[cfg(target_arch = "x86_64")]
        if let Linear::Panels(panels) = by
            && panels.can_gate()
        {
            self.panels.pack(pool, x, rows, panels.cols());
            return k::panel_gated_linear(pool, out, &self.panels, panels, gate);
        }
        self.project(pool, isa, scratch, x, rows, by);
        k::gate(pool, out, scratch, by.rows() / 2, gate);
    }
}
