//! Rotary position embedding: frequencies with scaling, and the table of cosines and sines.
//!
//! The scaling rules are those of `rope_scaling` in checkpoints: `linear` (Chen et al. 2023), `llama3` (Llama 3.1 model
//! card), `yarn` (Peng et al. 2023). `dynamic` changes nothing for sequences up to `max_position_embeddings`, which is
//! the maximum length here.

use std::f64::consts::PI;

use ops::RopeTable;

use crate::ModelError;
use crate::fields::Fields;

/// Parameters of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// How frequencies are scaled for contexts longer than those of the first training.
    pub scaling: RopeScaling,
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
}

impl Rope {
    /// Reads `rope_theta`, and one of `rope_parameters`, the older `rope_scaling`, or InternLM's `rotary`.
    pub(crate) fn read(fields: &Fields, max_positions: usize) -> Result<Self, ModelError> {
        let nested = match fields.object("rope_parameters")? {
            Some(nested) => Some(nested),
            None => match fields.object("rope_scaling")? {
                Some(nested) => Some(nested),
                None => fields.object("rotary")?,
            },
        };
        let mut theta = fields.positive("rope_theta")?;
        let mut scaling = RopeScaling::None;
        if let Some(nested) = nested {
            theta = nested.positive("rope_theta")?.or(nested.positive("base")?).or(theta);
            scaling = RopeScaling::read(&nested, max_positions as f64)?;
        }
        Ok(Self { theta: theta.unwrap_or(10_000.0), scaling })
    }

    /// Radians per position of each of the `head_dim / 2` pairs.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / head_dim as f64);
        let pairs = 0..head_dim / 2;
        match self.scaling {
            RopeScaling::None => pairs.map(plain).collect(),
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
                    head_dim as f64 * (original_max_positions / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (dim_of(beta_fast), dim_of(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(head_dim as f64 - 1.0));
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

    /// cos and sin for positions `0..max_positions`.
    ///
    /// Angles are rounded to f32 before cos and sin are computed, like in the checkpoints' reference code.
    pub fn table(&self, head_dim: usize, max_positions: usize) -> RopeTable {
        let frequencies: Vec<f32> = self.frequencies(head_dim).into_iter().map(|f| f as f32).collect();
        let magnitude = match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        };
        let entries = max_positions * frequencies.len();
        let mut table = RopeTable { cos: Vec::with_capacity(entries), sin: Vec::with_capacity(entries) };
        for position in 0..max_positions {
            for frequency in &frequencies {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                table.cos.push((cos * magnitude) as f32);
                table.sin.push((sin * magnitude) as f32);
            }
        }
        table
    }
}

impl RopeScaling {
    fn read(fields: &Fields, max_positions: f64) -> Result<Self, ModelError> {
        let name = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
        let original = fields.positive("original_max_position_embeddings")?;
        match fields.text(name)? {
            None | Some("default" | "dynamic" | "origin") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: fields.required_positive("factor")? }),
            Some("llama3") => Ok(Self::Llama3 {
                factor: fields.required_positive("factor")?,
                low: fields.required_positive("low_freq_factor")?,
                high: fields.required_positive("high_freq_factor")?,
                original_max_positions: fields.required_positive("original_max_position_embeddings")?,
            }),
            Some("yarn") => {
                let factor = fields.required_positive("factor")?;
                Ok(Self::Yarn {
                    factor,
                    beta_fast: fields.positive("beta_fast")?.unwrap_or(32.0),
                    beta_slow: fields.positive("beta_slow")?.unwrap_or(1.0),
                    original_max_positions: original.unwrap_or(max_positions),
                    attention_factor: yarn_attention_factor(fields, factor)?,
                    truncate: fields.flag("truncate", true)?,
                })
            }
            Some(other) => Err(fields.wrong(
                name,
                "`default`, `linear`, `dynamic`, `llama3` or `yarn`",
                &serde_json::Value::from(other),
            )),
        }
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

    #[test]
    fn plain_frequencies_fall_from_one_to_the_inverse_of_theta() {
        let rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
        let frequencies = rope.frequencies(64);
        assert_eq!(frequencies[0], 1.0);
        assert!((frequencies[31] - 10_000f64.powf(-62.0 / 64.0)).abs() < 1e-15);
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_max_positions: 8192.0 };
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(128);
        let scaled = Rope { theta: 500_000.0, scaling }.frequencies(128);
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[63] - plain[63] / 8.0).abs() < 1e-18);
        assert!(scaled.iter().zip(&plain).all(|(s, p)| s <= p && *s >= p / 8.0 - 1e-18));
    }

    #[test]
    fn the_table_holds_cos_and_sin_of_position_times_frequency() {
        let table = Rope { theta: 100.0, scaling: RopeScaling::Linear { factor: 2.0 } }.table(4, 3);
        assert_eq!(table.cos.len(), 6);
        assert_eq!((table.cos[0], table.sin[0]), (1.0, 0.0));
        assert!((table.cos[4] - 1.0f32.cos()).abs() < 1e-6, "position 2, frequency 1 / 2");
        assert!((table.sin[5] - 0.1f32.sin()).abs() < 1e-6, "position 2, frequency 0.1 / 2");
    }
}
