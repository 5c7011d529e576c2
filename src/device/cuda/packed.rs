//! Weights that stay quantized on the GPU: which ones, and how their codes and scales are filled.

use kernels::cuda::Span;
use kernels::cuda::quantize_rows::Fp8Rows;
use kernels::cuda::quantized_gemm::{PackedFormat, PackedWeight, TILE};
use ops::{DType, ExpertSlices, Quantization, QuantizedRows, WeightData, WeightSlice};

use super::CudaWeight;
use super::experts::expert_order;
use super::load::{Part, RowOrder};
use super::recurrent::RecurrentKernel;

/// Codes of a weight, and where its scales are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed {
    /// See [`PackedWeight::scales`].
    pub(crate) scales: Span,
    pub(crate) format: PackedFormat,
    /// Whether many rows of inputs are rounded to e4m3.
    pub(crate) has_fp8_inputs: bool,
    /// `[cols]` u32: the input of each column, if columns have another order than inputs.
    pub(crate) inputs: Option<Span>,
}

/// Scratch memory of single ops: of products with quantized weights, for a weight in bf16, behind it inputs in the order of its columns,
/// or inputs in e4m3, also of experts, and of layers with a recurrent state, for chunks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProductScratch {
    /// Bytes of the largest weight in bf16.
    expanded: usize,
    /// Columns of the widest inputs that are gathered in the order of a weight's columns.
    gathered_cols: usize,
    /// Columns of the widest inputs in e4m3.
    fp8_cols: usize,
    /// Columns of the widest inputs of experts in e4m3, and experts of a token.
    expert_cols: usize,
    top_k: usize,
    /// The layer with a recurrent state that needs most.
    recurrent: Option<RecurrentKernel>,
}

impl ProductScratch {
    /// Makes room for a weight `[rows, cols]`.
    pub(crate) fn count(&mut self, rows: usize, cols: usize, has_fp8_inputs: bool) {
        self.expanded = self.expanded.max(rows * cols * 2);
        if has_fp8_inputs {
            self.fp8_cols = self.fp8_cols.max(cols);
        }
    }

    /// Makes room for inputs that are gathered in the order of a weight's columns.
    pub(crate) fn count_gathered(&mut self, cols: usize) {
        self.gathered_cols = self.gathered_cols.max(cols);
    }

    /// Whether inputs of any weight are gathered.
    pub(crate) fn has_gathered(self) -> bool {
        self.gathered_cols > 0
    }

    /// The room for `rows` gathered inputs of this width in scratch memory. An expanded weight does not overlap it.
    pub(crate) fn gathered(self, scratch: Span, rows: usize, cols: usize) -> Span {
        scratch.part(self.expanded, rows * cols * 2)
    }

    /// Makes room for inputs of experts in e4m3: a row of `cols` for each of a token's `top_k` experts.
    pub(crate) fn count_expert_inputs(&mut self, top_k: usize, cols: usize) {
        self.top_k = self.top_k.max(top_k);
        self.expert_cols = self.expert_cols.max(cols);
    }

    /// Makes room for a layer with a recurrent state.
    pub(crate) fn count_recurrent(&mut self, kernel: RecurrentKernel) {
        self.recurrent = self.recurrent.into_iter().chain([kernel]).max_by_key(|kernel| kernel.scratch_bytes(1));
    }

    /// Whether a weight may have inputs in e4m3 of this width.
    pub(crate) fn has_fp8_inputs(self, cols: usize) -> bool {
        (1..=self.fp8_cols).contains(&cols)
    }

    /// Whether any weight is quantized.
    pub(crate) fn is_needed(self) -> bool {
        self.expanded > 0
    }

