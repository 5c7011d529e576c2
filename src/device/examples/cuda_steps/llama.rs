//! A Llama of random weights that needs no checkpoint.

use std::ops::Range;
use std::sync::Arc;

use device::cuda::{CudaDevice, CudaProduct, CudaTensor, CudaWeight};
use models::{AdapterLayers, Model};
use ops::{
    Activation, AdapterSlots, AttentionSpec, DType, Device, DeviceError, KvElements, LayerAttention, LinearRole,
    LogitSpec, LowRankPart, NormKind, NormSlices, Quantization, QuantizedRows, RopeTable, RowSource, WeightData,
    WeightSlice,
};

/// The size of heads.
const DIM: usize = 128;
const EPS: f32 = 1e-5;

/// Sizes of a model.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    inner: usize,
    pub vocab: usize,
    rope_theta: f32,
}

pub const SHAPES: [Shape; 2] = [
    Shape {
        name: "llama2-7b",
        hidden: 4096,
        heads: 32,
        kv_heads: 32,
        inner: 11008,
        vocab: 32000,
        rope_theta: 10_000.0,
    },
    Shape {
        name: "llama3-8b",
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        inner: 14336,
        vocab: 128_256,
        rope_theta: 500_000.0,
    },
];

struct Layer {
    norms: [CudaWeight; 2],
    qkv: CudaWeight,
    out: CudaWeight,
    gate_up: CudaWeight,
    down: CudaWeight,
}

/// Computes a Llama with calls of the device alone.
pub struct Llama {
    shape: Shape,
    tp_size: usize,
    embedding: CudaWeight,
    layers: Vec<Layer>,
    norm: CudaWeight,
    head: CudaWeight,
    residual: CudaTensor,
    normed: CudaTensor,
    qkv: CudaTensor,
    attended: CudaTensor,
    gate_up: CudaTensor,
    gated: CudaTensor,
    partial: CudaTensor,
}

/// Random codes of a quantized matrix, with values of size about 0.02.
#[derive(Debug)]
struct RandomRows {
    quantization: Quantization,
    has_fp8_inputs: bool,
    codes: Vec<u8>,
    order: Option<Vec<u32>>,
}

/// A form of weights.
#[derive(Debug, Clone, Copy)]
pub struct WeightForm {
    quantization: Quantization,
    /// Whether inputs may be rounded to e4m3.
    has_fp8_inputs: bool,
    has_act_order: bool,
}

impl RandomRows {
    /// Codes for rows of up to `cols` columns.
    fn new(WeightForm { quantization, has_fp8_inputs, has_act_order }: WeightForm, cols: usize) -> Self {
        let has_4_bits = !matches!(quantization, Quantization::Fp8 { .. } | Quantization::Int8 { .. });
        // Exponents of e4m3 up to 2^7, so that there is no NaN.
        let codes =
            random_bytes(cols + 4096).iter().map(|byte| if has_4_bits { byte % 16 } else { byte & 0xf7 }).collect();
        // The factor is a prime, so that each column comes once.
        let order = has_act_order.then(|| (0..cols).map(|col| (col * 7919 % cols) as u32).collect());
        Self { quantization, has_fp8_inputs, codes, order }
    }
}

impl RowSource for RandomRows {
    fn read_row(&self, _row: usize, _cols: Range<usize>, _out: &mut [u8]) {
        unreachable!("these sizes stay quantized")
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        Some(self)
    }
}

impl QuantizedRows for RandomRows {
    fn quantization(&self) -> Quantization {
        self.quantization
    }

    fn col_order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let first = row * 37 % 4096 + cols.start;
        out.copy_from_slice(&self.codes[first..first + cols.len()]);
    }

    fn scale(&self, _row: usize, _col: usize) -> (f32, u8) {
        match self.quantization {
            Quantization::Fp8 { .. } => (0.0005, 0),
            Quantization::Int4 { .. } => (0.005, 8),
            Quantization::Int8 { .. } => (0.0003, 0),
            Quantization::Mxfp4 => (2f32.powi(-7), 0),
            // The group's scale is 1.
            Quantization::Nvfp4 => (0.007, 0x38),
        }
    }

    fn has_fp8_inputs(&self) -> bool {
        self.has_fp8_inputs
    }
}

/// The form of weights by its name; `None` for bf16.
pub fn weight_form(name: &str) -> Option<WeightForm> {
    let quantization = match name {
        "bf16" => return None,
        "fp8" | "fp8-weights-only" => Quantization::Fp8 { block: [1, usize::MAX] },
        "fp8-blocks" => Quantization::Fp8 { block: [128, 128] },
        "int4" | "int4-act-order" => Quantization::Int4 { group: 128, has_zeros: true, scale: DType::F16 },
        "int8" => Quantization::Int8 { group: usize::MAX, has_zeros: false, scale: DType::F32 },
        "int8-groups" => Quantization::Int8 { group: 128, has_zeros: true, scale: DType::F16 },
        "mxfp4" => Quantization::Mxfp4,
        "nvfp4" => Quantization::Nvfp4,
        other => {
            const KNOWN: &str =
                "bf16, fp8, fp8-blocks, fp8-weights-only, int4, int4-act-order, int8, int8-groups, mxfp4 and nvfp4";
            panic!("unknown form of weights `{other}`; known are {KNOWN}")
        }
    };
    let has_fp8_inputs = matches!(name, "fp8" | "fp8-blocks");
    Some(WeightForm { quantization, has_fp8_inputs, has_act_order: name == "int4-act-order" })
}

