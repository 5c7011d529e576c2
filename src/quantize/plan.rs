//! The tensors of the new checkpoint: which are quantized, and what the others become.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use device::cpu::LayerInputs;
use models::{InputSource, LinearGroup, StoredTensor};

use crate::form::{BLOCK, Form};
use crate::matrix::{Dtype, Matrix};
use crate::search::{column_factors, mean_squares};
use crate::{Format, QuantizeError, codes};

/// The tensors of the new checkpoint, in the order in which they are written.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) form: Form,
    pub(crate) items: Vec<Item<'a>>,
    /// Modules with matrices that are not quantized.
    ignored: Vec<String>,
    bytes_before: u64,
}

/// What a tensor of the checkpoint becomes.
#[derive(Debug)]
pub(crate) enum Item<'a> {
    /// The same tensor.
    Copied(StoredTensor<'a>),
    /// A vector with other values.
    Changed(StoredTensor<'a>, Vec<u8>),
    /// Codes and what belongs to them.
    Quantized(Matrix<'a>),
}

/// A tensor of the new checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: u64,
}

impl<'a> Plan<'a> {
    /// The plan for the tensors of a checkpoint, with the linear layers in `groups`. `inputs` are those that layers have seen.
    ///
    /// # Errors
    /// When a linear layer is no matrix of floats, or none can be quantized.
    pub(crate) fn new(
        format: Format,
        tensors: &[StoredTensor<'a>],
        groups: &[LinearGroup],
        inputs: &[LayerInputs],
    ) -> Result<Self, QuantizeError> {
        let form = format.form(groups.iter().map(|group| group.cols));
        let form = form.ok_or(QuantizeError::NothingFits { format: format.name(), multiple: format.multiple() })?;
        let by_name: HashMap<&str, StoredTensor<'a>> = tensors.iter().map(|tensor| (tensor.name, *tensor)).collect();
        let mut matrices = BTreeMap::new();
        for name in groups.iter().filter(|group| form.fits(group.cols)).flat_map(|group| &group.weights) {
            // What the model needs was checked when it was loaded; a part may be absent, as a head that is tied.
            if let Some(tensor) = by_name.get(name.as_str()) {
                matrices.insert(tensor.name, Matrix::new(*tensor)?);
            }
        }
        let mut changed = HashMap::new();
        if let Form::Integers { group, has_zeros: true, .. } = form {
            let mut search = Search { by_name: &by_name, matrices: &mut matrices, changed: &mut changed, group };
            groups.iter().for_each(|linear| search.run(linear, inputs));
        }
        let bytes_before = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
        let item = |tensor: &StoredTensor<'a>| match (matrices.remove(tensor.name), changed.remove(tensor.name)) {
            (Some(matrix), _) => Item::Quantized(matrix),
            (None, Some(bytes)) => Item::Changed(*tensor, bytes),
            (None, None) => Item::Copied(*tensor),
        };
        let items: Vec<Item<'a>> = tensors.iter().map(item).collect();
        Ok(Self { form, ignored: ignored(&items), items, bytes_before })
    }

    /// Modules that are not quantized, for `config.json`.
    pub(crate) fn ignored(&self) -> Vec<String> {
        let tied = "lm_head".to_owned();
        let is_named = self.ignored.contains(&tied);
        self.ignored.iter().cloned().chain((!is_named).then_some(tied)).collect()
    }

    /// The same but for embeddings and heads.
    pub(crate) fn kept(&self) -> Vec<&str> {
        let is_table = |name: &str| name.contains("embed") || name.ends_with("head") || name.contains("wte");
        self.ignored.iter().map(String::as_str).filter(|name| !is_table(name)).collect()
    }

    pub(crate) fn num_quantized(&self) -> usize {
        self.items.iter().filter(|item| matches!(item, Item::Quantized(_))).count()
    }

    /// Bytes of the tensors before and after.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let outputs = self.items.iter().flat_map(|item| item.outputs(self.form));
        (self.bytes_before, outputs.map(|output| output.bytes).sum())
    }
}

impl Item<'_> {
    /// The tensors that are written for it.
    pub(crate) fn outputs(&self, form: Form) -> Vec<Output> {
        let output = |name: String, dtype: &'static str, shape: Vec<usize>, size: usize| {
            let bytes = (shape.iter().product::<usize>() * size) as u64;
            Output { name, dtype, shape, bytes }
        };
        let matrix = match self {
            Self::Copied(tensor) | Self::Changed(tensor, _) => {
                let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
                return vec![Output { name, dtype: known(tensor.dtype), shape, bytes: tensor.data.len() as u64 }];
            }
            Self::Quantized(matrix) => matrix,
        };
        let (rows, cols, name) = (matrix.rows, matrix.cols, matrix.tensor.name);
        let scale = if codes::scale_dtype(matrix.dtype) == Dtype::F16 { "F16" } else { "BF16" };
        let scales = |shape| output(format!("{name}_scale"), scale, shape, 2);
        match form {
            Form::Fp8Rows => vec![output(name.to_owned(), "F8_E4M3", vec![rows, cols], 1), scales(vec![rows, 1])],
            Form::Fp8Blocks => {
                let blocks = vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
                vec![output(name.to_owned(), "F8_E4M3", vec![rows, cols], 1), scales(blocks)]
            }
            Form::Integers { bits, group, has_zeros } => {
                let mut outputs = vec![
                    output(format!("{name}_packed"), "I32", vec![rows, cols * bits / 32], 4),
                    scales(vec![rows, cols / group]),
                ];
                if has_zeros {
                    let shape = vec![(rows * bits).div_ceil(32), cols / group];
                    outputs.push(output(format!("{name}_zero_point"), "I32", shape, 4));
                }
                outputs.push(output(format!("{name}_shape"), "I64", vec![2], 8));
                outputs
            }
        }
    }

    /// The bytes of these tensors, in the same order.
    pub(crate) fn data(&self, form: Form) -> Vec<std::borrow::Cow<'_, [u8]>> {
        let matrix = match self {
            Self::Copied(tensor) => return vec![tensor.data.into()],
            Self::Changed(_, bytes) => return vec![bytes.as_slice().into()],
            Self::Quantized(matrix) => matrix,
        };
        let codes = codes::quantize(matrix, form);
        let mut data = vec![codes.weight.into(), codes.scales.into()];
        if let Form::Integers { has_zeros, .. } = form {
            if has_zeros {
                data.push(codes.zeros.into());
            }
            let shape: Vec<u8> =
                [matrix.rows, matrix.cols].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
            data.push(shape.into());
        }
        data
    }
}

