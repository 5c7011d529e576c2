//! Rotary position embedding: frequencies with scaling, and the table of cosines and sines.
//!
//! The scaling rules are those of `rope_scaling` in checkpoints: `linear` (Chen et al. 2023), `llama3` (Llama 3.1 model
//! card), `yarn` (Peng et al. 2023), `longrope` (Ding et al. 2024). `dynamic` changes nothing for sequences up to `max_position_embeddings`, which is
//! the maximum length here.

use std::f64::consts::PI;

use ops::{HeadOrder, RopeTable};

use crate::ModelError;
use crate::fields::Fields;

/// Parameters of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// `D`, the size of the heads that it rotates.
    pub head_dim: usize,
    /// The first elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Whether a checkpoint's pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
    pub is_interleaved: bool,
    /// Whether heads are rotated by negative angles.
    pub is_reversed: bool,
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// How frequencies are scaled for contexts longer than those of the first training.
    pub scaling: RopeScaling,
}

/// What an architecture defines for its rotary embeddings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeShape {
    pub(crate) head_dim: usize,
    pub(crate) is_interleaved: bool,
    /// The share of a head that is rotated if no field sets it; `None` if the architecture always rotates whole heads.
    pub(crate) partial: Option<f64>,
    /// If no field sets it.
    pub(crate) theta: f64,
    pub(crate) max_positions: usize,
}

/// Scaling rules.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Divides all frequencies by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Divides low frequencies and keeps high ones, with a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original_max_positions / high` are high frequencies.
        high: f64,
        /// Context length of the first training.
        original_max_positions: f64,
    },
    /// Rotates the first pairs `(i, i + D / 2)` of a head and leaves the others, with the frequencies of whole heads.
    Proportional {
        /// Divides all frequencies.
        factor: f64,
        /// The share of pairs that are rotated.
        share: f64,
    },
    /// Like `Llama3`, but the ramp is over dimensions, and cos and sin are multiplied by `attention_factor`.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Number of rotations at the end of the ramp.
        beta_fast: f64,
        /// Number of rotations at the start of the ramp.
        beta_slow: f64,
        /// Context length of the first training.
        original_max_positions: f64,
        /// Multiplier of cos and sin.
        attention_factor: f64,
        /// Whether the ends of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// Divides each frequency by a factor of its own.
    Long {
        /// For sequences up to `original_max_positions`, one for each frequency.
        short_factors: Vec<f64>,
        /// For longer sequences.
        long_factors: Vec<f64>,
        /// Context length of the first training.
        original_max_positions: usize,
        /// Multipliers of cos and sin: with the short factors, and with the long ones.
        attention_factors: [f64; 2],
    },
}

impl Rope {
    /// Reads the parameters of all layers: `rope_scaling`, or else `rope_parameters`, or InternLM's `rotary`, with
    /// `rope_theta` beside or in it.
    pub(crate) fn read(fields: &Fields, shape: RopeShape) -> Result<Self, ModelError> {
        let parameters = fields.object("rope_parameters")?;
        let nested = match fields.object("rope_scaling")? {
            // transformers replaces `rope_parameters` by `rope_scaling`, with all that it holds.
            Some(scaling) => {
                let kept = scaling.positive("rope_theta")?.or(fields.positive("rope_theta")?).unwrap_or(shape.theta);
                // What it replaces may say that there is no scaling; any other field of it is refused as unknown.
                let lost = match parameters.filter(|parameters| parameters.has_text("rope_type", "default")) {
                    Some(parameters) => parameters.positive("rope_theta")?,
                    None => None,
                };
                if let Some(lost) = lost.filter(|lost| *lost != kept) {
                    let expected =
                        format!("{kept}, which `rope_scaling` implies; write `rope_theta` into `rope_scaling`");
                    return Err(fields.wrong("rope_parameters.rope_theta", &expected, &lost.into()));
                }
                Some(scaling)
            }
            None => match parameters {
                Some(parameters) => Some(parameters),
                None => fields.object("rotary")?,
            },
        };
        Self::of(fields, nested, shape)
    }