/// Bytes of bf16 weights of size about 0.02; all matrices are slices of them.
fn random_bytes(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(count);
    while bytes.len() < count {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mantissa = (state >> 33) as u16;
        // Sign and mantissa are random, the exponent is that of 2^-6 or 2^-7.
        let bits = (mantissa & 0x80ff) | 0x3c00;
        bytes.extend_from_slice(&bits.to_le_bytes());
    }
    bytes
}

impl Llama {
    /// This worker's shard of a model with `num_layers` layers.
    pub fn load(
        device: &mut CudaDevice,
        shape: Shape,
        num_layers: usize,
        form: Option<WeightForm>,
    ) -> Result<Self, DeviceError> {
        let tp = device.tensor_parallel();
        let size = tp.size as usize;
        let Shape { hidden, .. } = shape;
        let (heads, kv_heads) = (shape.heads / size * DIM, shape.kv_heads / size * DIM);
        let (inner, vocab) = (shape.inner / size, shape.vocab / size);
        let data = WeightData::Stored(random_bytes(shape.inner.max(shape.vocab) * hidden * 2).into());
        let ones = WeightData::Stored([0x80u8, 0x3f].repeat(hidden).into());
        let matrix = |rows: usize, cols: usize| WeightSlice {
            name: "random",
            data: data.clone(),
            dtype: DType::Bf16,
            matrix_cols: cols,
            rows: 0..rows,
            cols: 0..cols,
            head_order: None,
        };
        let product = |rows: usize, cols: usize| match form {
            None => matrix(rows, cols),
            Some(form) => {
                WeightSlice { data: WeightData::Computed(Arc::new(RandomRows::new(form, cols))), ..matrix(rows, cols) }
            }
        };
        let norm = NormSlices {
            kind: NormKind::Rms,
            width: hidden,
            weight: Some(WeightSlice { data: ones, rows: 0..1, ..matrix(1, hidden) }),
            bias: None,
            offset: 0.0,
            factor: 1.0,
        };
        let embedding = device.load_embedding(matrix(vocab, hidden), tp.rank * vocab as u32)?;
        let mut layers = Vec::new();
        for _ in 0..num_layers {
            let (query, key) = (product(heads, hidden), product(kv_heads, hidden));
            let gate = product(inner, hidden);
            layers.push(Layer {
                norms: [device.load_norm(&norm)?, device.load_norm(&norm)?],
                qkv: device.load_linear(LinearRole::Qkv, &[query, key.clone(), key], &[])?,
                out: device.load_linear(LinearRole::Out, &[product(hidden, heads)], &[])?,
                gate_up: device.load_linear(LinearRole::GateUp, &[gate.clone(), gate], &[])?,
                down: device.load_linear(LinearRole::Down, &[product(hidden, inner)], &[])?,
            });
        }
        Ok(Self {
            shape,
            tp_size: size,
            embedding,
            layers,
            norm: device.load_norm(&norm)?,
            head: device.load_linear(LinearRole::Head, &[matrix(vocab, hidden)], &[])?,
            residual: device.tensor(hidden)?,
            normed: device.tensor(hidden)?,
            qkv: device.tensor(heads + 2 * kv_heads)?,
            attended: device.tensor(heads)?,
            gate_up: device.tensor(2 * inner)?,
            gated: device.tensor(inner)?,
            partial: device.tensor(hidden)?,
        })
    }
}

impl Llama {
    /// Every linear layer with its slots.
    pub fn adapter_slots(&self, count: usize, max_rank: usize) -> Vec<(CudaWeight, AdapterSlots)> {
        let Shape { hidden, heads, kv_heads, inner, .. } = self.shape;
        let [heads, kv_heads, inner] = [heads * DIM, kv_heads * DIM, inner].map(|rows| rows / self.tp_size);
        let slots = |cols, modules: &[usize]| AdapterSlots { count, max_rank, cols, modules: modules.to_vec() };
        let of_layer = |layer: &Layer| {
            [
                (layer.qkv, slots(hidden, &[heads, kv_heads, kv_heads])),
                (layer.out, slots(heads, &[hidden])),
                (layer.gate_up, slots(hidden, &[inner, inner])),
                (layer.down, slots(inner, &[hidden])),
            ]
        };
        self.layers.iter().flat_map(of_layer).collect()
    }
}

