//! Layers of experts on the first GPU: each op, compared with the memory bandwidth and in TFLOP/s.
//!
//! `cargo bench -p kernels --bench cuda_experts [-- [READ_TB_S] [SHAPE] [sorted]]`; the default bandwidth is 4.47 TB/s, an H200's. Tokens
//! choose their experts by random logits. Two layers run in turn. As in steps, rows of many tokens are not copied: products gather them;
//! with `sorted`, they are copied.

mod gpu;

use gpu::{microseconds, random};
use half::bf16;
use kernels::cuda::expert_rows::{ExpertRows, GroupedRows, RowInputs};
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::gather_rows::gather_rows;
use kernels::cuda::grouped_fp8_gemm::grouped_fp8_gemm;
use kernels::cuda::grouped_gemm::{Gate, GroupedEpilogue, GroupedWeight, Kernel, grouped_gemm};
use kernels::cuda::quantize_rows::{Fp8Rows, quantize_rows};
use kernels::cuda::quantized_gemm::PackedFormat;
use kernels::cuda::route_few_tokens::{
    ListedRoutes, RoundedTokens, RouterProduct, list_bytes, route_few_tokens, takes,
};
use kernels::cuda::route_tokens::{Choices, Router, route_tokens};
use kernels::cuda::sort_routes::{SortedRoutes, SortedRows, sort_routes};
use kernels::cuda::sum_experts::{ExpertOutputs, sum_experts};
use kernels::cuda::{DeviceBuffer, Span};

/// Name, experts, experts of a token, hidden size, columns of an expert.
const SHAPES: [(&str, usize, usize, usize, usize); 3] =
    [("qwen3-30b", 128, 8, 2048, 768), ("mixtral", 8, 2, 4096, 14336), ("gpt-oss", 32, 4, 2880, 2880)];
/// Forms of the weights; bf16 has no format.
const FORMS: [(&str, Option<PackedFormat>); 5] = [
    ("bf16", None),
    ("fp8", Some(PackedFormat::Fp8Blocks)),
    ("int4", Some(PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: true })),
    ("mxfp4", Some(PackedFormat::Mxfp4)),
    ("nvfp4", Some(PackedFormat::Nvfp4)),
];
const TOKENS: [usize; 8] = [1, 4, 8, 32, 128, 512, 2048, 8192];