/// The name of a type of safetensors, as a constant.
fn known(dtype: &str) -> &'static str {
    const NAMES: [&str; 16] = [
        "BF16", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3",
        "F8_E5M2", "F8_E8M0",
    ];
    NAMES.into_iter().find(|name| *name == dtype).unwrap_or("U8")
}

/// Modules with a matrix that is not quantized.
fn ignored(items: &[Item<'_>]) -> Vec<String> {
    let modules = items.iter().filter_map(|item| match item {
        Item::Copied(tensor) if tensor.shape.len() == 2 => tensor.name.strip_suffix(".weight"),
        _ => None,
    });
    modules.map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Chooses the factors of columns by the inputs that layers have seen.
struct Search<'s, 'a> {
    by_name: &'s HashMap<&'s str, StoredTensor<'a>>,
    matrices: &'s mut BTreeMap<&'a str, Matrix<'a>>,
    /// Vectors with new values.
    changed: &'s mut HashMap<&'a str, Vec<u8>>,
    /// Columns of a group.
    group: usize,
}

impl<'a> Search<'_, 'a> {
    fn run(&mut self, linear: &LinearGroup, inputs: &[LayerInputs]) {
        let is_own = |inputs: &&LayerInputs| linear.weights.contains(&inputs.name) && inputs.sums.len() == linear.cols;
        let Some(inputs) = inputs.iter().find(is_own).filter(|inputs| inputs.count > 0) else { return };
        let own: Vec<Matrix<'a>> =
            linear.weights.iter().filter_map(|name| self.matrices.get(name.as_str()).cloned()).collect();
        let squares = mean_squares(inputs);
        let factors = match &linear.source {
            Some(source) if !own.is_empty() => {
                let factors = column_factors(&own, inputs, self.group);
                if self.divide(source, &factors) { factors } else { vec![1.0; linear.cols] }
            }
            _ => vec![1.0; linear.cols],
        };
        for name in &linear.weights {
            let Some(matrix) = self.matrices.get_mut(name.as_str()) else { continue };
            matrix.importance = squares.iter().zip(&factors).map(|(square, factor)| square / factor.powi(2)).collect();
            matrix.column_factors.clone_from(&factors);
        }
    }

    /// Divides the outputs of what makes an input by the factors of its columns. False if that cannot be done.
    fn divide(&mut self, source: &InputSource, factors: &[f32]) -> bool {
        match source {
            InputSource::Norm { weight, bias, offset } => {
                let vectors = [Some((weight, *offset)), bias.as_ref().map(|bias| (bias, 0.0))];
                let vectors: Vec<_> = vectors.into_iter().flatten().collect();
                let new: Vec<_> =
                    vectors.iter().filter_map(|(name, offset)| self.divided(name, factors, *offset)).collect();
                let is_whole = new.len() == vectors.len();
                if is_whole {
                    self.changed.extend(new);
                }
                is_whole
            }
            InputSource::Up { weight, bias } => {
                let bias = match bias {
                    Some(bias) => match self.divided(bias, factors, 0.0) {
                        Some(new) => Some(new),
                        None => return false,
                    },
                    None => None,
                };
                let Some(up) = self.matrices.get_mut(weight.as_str()).filter(|up| up.rows == factors.len()) else {
                    return false;
                };
                up.row_divisors = factors.to_vec();
                self.changed.extend(bias);
                true
            }
        }
    }

    /// The name and the new values of a vector: `(x + offset) / factor - offset`.
    fn divided(&self, name: &str, factors: &[f32], offset: f32) -> Option<(&'a str, Vec<u8>)> {
        let tensor = self.by_name.get(name).filter(|tensor| tensor.shape == [factors.len()])?;
        let dtype = Dtype::of(tensor.dtype)?;
        let mut values = vec![0.0; factors.len()];
        dtype.read(tensor.data, &mut values);
        let mut bytes = Vec::with_capacity(tensor.data.len());
        let new = values.iter().zip(factors).map(|(value, factor)| (value + offset) / factor - offset);
        dtype.write(new, &mut bytes);
        Some((tensor.name, bytes))
    }
}