/// Small random products of the largest rank for all outputs of a layer.
pub fn random_products(slots: &AdapterSlots) -> Vec<CudaProduct> {
    let values = |count: usize| {
        let bytes = random_bytes(2 * count);
        bytes.as_chunks().0.iter().map(|it| half::bf16::from_le_bytes(*it).to_f32()).collect::<Vec<_>>()
    };
    let (mut parts, mut first_row) = (Vec::new(), 0);
    for &rows in &slots.modules {
        let rank = slots.max_rank;
        let (a, b) = (values(rank * slots.cols), values(rows * rank));
        parts.push(CudaDevice::product(LowRankPart { first_row, rank, scale: 1.0, a, b }));
        first_row += rows;
    }
    parts
}

impl Model<CudaDevice> for Llama {
    fn attention_spec(&self, block_size: usize, max_sequence_len: usize) -> AttentionSpec {
        spec(self.shape, self.layers.len(), block_size, max_sequence_len, self.tp_size)
    }

    fn unused_tensors(&self) -> &[String] {
        &[]
    }

    /// Adapters that were read fit the layers of a checkpoint, which this model lacks.
    fn adapter_layers(&self) -> AdapterLayers {
        AdapterLayers::default()
    }

    fn set_products(
        &self,
        device: &mut CudaDevice,
        slot: u32,
        products: Vec<Vec<CudaProduct>>,
    ) -> Result<(), DeviceError> {
        let mut all = self.adapter_slots(0, 0).into_iter().zip(products);
        all.try_for_each(|((weight, _), products)| device.set_adapter(&weight, slot, products))
    }

    fn adapter_bytes(&self, device: &CudaDevice, count: usize, max_rank: usize) -> u64 {
        let layers = self.adapter_slots(count, max_rank).into_iter().map(|(_, slots)| slots);
        device.adapter_bytes(&layers.collect::<Vec<_>>())
    }

    fn allocate_adapters(&self, device: &mut CudaDevice, count: usize, max_rank: usize) -> Result<(), DeviceError> {
        let layers = self.adapter_slots(count, max_rank);
        device.allocate_adapters(&layers.iter().map(|(weight, slots)| (weight, slots.clone())).collect::<Vec<_>>())
    }

    fn forward(&mut self, device: &mut CudaDevice) -> Result<(), DeviceError> {
        device.embed(&mut self.residual, &self.embedding, 1.0)?;
        device.norm(&mut self.normed, &self.residual, &self.layers[0].norms[0], EPS)?;
        for index in 0..self.layers.len() {
            let layer = &self.layers[index];
            device.linear(&mut self.qkv, &self.normed, &layer.qkv)?;
            device.rope_and_cache(&mut self.qkv, index)?;
            device.attention(&mut self.attended, &self.qkv, index)?;
            device.linear(&mut self.partial, &self.attended, &layer.out)?;
            let next = self.layers.get(index + 1).map_or(&self.norm, |next| &next.norms[0]);
            device.reduce_add_norm(&mut self.normed, &mut self.residual, &self.partial, &layer.norms[1], EPS)?;
            let activation = Activation::Silu;
            device.gated_linear(&mut self.gated, &mut self.gate_up, &self.normed, &layer.gate_up, activation)?;
            device.linear(&mut self.partial, &self.gated, &layer.down)?;
            device.reduce_add_norm(&mut self.normed, &mut self.residual, &self.partial, next, EPS)?;
        }
        device.sample(&self.normed, &self.head, LogitSpec::default())
    }
}

fn spec(shape: Shape, num_layers: usize, block_size: usize, max_positions: usize, tp_size: usize) -> AttentionSpec {
    let angles = (0..max_positions)
        .flat_map(|p| (0..DIM / 2).map(move |i| p as f32 * shape.rope_theta.powf(-(2.0 * i as f32) / DIM as f32)));
    let (cos, sin) = angles.map(|a| (a.cos(), a.sin())).unzip();
    let layer = LayerAttention {
        num_heads: shape.heads / tp_size,
        num_kv_heads: shape.kv_heads / tp_size,
        head_dim: DIM,
        scale: (DIM as f32).powf(-0.5),
        rope: Some(0),
        kv_group: 0,
        kv_buffer: 0,
        window: None,
        score_cap: None,
        sinks: Vec::new(),
        chunk: None,
        query_gains: Vec::new(),
        query_scale: None,
        has_shared_kv: false,
        latent: None,
        alibi_slopes: Vec::new(),
    };
    let ropes = vec![RopeTable { cos, sin }];
    let layers = (0..num_layers).map(|kv_buffer| LayerAttention { kv_buffer, ..layer.clone() }).collect();
    AttentionSpec {
        block_size,
        max_positions,
        ropes,
        layers,
        kv_windows: vec![None],
        kv_elements: KvElements::Plain,
        states: Vec::new(),
    }
}