    /// Reads the parameters of the layers of one type: `rope_parameters.NAME`. Without it, `rope_theta` is that of the
    /// shape.
    pub(crate) fn of_layer_type(fields: &Fields, name: &str, shape: RopeShape) -> Result<Self, ModelError> {
        let parameters = fields.object("rope_parameters")?;
        let nested = parameters.map(|parameters| parameters.object(name)).transpose()?.flatten();
        Self::of(fields, nested, shape)
    }

    /// `nested` has the parameters; some may stand in `fields` instead.
    pub(crate) fn of(fields: &Fields, nested: Option<Fields>, shape: RopeShape) -> Result<Self, ModelError> {
        let (mut theta, mut partial, mut scaling) = (None, None, RopeScaling::None);
        let (outer, original) = (fields.positive("rope_theta")?, fields.size("original_max_position_embeddings")?);
        if shape.partial.is_some() {
            partial = fields.positive("partial_rotary_factor")?;
        }
        if let Some(nested) = &nested {
            theta = nested.positive("rope_theta")?.or(nested.positive("base")?);
            if shape.partial.is_some() {
                partial = nested.positive("partial_rotary_factor")?.or(partial);
            }
        }
        let partial = partial.or(shape.partial).unwrap_or(1.0);
        let rotary_dim = (shape.head_dim as f64 * partial) as usize;
        if partial > 1.0 || !rotary_dim.is_multiple_of(2) || rotary_dim == 0 {
            let expected = format!("a share of `head_dim` {} that is an even number", shape.head_dim);
            return Err(fields.wrong("partial_rotary_factor", &expected, &partial.into()));
        }
        if let Some(nested) = &nested {
            scaling = RopeScaling::read(nested, shape.max_positions, original, rotary_dim)?;
        }
        Ok(Self {
            head_dim: shape.head_dim,
            rotary_dim,
            is_interleaved: shape.is_interleaved,
            is_reversed: false,
            theta: theta.or(outer).unwrap_or(shape.theta),
            scaling,
        })
    }

    /// The order of a head's elements in the checkpoint, unless it is the order in which devices rotate them.
    pub(crate) fn head_order(&self) -> Option<HeadOrder> {
        let &Self { head_dim, rotary_dim, is_interleaved, .. } = self;
        let is_usual = rotary_dim == head_dim && !is_interleaved;
        (!is_usual).then_some(HeadOrder { head_dim, rotary_dim, is_interleaved })
    }

    /// Radians per position of each of the `rotary_dim / 2` pairs, for sequences of up to `max_positions`.
    pub fn frequencies(&self, max_positions: usize) -> Vec<f64> {
        let dim = self.rotary_dim;
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / dim as f64);
        let pairs = 0..dim / 2;
        match self.scaling {
            RopeScaling::None => pairs.map(plain).collect(),
            RopeScaling::Long { ref short_factors, ref long_factors, original_max_positions, .. } => {
                let factors = if max_positions <= original_max_positions { short_factors } else { long_factors };
                pairs.map(|i| plain(i) / factors[i]).collect()
            }
            RopeScaling::Proportional { factor, share } => {
                let rotated = (share * dim as f64 / 2.0) as usize;
                pairs.map(|i| if i < rotated { plain(i) / factor } else { 0.0 }).collect()
            }
            RopeScaling::Linear { factor } => pairs.map(|i| plain(i) / factor).collect(),
            RopeScaling::Llama3 { factor, low, high, original_max_positions } => pairs
                .map(|i| {
                    let (frequency, wavelength) = (plain(i), 2.0 * PI / plain(i));
                    let kept = (original_max_positions / wavelength - low) / (high - low);
                    let kept = kept.clamp(0.0, 1.0);
                    (1.0 - kept) * frequency / factor + kept * frequency
                })
                .collect(),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, truncate, .. } => {
                let dim_of = |rotations: f64| {
                    dim as f64 * (original_max_positions / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (dim_of(beta_fast), dim_of(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(dim as f64 - 1.0));
                if first == last {
                    last += 0.001;
                }
                pairs
                    .map(|i| {
                        let kept = 1.0 - ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                        (1.0 - kept) * plain(i) / factor + kept * plain(i)
                    })
                    .collect()
            }
        }
    }

    /// cos and sin for positions `0..max_positions`. Elements that are not rotated have an angle of zero.
    ///
    /// Angles are rounded to f32 before cos and sin are computed, like in the checkpoints' reference code.
    pub fn table(&self, max_positions: usize) -> RopeTable {
        let frequencies: Vec<f32> = self.frequencies(max_positions).into_iter().map(|f| f as f32).collect();
        let magnitude = match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            RopeScaling::Long { attention_factors, original_max_positions, .. } => {
                attention_factors[usize::from(max_positions > original_max_positions)]
            }
            _ => 1.0,
        };
        let (half, unrotated) = (self.head_dim / 2, (self.head_dim - self.rotary_dim) / 2);
        let entries = max_positions * half;
        let mut table = RopeTable { cos: Vec::with_capacity(entries), sin: Vec::with_capacity(entries) };
        for position in 0..max_positions {
            for frequency in &frequencies {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                table.cos.push((cos * magnitude) as f32);
                table.sin.push((sin * if self.is_reversed { -magnitude } else { magnitude }) as f32);
            }
            table.cos.extend(std::iter::repeat_n(1.0, unrotated));
            table.sin.extend(std::iter::repeat_n(0.0, unrotated));
        }
        table
    }
}