fn main() {
    let Some((gpu, q)) = gpu::open() else { return };
    let args: Vec<String> = std::env::args().collect();
    let read = args.iter().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    let has_arg = |name: &str| args.iter().any(|arg| arg == name);
    let has_shape = SHAPES.iter().any(|(name, ..)| has_arg(name));
    println!("times in us; % read of the weights of the experts that are used; TFLOP/s of both products");
    println!(
        "{:>10} {:>5} {:>6} {:>6} {:>7} {:>7} {:>9} {:>9} {:>6} {:>8} {:>9}",
        "shape", "form", "tokens", "kernel", "sort", "sum", "gate_up", "down", "% read", "TFLOP/s", "all"
    );
    for (name, count, top_k, hidden, inner) in SHAPES.into_iter().filter(|(name, ..)| !has_shape || has_arg(name)) {
        let layers: Vec<[DeviceBuffer; 2]> =
            (0..2).map(|_| [random(&gpu, count * 2 * inner * hidden), random(&gpu, count * hidden * inner)]).collect();
        let expanded = DeviceBuffer::with_count::<bf16>(&gpu, count * 2 * inner * hidden).expect("memory");
        for tokens in TOKENS {
            let routes = tokens * top_k;
            let words = |count: usize| DeviceBuffer::with_count::<u32>(&gpu, count).expect("memory");
            let values = |count: usize| DeviceBuffer::with_count::<bf16>(&gpu, count).expect("memory");
            // Uniform logits from a multiplicative hash.
            let logit = |i: usize| ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 * 1e-7;
            let logits: Vec<f32> = (0..tokens * count).map(logit).collect();
            let logits = DeviceBuffer::from_slice(&gpu, &logits).expect("memory");
            let slots = DeviceBuffer::from_slice(&gpu, &vec![0u32; tokens]).expect("memory");
            let [experts, probabilities, sorted_tokens, places] = std::array::from_fn(|_| words(routes));
            let (offsets, x, out) = (words(count + 1), random(&gpu, tokens * hidden), values(tokens * hidden));
            let [rows, y] = std::array::from_fn(|_| values(routes * hidden));
            let inside = values(routes * inner);
            let choices = Choices { experts: experts.span(), probabilities: probabilities.span(), top_k };
            let sorted = SortedRoutes {
                offsets: offsets.span(),
                tokens: sorted_tokens.span(),
                places: places.span(),
                first_expert: 0,
                num_experts: count,
            };
            let copied = SortedRows { rows: rows.span(), x: x.span(), cols: hidden };
            let runs = if tokens > 1000 { 6 } else { 40 };
            let router = Router::softmax(logits.span(), slots.span(), count, true);
            let (also, also_factors) = (Span::NULL, Span::NULL);
            let outputs = ExpertOutputs { y: y.span(), choices, sorted, cols: hidden, also, also_factors };
            let (router_weight, list) = (random(&gpu, count * hidden), words(list_bytes(routes) / 4));
            let product = RouterProduct { x: x.span(), weight: router_weight.span(), width: hidden, gate: None };
            let listed = ListedRoutes { list: list.span(), places: places.span(), first_expert: 0, num_experts: count };
            let rounded_tokens = Fp8Rows::in_buffer(expanded.span(), tokens, hidden);
            // With few tokens, the product of the router is included, and experts are listed.
            let can_be_listed = takes(&gpu, tokens, top_k, count);
            let route_few = |rounds: bool| {
                let rounded = rounds.then_some(RoundedTokens { x: x.span(), cols: hidden, to: rounded_tokens });
                route_few_tokens(&q, listed, choices, &router, product, tokens, rounded)
            };
            let sort = |is_gathered: bool| {
                route_tokens(&q, choices, &router, tokens)?;
                let is_copied = tokens <= 128 && !is_gathered;
                sort_routes(&q, sorted, choices, tokens, is_copied.then_some(copied))?;
                if is_copied || is_gathered {
                    return Ok(());
                }
                gather_rows(&q, rows.span(), x.span(), sorted.tokens, routes, hidden)
            };
            let sum = |_| sum_experts(&q, out.span(), &outputs, tokens);
            sort(false).expect("a launch");
            let sum_us = microseconds(&q, runs, sum);
            let starts: Vec<u32> = offsets.span().read(count + 1).expect("a copy");
            let used = starts.windows(2).filter(|pair| pair[1] > pair[0]).count();
            for ((form, format), kernel) in forms_and_kernels() {
                let is_useful = match kernel {
                    Some(Kernel::Simple) => tokens <= 128 && format.is_none(),
                    Some(Kernel::Skinny) => tokens <= 1024,
                    Some(Kernel::InOrder) => format.is_some(),
                    Some(Kernel::Wide) => tokens >= 128,
                    None => format == Some(PackedFormat::Fp8Blocks),
                };
                if !is_useful {
                    continue;
                }
                let is_few = can_be_listed && matches!(kernel, Some(Kernel::Skinny | Kernel::InOrder) | None);
                let experts =
                    if is_few { ExpertRows::Listed(list.span()) } else { ExpertRows::Offsets(offsets.span()) };
                let grouped = GroupedRows { experts, tokens, routes };
                let route = |is_gathered: bool| match is_few {
                    true => route_few(kernel.is_none()),
                    false => sort(is_gathered),
                };
                // Packed weights that the kernel does not take are expanded each time.
                let weight = |i: usize, part: usize, n: usize, k: usize| {
                    let span = layers[i % 2][part].span();
                    let packed = format.map(|format| {
                        let first = format.codes_bytes(count * n, k);
                        (span.part(first, format.scales_bytes(count * n, k)), format)
                    });
                    let weight = GroupedWeight { weight: span, packed, bias: Span::NULL, num_experts: count, n, k };
                    match kernel {
                        Some(Kernel::Skinny | Kernel::InOrder) | None => Ok(weight),
                        _ => weight.expanded(&q, expanded.span()),
                    }
                };
                let multiply = |y: Span, inputs: RowInputs<Span>, weight: &GroupedWeight, epilogue: GroupedEpilogue| {
                    if let Some(kernel) = kernel {
                        return grouped_gemm(&q, y, inputs, weight, grouped, epilogue, kernel);
                    }
                    let in_e4m3 = |x: Span, count: usize| {
                        let rounded = Fp8Rows::in_buffer(expanded.span(), count, weight.k);
                        quantize_rows(&q, rounded, x, count, weight.k)?;
                        Ok(rounded)
                    };
                    let inputs = match inputs {
                        RowInputs::Sorted(x) => RowInputs::Sorted(in_e4m3(x, routes)?),
                        RowInputs::OfTokens { x, of_rows } => RowInputs::OfTokens { x: in_e4m3(x, tokens)?, of_rows },
                        // The kernel that routes has rounded them.
                        RowInputs::OfAllTokens(_) => RowInputs::OfAllTokens(rounded_tokens),
                    };
                    grouped_fp8_gemm(&q, y, inputs, weight, grouped, epilogue)
                };
                let is_gathered = !is_few && matches!(kernel, Some(Kernel::Wide) | None) && !has_arg("sorted");
                let gate_up = |i: usize| {
                    let weight = weight(i, 0, 2 * inner, hidden)?;
                    let epilogue = GroupedEpilogue::Gated(Gate::Activation(GateActivation::Silu));
                    let inputs = match is_gathered {
                        _ if is_few => RowInputs::OfAllTokens(x.span()),
                        true => RowInputs::OfTokens { x: x.span(), of_rows: sorted.tokens },
                        false => RowInputs::Sorted(rows.span()),
                    };
                    multiply(inside.span(), inputs, &weight, epilogue)
                };
                let down = |i: usize| {
                    let weight = weight(i, 1, hidden, inner)?;
                    multiply(y.span(), RowInputs::Sorted(inside.span()), &weight, GroupedEpilogue::Store)
                };
                let whole = |i: usize| {
                    route(is_gathered)?;
                    gate_up(i)?;
                    down(i)?;
                    sum(i)
                };
                let sort_us = microseconds(&q, runs, |_| route(is_gathered));
                let [up, down] = [microseconds(&q, runs, gate_up), microseconds(&q, runs, down)];
                let all = microseconds(&q, runs, whole);
                let row_bytes = |cols: usize| format.map_or(2 * cols, |format| format.row_bytes(cols));
                let bytes = (used * (2 * inner * row_bytes(hidden) + hidden * row_bytes(inner))) as f64;
                let operations = (2 * routes * 3 * inner * hidden) as f64;
                let kernel = kernel.map_or("Fp8".to_owned(), |kernel| format!("{kernel:?}"));
                println!(
                    "{name:>10} {form:>5} {tokens:>6} {kernel:>6} {sort_us:>7.1} {sum_us:>7.1} {up:>9.1} {down:>9.1} {:>6.0} {:>8.0} {all:>9.1}",
                    100.0 * bytes / (up + down) / 1e6 / read,
                    operations / (up + down) / 1e6
                );
            }
        }
    }
}

/// Every form of the weights with every kernel; none: inputs are rounded to e4m3.
fn forms_and_kernels() -> impl Iterator<Item = ((&'static str, Option<PackedFormat>), Option<Kernel>)> {
    let kernels = [Some(Kernel::Simple), Some(Kernel::Skinny), Some(Kernel::InOrder), Some(Kernel::Wide), None];
    FORMS.into_iter().flat_map(move |form| kernels.map(|kernel| (form, kernel)))
}
