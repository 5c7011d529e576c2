//! Random weights in 8 and 4 bits, with their values.

use std::sync::Arc;

use half::{bf16, f16};
use kernels::cuda::quantized_gemm::{PackedFormat, PackedWeight, TILE};
use kernels::cuda::{DeviceBuffer, Gpu, Span};

use crate::gpu::Random;

/// Every format of the kernels.
pub const FORMATS: [PackedFormat; 13] = [
    PackedFormat::Fp8Rows,
    PackedFormat::Fp8Blocks,
    PackedFormat::Int4 { group: 128, has_zeros: false, scale_is_f16: false },
    PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: true },
    PackedFormat::Int4 { group: 32, has_zeros: true, scale_is_f16: false },
    PackedFormat::Int4 { group: 32, has_zeros: false, scale_is_f16: true },
    PackedFormat::Mxfp4,
    PackedFormat::Nvfp4,
    PackedFormat::Int8Rows,
    PackedFormat::Int8 { group: 128, has_zeros: false, scale_is_f16: false },
    PackedFormat::Int8 { group: 128, has_zeros: true, scale_is_f16: true },
    PackedFormat::Int8 { group: 32, has_zeros: true, scale_is_f16: false },
    PackedFormat::Int8 { group: 32, has_zeros: false, scale_is_f16: true },
];

/// A weight on the GPU, and its values in f32.
pub struct QuantizedWeight {
    pub values: Vec<f32>,
    codes: DeviceBuffer,
    scales: DeviceBuffer,
    pub bias: Option<(Vec<bf16>, DeviceBuffer)>,
    pub n: usize,
    pub k: usize,
    format: PackedFormat,
}

impl QuantizedWeight {
    /// With values of a size of `2 / sqrt(k)`.
    pub fn random(
        gpu: &Arc<Gpu>,
        random: &mut Random,
        [n, k]: [usize; 2],
        format: PackedFormat,
        has_bias: bool,
    ) -> Self {
        let is_fp8 = matches!(format, PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks);
        let is_int8 = matches!(format, PackedFormat::Int8Rows | PackedFormat::Int8 { .. });
        let group = match format {
            PackedFormat::Fp8Rows | PackedFormat::Int8Rows => k,
            PackedFormat::Fp8Blocks => 128,
            PackedFormat::Int4 { group, .. } | PackedFormat::Int8 { group, .. } => group,
            PackedFormat::Mxfp4 => 32,
            PackedFormat::Nvfp4 => 16,
        };
        // The root mean square of codes is 130 for e4m3, 4.6 for integers of 4 bits and 74 to 105 for those of 8, and of those of NVFP4 with their scales 380.
        let size = match format {
            PackedFormat::Nvfp4 => 0.005,
            _ if is_fp8 => 0.015,
            _ if is_int8 => 0.02,
            _ => 0.4,
        } / (k as f32).sqrt();
        let mut values = Vec::with_capacity(n * k);
        let mut codes = vec![0; format.codes_bytes(n, k)];
        let mut scales = vec![0; format.scales_bytes(n, k)];
        let tile_bytes = format.tile_meta_bytes(k);
        let mut block_scales = vec![[0.0; 2]; n.div_ceil(TILE) * k.div_ceil(group)];
        for scale in block_scales.iter_mut().flatten() {
            *scale = size * (0.2 + 1.6 * random.unit());
        }
        for row in 0..n {
            let row_codes: Vec<u8> = (0..k).map(|_| random_code(random, format)).collect();
            format.pack_row(&row_codes, &mut codes[row * format.row_bytes(k)..][..format.row_bytes(k)]);
            let factor = size * (0.2 + 1.6 * random.unit());
            for (index, part) in row_codes.chunks(group).enumerate() {
                let drawn = size * (0.2 + 1.6 * random.unit());
                let scale = match format {
                    PackedFormat::Fp8Rows | PackedFormat::Int8Rows => drawn,
                    PackedFormat::Fp8Blocks => block_scales[row / TILE * k.div_ceil(group) + index][row % 16 / 8],
                    PackedFormat::Int4 { scale_is_f16: true, .. } | PackedFormat::Int8 { scale_is_f16: true, .. } => {
                        f16::from_f32(drawn).to_f32()
                    }
                    PackedFormat::Int4 { .. } | PackedFormat::Int8 { .. } => bf16::from_f32(drawn).to_f32(),
                    PackedFormat::Mxfp4 => f32::from_bits(drawn.to_bits() & 0x7f80_0000),
                    PackedFormat::Nvfp4 => factor,
                };
                let zero = match format {
                    PackedFormat::Int4 { has_zeros: true, .. } => (17.0 * random.unit()) as u8,
                    PackedFormat::Int8 { has_zeros: true, .. } => (256.0 * random.unit()) as u8,
                    PackedFormat::Int8 { .. } | PackedFormat::Int8Rows => 0,
                    // The code of the group's scale: any number that is not negative.
                    PackedFormat::Nvfp4 => (127.0 * random.unit()) as u8,
                    _ => 8,
                };
                let tile = &mut scales[row / TILE * tile_bytes..][..tile_bytes];
                format.put_scale(tile, row % TILE, index, scale, zero);
                let scale = if format == PackedFormat::Nvfp4 { e4m3(zero) * scale } else { scale };
                let value = |&code: &u8| match is_fp8 {
                    true => e4m3(code) * scale,
                    false if is_int8 => (f32::from(code.cast_signed()) - f32::from(zero.cast_signed())) * scale,
                    false if matches!(format, PackedFormat::Mxfp4 | PackedFormat::Nvfp4) => e2m1(code) * scale,
                    false => (f32::from(code) - f32::from(zero)) * scale,
                };
                values.extend(part.iter().map(value));
            }
        }
        let upload = |bytes: &[u8]| DeviceBuffer::from_slice(gpu, bytes).expect("memory");
        let bias = has_bias.then(|| {
            let bias = random.bf16s(n, 1.0);
            let buffer = DeviceBuffer::from_slice(gpu, &bias).expect("memory");
            (bias, buffer)
        });
        Self { values, codes: upload(&codes), scales: upload(&scales), bias, n, k, format }
    }

    pub fn packed(&self) -> PackedWeight {
        PackedWeight {
            codes: self.codes.span(),
            scales: self.scales.span(),
            bias: self.bias.as_ref().map_or(Span::NULL, |(_, buffer)| buffer.span()),
            n: self.n,
            k: self.k,
            format: self.format,
        }
    }
}

/// Any code but the two of e4m3 that are no numbers.
fn random_code(random: &mut Random, format: PackedFormat) -> u8 {
    match (format, (256.0 * random.unit()) as u8) {
        (PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks, 0x7f | 0xff) => 0x01,
        (PackedFormat::Int4 { .. } | PackedFormat::Mxfp4 | PackedFormat::Nvfp4, code) => code % 16,
        (_, code) => code,
    }
}

/// The value of an e2m1 code by its definition.
fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 != 0 { -size } else { size }
}

/// The value of an e4m3 code by its definition.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
    if code & 0x80 != 0 { -size } else { size }
}