impl RopeScaling {
    /// Whether a rotated head is as long as before.
    pub(crate) fn keeps_lengths(&self) -> bool {
        !matches!(self, Self::Yarn { .. } | Self::Long { .. })
    }

    /// `outer_original` is `original_max_position_embeddings` beside the parameters.
    fn read(
        fields: &Fields,
        max_positions: usize,
        outer_original: Option<usize>,
        rotary_dim: usize,
    ) -> Result<Self, ModelError> {
        let name = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
        fields.get("type"); // transformers writes it beside `rope_type`.
        let original = outer_original.or(fields.size("original_max_position_embeddings")?);
        match fields.text(name)? {
            None | Some("default" | "origin" | "mrope") => Ok(Self::None),
            Some("dynamic") => {
                fields.positive("factor")?;
                Ok(Self::None)
            }
            Some("longrope" | "su") => Self::read_long(fields, max_positions, original, rotary_dim),
            Some("linear") => Ok(Self::Linear { factor: fields.required_positive("factor")? }),
            Some("proportional") => {
                let share = fields.positive("partial_rotary_factor")?.unwrap_or(1.0);
                if share > 1.0 {
                    return Err(fields.wrong("partial_rotary_factor", "at most 1", &share.into()));
                }
                Ok(Self::Proportional { factor: fields.positive("factor")?.unwrap_or(1.0), share })
            }
            Some("llama3") => Ok(Self::Llama3 {
                factor: fields.required_positive("factor")?,
                low: fields.required_positive("low_freq_factor")?,
                high: fields.required_positive("high_freq_factor")?,
                original_max_positions: original.unwrap_or(max_positions) as f64,
            }),
            Some("yarn") => {
                let factor = fields.required_positive("factor")?;
                Ok(Self::Yarn {
                    factor,
                    beta_fast: fields.positive("beta_fast")?.unwrap_or(32.0),
                    beta_slow: fields.positive("beta_slow")?.unwrap_or(1.0),
                    original_max_positions: original.unwrap_or(max_positions) as f64,
                    attention_factor: yarn_attention_factor(fields, factor)?,
                    truncate: fields.flag("truncate", true)?,
                })
            }
            Some(other) => Err(fields.wrong(
                name,
                "`default`, `linear`, `dynamic`, `proportional`, `llama3`, `yarn` or `longrope`",
                &serde_json::Value::from(other),
            )),
        }
    }