    /// Bytes for steps of up to `tokens` tokens.
    pub(crate) fn bytes(self, tokens: usize) -> usize {
        let chunks = self.recurrent.map_or(0, |kernel| kernel.scratch_bytes(tokens));
        let expert_inputs = Fp8Rows::bytes(tokens * self.top_k, self.expert_cols);
        let expanded = self.expanded + tokens * self.gathered_cols * 2;
        expanded.max(Fp8Rows::bytes(tokens, self.fp8_cols)).max(expert_inputs).max(chunks)
    }
}

impl CudaWeight {
    /// The weight as the kernels for quantized weights take it; `None` if it is in bf16.
    pub(crate) fn packed_weight(&self) -> Option<PackedWeight> {
        let Packed { scales, format, .. } = self.packed?;
        Some(PackedWeight { codes: self.values, scales, bias: self.bias, n: self.rows, k: self.cols, format })
    }
}

/// The codes of a slice; `None` if its values have to be computed.
pub(super) fn quantized(data: &WeightData) -> Option<&dyn QuantizedRows> {
    match data {
        WeightData::Stored(_) => None,
        WeightData::Computed(source) => source.quantized(),
    }
}

/// The inputs of the columns of a quantized matrix of `parts`, if columns have another order than inputs.
pub(crate) fn input_order<'a>(parts: &'a [WeightSlice<'_>]) -> Option<&'a [u32]> {
    quantized(&parts.first()?.data)?.col_order()
}

/// The formats in which the two matrices of a layer's experts stay quantized. `None` if one must be expanded to bf16.
pub(crate) fn expert_formats(layer: &ExpertSlices<'_>) -> [Option<PackedFormat>; 2] {
    let gate_ups: Vec<&[WeightSlice<'_>]> = layer.experts.iter().map(|expert| &expert.gate_up[..]).collect();
    let downs: Vec<_> = layer.experts.iter().map(|expert| std::slice::from_ref(&expert.down)).collect();
    [expert_format(&gate_ups, expert_order(layer)), expert_format(&downs, RowOrder::Stacked)]
}

fn is_fp8(format: PackedFormat) -> bool {
    matches!(format, PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks)
}

/// The format in which a matrix of `parts` stays quantized. `None` if it must be expanded to bf16: parts are not quantized or in different
/// formats or orders of columns, or scales are not divided as the kernels need it.
pub(crate) fn packed_format(parts: &[WeightSlice<'_>], order: RowOrder) -> Option<PackedFormat> {
    let cols = parts.first()?.cols.len();
    let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
    let (format, inputs) = (part_format(&parts[0])?, input_order(parts));
    let is_alike =
        |part: &WeightSlice<'_>| part_format(part) == Some(format) && input_order(std::slice::from_ref(part)) == inputs;
    let fits = rows.is_multiple_of(8) && cols.is_multiple_of(8) && parts.iter().all(is_alike);
    (fits && (format != PackedFormat::Fp8Blocks || tiles_have_two_scales(parts, order))).then_some(format)
}

/// The format in which the matrices of a layer's experts stay quantized; `None` if they must be expanded to bf16.
fn expert_format(experts: &[&[WeightSlice<'_>]], order: RowOrder) -> Option<PackedFormat> {
    let (first, others) = experts.split_first()?;
    let format = packed_format(first, order)?;
    let rows: usize = first.iter().map(|part| part.rows.len()).sum();
    // Looking at each row of hundreds of experts would take a second.
    let is_common =
        others.iter().all(|parts| has_division(parts, first) || packed_format(parts, order) == Some(format));
    let is_in_order = experts.iter().copied().flatten().all(|part| input_order(std::slice::from_ref(part)).is_none());
    (is_common && is_in_order && rows.is_multiple_of(TILE)).then_some(format)
}

/// Whether two matrices are the same parts of matrices that are quantized alike.
fn has_division(parts: &[WeightSlice<'_>], other: &[WeightSlice<'_>]) -> bool {
    let division = |part: &WeightSlice<'_>| {
        let quantization = quantized(&part.data).map(QuantizedRows::quantization);
        (part.rows.clone(), part.cols.clone(), part.matrix_cols, part.head_order, quantization)
    };
    parts.iter().map(division).eq(other.iter().map(division))
}

/// Whether the inputs of a matrix of `parts` may be rounded to e4m3.
pub(crate) fn has_fp8_inputs(parts: &[WeightSlice<'_>]) -> bool {
    parts.iter().all(|part| quantized(&part.data).is_some_and(QuantizedRows::has_fp8_inputs))
}

/// The width of the widest inputs of a layer's experts, if they may be rounded to e4m3.
pub(crate) fn fp8_expert_cols(layer: &ExpertSlices<'_>, formats: [Option<PackedFormat>; 2]) -> Option<usize> {
    let first = layer.experts.first()?;
    let may_be = formats.into_iter().all(|format| format.is_some_and(is_fp8))
        && has_fp8_inputs(&first.gate_up)
        && has_fp8_inputs(std::slice::from_ref(&first.down));
    may_be.then(|| layer.width().max(first.down.cols.len()))
}

fn part_format(part: &WeightSlice<'_>) -> Option<PackedFormat> {
    let rows = quantized(&part.data)?;
    // The inputs of some columns are those of other workers.
    if rows.col_order().is_some() && part.cols.len() != part.matrix_cols {
        return None;
    }
    match rows.quantization() {
        Quantization::Fp8 { block: [_, width] } if width >= part.matrix_cols => Some(PackedFormat::Fp8Rows),
        Quantization::Fp8 { block: [_, width] } => {
            let slice = PackedFormat::Fp8Blocks.slice_cols();
            let fits = width.is_multiple_of(slice) && part.cols.start.is_multiple_of(slice);
            fits.then_some(PackedFormat::Fp8Blocks)
        }
        Quantization::Int4 { group, has_zeros, scale } => {
            let group = kernel_group(group, part)?;
            Some(PackedFormat::Int4 { group, has_zeros, scale_is_f16: scale == DType::F16 })
        }
        Quantization::Int8 { group, has_zeros: false, .. } if group >= part.matrix_cols => Some(PackedFormat::Int8Rows),
        Quantization::Int8 { scale: DType::F32, .. } => None,
        Quantization::Int8 { group, has_zeros, scale } => {
            let group = kernel_group(group, part)?;
            Some(PackedFormat::Int8 { group, has_zeros, scale_is_f16: scale == DType::F16 })
        }
        Quantization::Mxfp4 => part.cols.start.is_multiple_of(32).then_some(PackedFormat::Mxfp4),
        Quantization::Nvfp4 => part.cols.start.is_multiple_of(16).then_some(PackedFormat::Nvfp4),
    }
}

/// Columns of a group of the kernels for integers in groups of `group` columns. Scales of wider groups are repeated.
fn kernel_group(group: usize, part: &WeightSlice<'_>) -> Option<usize> {
    let is_aligned = |to: &usize| group.is_multiple_of(*to) && part.cols.start.is_multiple_of(*to);
    [128, 32].into_iter().find(is_aligned)
}

/// Whether the rows `r` of each tile with `r % 16 < 8` are in one row of blocks, and the others, too.
fn tiles_have_two_scales(parts: &[WeightSlice<'_>], order: RowOrder) -> bool {
    let sizes: Vec<usize> = parts.iter().map(|part| part.rows.len()).collect();
    let rows: usize = sizes.iter().sum();
    let block_of = |row: usize| {
        let (index, within) = order.source(&sizes, row);
        let part = &parts[index];
        match quantized(&part.data).map(QuantizedRows::quantization) {
            Some(Quantization::Fp8 { block: [height, _] }) => (index, part.stored(part.rows.start + within) / height),
            _ => unreachable!("all parts are in blocks"),
        }
    };
    // The first eight rows of a tile have the first scale, the next eight the second.
    (0..rows).all(|row| {
        let first = row / TILE * TILE + row % 16 / 8 * 8;
        block_of(row) == block_of(first)
    })
}

impl Part {
    /// Writes the codes of row `row` to `out`, in the order of the kernels. `codes` has a byte for each column.
    pub(super) fn pack_row(&self, row: usize, format: PackedFormat, codes: &mut [u8], out: &mut [u8]) {
        let source = quantized(&self.data).expect("only quantized parts are packed");
        source.read_codes(self.stored_row(row), self.cols(), codes);
        format.pack_row(codes, out);
    }

    /// Writes the scales of row `row` to those of its tile, where it is row `tile_row`.
    pub(super) fn pack_scales(&self, row: usize, format: PackedFormat, tile: &mut [u8], tile_row: usize) {
        let source = quantized(&self.data).expect("only quantized parts are packed");
        let (row, cols) = (self.stored_row(row), self.cols());
        let group = match format {
            PackedFormat::Fp8Rows | PackedFormat::Int8Rows => cols.len(),
            PackedFormat::Fp8Blocks => format.slice_cols(),
            PackedFormat::Int4 { group, .. } | PackedFormat::Int8 { group, .. } => group,
            PackedFormat::Mxfp4 => 32,
            PackedFormat::Nvfp4 => 16,
        };
        for (index, col) in cols.step_by(group).enumerate() {
            let (scale, zero) = source.scale(row, col);
            format.put_scale(tile, tile_row, index, scale, zero);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use ops::{HeadOrder, RowSource};

    use super::*;

    /// Codes and scales that follow from row and column, and the order of columns.
    #[derive(Debug)]
    struct Numbered(Quantization, Option<Vec<u32>>);

    impl RowSource for Numbered {
        fn read_row(&self, _row: usize, _cols: Range<usize>, _out: &mut [u8]) {}

        fn quantized(&self) -> Option<&dyn QuantizedRows> {
            Some(self)
        }
    }

    impl QuantizedRows for Numbered {
        fn quantization(&self) -> Quantization {
            self.0
        }

        fn col_order(&self) -> Option<&[u32]> {
            self.1.as_deref()
        }

        fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
            out.iter_mut().zip(cols).for_each(|(out, col)| *out = (row + col) as u8);
        }

        fn scale(&self, row: usize, col: usize) -> (f32, u8) {
            ((row * 1000 + col) as f32, 3)
        }
    }

    /// Rows and columns of a matrix of 512 columns.
    pub(in super::super) fn slice(
        quantization: Quantization,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> WeightSlice<'static> {
        WeightSlice {
            name: "w",
            data: WeightData::Computed(Arc::new(Numbered(quantization, None))),
            dtype: DType::Bf16,
            matrix_cols: 512,
            rows,
            cols,
            head_order: None,
        }
    }

    #[test]
    fn blocks_of_fp8_stay_where_each_half_of_a_tile_is_in_one_row_of_blocks() {
        let blocks = Quantization::Fp8 { block: [128, 128] };
        let format = |rows: [Range<usize>; 2], cols: Range<usize>, order| {
            let [first, second] = rows.map(|rows| slice(blocks, rows, cols.clone()));
            packed_format(&[first, second], order)
        };
        let interleaved = RowOrder::Interleaved(8);
        assert_eq!(format([0..128, 128..192], 0..512, RowOrder::Stacked), Some(PackedFormat::Fp8Blocks));
        assert_eq!(format([0..128, 0..128], 128..512, interleaved), Some(PackedFormat::Fp8Blocks));
        assert_eq!(format([0..96, 128..192], 0..512, RowOrder::Stacked), None);
        assert_eq!(format([0..128, 0..128], 64..512, interleaved), None);
        // Rows 16 to 48 of a part of each: two rows of blocks within a tile.
        assert_eq!(format([112..144, 112..144], 0..512, interleaved), None);
    }

    #[test]
    fn heads_that_are_rotated_in_part_stay_in_blocks_of_fp8() {
        let format = |head_dim: usize, rotary_dim: usize| {
            let order = HeadOrder { head_dim, rotary_dim, is_interleaved: false };
            let part = slice(Quantization::Fp8 { block: [128, 128] }, 0..2 * head_dim, 0..512);
            packed_format(&[WeightSlice { head_order: Some(order), ..part }], RowOrder::Stacked)
        };
        // Qwen3.5, GLM-4.5.
        assert_eq!(format(256, 64), Some(PackedFormat::Fp8Blocks));
        assert_eq!(format(128, 64), Some(PackedFormat::Fp8Blocks));
        // The last rotated elements of the second half are in another block than the first ones.
        assert_eq!(format(256, 192), None);
    }

    #[test]
    fn parts_in_different_formats_are_expanded() {
        let int4 = |group, has_zeros| Quantization::Int4 { group, has_zeros, scale: DType::F16 };
        let of = |a, b, cols: Range<usize>| {
            packed_format(&[slice(a, 0..8, cols.clone()), slice(b, 0..8, cols)], RowOrder::Stacked)
        };
        let packed = |group, has_zeros| Some(PackedFormat::Int4 { group, has_zeros, scale_is_f16: true });
        assert_eq!(of(int4(128, true), int4(128, true), 0..512), packed(128, true));
        assert_eq!(of(int4(512, false), int4(512, false), 256..512), packed(128, false));
        assert_eq!(of(int4(64, true), int4(64, true), 64..512), packed(32, true));
        assert_eq!(of(int4(128, true), int4(128, false), 0..512), None);
        assert_eq!(of(int4(16, true), int4(16, true), 0..512), None);
        assert_eq!(of(Quantization::Nvfp4, Quantization::Nvfp4, 48..512), Some(PackedFormat::Nvfp4));
        assert_eq!(of(Quantization::Nvfp4, Quantization::Nvfp4, 8..512), None);
        assert_eq!(of(Quantization::Nvfp4, Quantization::Mxfp4, 0..512), None);
        assert_eq!(of(Quantization::Mxfp4, Quantization::Mxfp4, 32..512), Some(PackedFormat::Mxfp4));
        assert_eq!(of(Quantization::Fp8 { block: [1, 512] }, int4(128, true), 0..512), None);
        assert_eq!(
            of(Quantization::Fp8 { block: [1, 512] }, Quantization::Fp8 { block: [4096, 512] }, 8..512),
            Some(PackedFormat::Fp8Rows)
        );
    }

    #[test]
    fn integers_of_8_bits_stay_with_scales_of_rows_or_of_groups() {
        let of = |group, has_zeros, scale, cols: Range<usize>| {
            packed_format(&[slice(Quantization::Int8 { group, has_zeros, scale }, 0..16, cols)], RowOrder::Stacked)
        };
        let packed = |group, has_zeros, scale_is_f16| Some(PackedFormat::Int8 { group, has_zeros, scale_is_f16 });
        assert_eq!(of(512, false, DType::F32, 8..512), Some(PackedFormat::Int8Rows));
        assert_eq!(of(512, true, DType::Bf16, 256..512), packed(128, true, false));
        assert_eq!(of(128, true, DType::F16, 0..512), packed(128, true, true));
        assert_eq!(of(64, false, DType::Bf16, 64..512), packed(32, false, false));
        // Groups whose scales the kernels do not read, and that they do not have.
        assert_eq!(of(128, false, DType::F32, 0..512), None);
        assert_eq!(of(512, true, DType::F16, 8..512), None);
        assert_eq!(of(16, false, DType::F16, 0..512), None);
    }

    #[test]
    fn experts_stay_quantized_if_all_are_in_one_format_and_their_rows_fill_tiles() {
        let blocks = Quantization::Fp8 { block: [128, 128] };
        let of = |quantization, rows| [slice(quantization, rows, 0..512)];
        let format = |experts: &[[WeightSlice<'_>; 1]]| {
            let experts: Vec<&[WeightSlice<'_>]> = experts.iter().map(|parts| &parts[..]).collect();
            expert_format(&experts, RowOrder::Stacked)
        };
        let first = || of(blocks, 0..128);
        assert_eq!(format(&[first(), first(), of(blocks, 128..256)]), Some(PackedFormat::Fp8Blocks));
        assert_eq!(format(&[of(Quantization::Mxfp4, 0..64)]), Some(PackedFormat::Mxfp4));
        assert_eq!(format(&[of(Quantization::Nvfp4, 0..64)]), Some(PackedFormat::Nvfp4));
        // A tile with rows of two rows of blocks, another format, half a tile.
        assert_eq!(format(&[first(), of(blocks, 96..224)]), None);
        assert_eq!(format(&[first(), of(Quantization::Mxfp4, 0..128)]), None);
        assert_eq!(format(&[of(blocks, 0..96)]), None);
    }

    #[test]
    fn parts_whose_columns_have_an_order_stay_if_it_is_one_order_of_whole_rows() {
        let quantization = Quantization::Int4 { group: 128, has_zeros: true, scale: DType::F16 };
        let format = PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: true };
        let part = |first: u32, cols: Range<usize>| {
            let order = (0..512).map(|col| (first + 5 * col) % 512).collect();
            let data = WeightData::Computed(Arc::new(Numbered(quantization, Some(order))));
            WeightSlice { data, ..slice(quantization, 8..72, cols) }
        };
        let of = |parts: &[WeightSlice<'_>]| packed_format(parts, RowOrder::Stacked);
        assert_eq!(of(&[part(3, 0..512), part(3, 0..512)]), Some(format));
        assert_eq!(input_order(&[part(3, 0..512)]).unwrap()[..3], [3, 8, 13]);
        assert_eq!(of(&[part(3, 0..512), part(4, 0..512)]), None);
        assert_eq!(of(&[part(3, 0..512), slice(quantization, 8..72, 0..512)]), None);
        assert_eq!(of(&[slice(quantization, 8..72, 0..512), part(3, 0..512)]), None);
        assert_eq!(of(&[part(3, 0..256)]), None);
        // Rows of experts are gathered by token.
        let [ordered, plain] = [[part(3, 0..512)], [slice(quantization, 8..72, 0..512)]];
        let experts = |experts: &[&[WeightSlice<'_>]]| expert_format(experts, RowOrder::Stacked);
        assert_eq!(experts(&[&plain, &plain]), Some(format));
        assert_eq!((experts(&[&ordered, &ordered]), experts(&[&plain, &ordered])), (None, None));
    }

    #[test]
    fn gathered_inputs_are_behind_the_largest_expanded_weight() {
        let mut scratch = ProductScratch::default();
        scratch.count(16, 64, false);
        assert!(!scratch.has_gathered());
        scratch.count_gathered(64);
        scratch.count(8, 32, false);
        assert_eq!((scratch.has_gathered(), scratch.bytes(10)), (true, 16 * 64 * 2 + 10 * 64 * 2));
    }

    #[test]
    fn scales_of_a_row_are_those_of_its_columns() {
        let quantization = Quantization::Int4 { group: 128, has_zeros: true, scale: DType::Bf16 };
        let part = Part::new(&slice(quantization, 2..10, 256..512)).unwrap();
        let format = PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: false };
        let mut tile = vec![0; format.tile_meta_bytes(256)];
        part.pack_scales(0, format, &mut tile, 5);
        let scale = |group: usize| half::bf16::from_le_bytes([tile[128 * group + 10], tile[128 * group + 11]]).to_f32();
        // Rounded to bf16.
        assert_eq!([scale(0), scale(1)], [2256.0, 2384.0]);
        assert_eq!([tile[256 + 5], tile[256 + 64 + 5]], [3, 3]);
    }
}