    fn read_long(
        fields: &Fields,
        max_positions: usize,
        original: Option<usize>,
        rotary_dim: usize,
    ) -> Result<Self, ModelError> {
        let factors = |name: &str| {
            let expected = format!("{} numbers, one for each rotated pair", rotary_dim / 2);
            let found = fields.positives(name)?.unwrap_or_default();
            match found.len() == rotary_dim / 2 {
                true => Ok(found),
                false => Err(fields.wrong(name, &expected, &found.into())),
            }
        };
        let original = original.unwrap_or(max_positions);
        let factor = fields.positive("factor")?.unwrap_or(max_positions as f64 / original as f64);
        let attention_factor = match fields.positive("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        };
        let (short_factors, long_factors) = (factors("short_factor")?, factors("long_factor")?);
        let attention_factors = [attention_factor; 2];
        Ok(Self::Long { short_factors, long_factors, original_max_positions: original, attention_factors })
    }
}

/// `attention_factor` if given, else computed from `mscale`, else the paper's `0.1 ln(factor) + 1`.
fn yarn_attention_factor(fields: &Fields, factor: f64) -> Result<f64, ModelError> {
    if let Some(given) = fields.positive("attention_factor")? {
        return Ok(given);
    }
    let magnitude = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    Ok(match (fields.positive("mscale")?, fields.positive("mscale_all_dim")?) {
        (Some(mscale), Some(all)) => magnitude(mscale) / magnitude(all),
        _ => magnitude(1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(dim: usize, theta: f64, scaling: RopeScaling) -> Rope {
        Rope { head_dim: dim, rotary_dim: dim, is_interleaved: false, is_reversed: false, theta, scaling }
    }

    #[test]
    fn plain_frequencies_fall_from_one_to_the_inverse_of_theta() {
        let frequencies = rope(64, 10_000.0, RopeScaling::None).frequencies(8);
        assert_eq!(frequencies[0], 1.0);
        assert!((frequencies[31] - 10_000f64.powf(-62.0 / 64.0)).abs() < 1e-15);
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_max_positions: 8192.0 };
        let plain = rope(128, 500_000.0, RopeScaling::None).frequencies(8);
        let scaled = rope(128, 500_000.0, scaling).frequencies(8);
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[63] - plain[63] / 8.0).abs() < 1e-18);
        assert!(scaled.iter().zip(&plain).all(|(s, p)| s <= p && *s >= p / 8.0 - 1e-18));
    }

    #[test]
    fn the_table_holds_cos_and_sin_of_position_times_frequency() {
        let table = rope(4, 100.0, RopeScaling::Linear { factor: 2.0 }).table(3);
        assert_eq!(table.cos.len(), 6);
        assert_eq!((table.cos[0], table.sin[0]), (1.0, 0.0));
        assert!((table.cos[4] - 1.0f32.cos()).abs() < 1e-6, "position 2, frequency 1 / 2");
        assert!((table.sin[5] - 0.1f32.sin()).abs() < 1e-6, "position 2, frequency 0.1 / 2");
    }

    #[test]
    fn elements_beyond_the_rotary_width_have_an_angle_of_zero() {
        let partial = Rope { rotary_dim: 4, ..rope(8, 100.0, RopeScaling::None) };
        let table = partial.table(2);
        assert_eq!(table.cos[4..], [1f32.cos(), 0.1f32.cos(), 1.0, 1.0]);
        // Pairs are (0, 2) and (1, 3); the elements from 4 on are not rotated.
        let order = partial.head_order().unwrap();
        assert_eq!((0..8).map(|i| order.stored(i)).collect::<Vec<_>>(), [0, 1, 4, 5, 2, 3, 6, 7]);
        let neighbours = Rope { is_interleaved: true, ..partial }.head_order().unwrap();
        assert_eq!((8..16).map(|i| neighbours.stored(i)).collect::<Vec<_>>(), [8, 10, 12, 13, 9, 11, 14, 15]);
    }

    #[test]
    fn long_factors_are_used_if_the_longest_sequence_is_longer_than_the_first_training() {
        let scaling = RopeScaling::Long {
            short_factors: vec![1.0, 2.0],
            long_factors: vec![4.0, 8.0],
            original_max_positions: 16,
            attention_factors: [1.125, 1.25],
        };
        let rope = rope(4, 100.0, scaling);
        assert_eq!((rope.frequencies(16), rope.frequencies(17)), (vec![1.0, 0.05], vec![0.25, 0.0125]));
        assert_eq!((rope.table(16).cos[0], rope.table(17).cos[0]), (1.125, 1.25));
    }
}
