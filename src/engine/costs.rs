//! The cost model of steps: predicts how long a step takes, and learns from measured steps.

use crate::EngineConfig;

/// Number of coefficients.
const N: usize = 8;

/// Noise of a measured step relative to the longer of its expected and its measured duration, as a standard deviation: at
/// first and at least, and at most.
const NOISE: f64 = 0.05;
const MAX_NOISE: f64 = 0.3;

/// Weight of the newest step in the noise. Surprises do not count.
const NOISE_WEIGHT: f64 = 0.02;

/// A measurement that differs from its prediction by more than this number of standard deviations is a surprise: it
/// counts as if it differed by so many, and does not make the coefficients more certain. A stalled step is one, and the
/// short step after it, whose output was already there.
const MAX_DEVIATIONS: f64 = 3.0;

/// After so many surprises one after another the coefficients count as unknown again: the device has changed.
const MAX_SURPRISES: u32 = 8;

/// Relative change of a coefficient from step to step, as a standard deviation. It determines how fast the model follows
/// a device that becomes slower or faster.
const DRIFT: f64 = 0.005;

/// Largest uncertainty of a coefficient that comes from drift, relative to it. Steps that are all alike do not tell the
/// coefficients apart, and without a limit the next different step would change them at will.
const MAX_DRIFT: f64 = 0.05;

/// Standard deviations of the coefficients before the first measurement, relative to the time of the first step. They
/// span devices from a CPU, where a prompt token takes a twentieth of a step, to a GPU, where it takes a 200th.
const PRIORS: [f64; N] = [1.0, 1.0 / 30.0, 1e-4, 1.0 / 30.0, 1e-6, 1.0, 1.0 / 3.0, 1.0 / 10.0];

/// Weight of the newest step in the mean relative error.
const ERROR_WEIGHT: f64 = 0.05;

/// Prompt tokens that a step with decodes may compute before any were measured.
const FIRST_PROMPT_TOKENS: usize = 64;

/// What determines the time of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepLoad {
    /// Tokens of decodes, drafts included.
    pub decode_tokens: usize,
    /// KV positions that these tokens read, as a mean over the KV groups.
    pub decode_positions: usize,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// KV positions that these tokens read, summed over the tokens, as a mean over the KV groups.
    pub prompt_positions: usize,
    /// Passes of what guesses drafts on the devices: as many as the guesses of the row that has most. The pass of a step that has none
    /// is a part of what tokens of prompts take.
    pub guesses: usize,
    /// Whether it was planned after the output of the step before, so that the devices waited for its plan. Its time counts from that
    /// output.
    pub after_gap: bool,
}

/// The coefficients of the cost model in seconds. A step takes the sum of its [`StepLoad`]'s parts times these.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepCosts {
    /// Any step: mostly the time to read the weights.
    pub step: f64,
    /// A token of a decode.
    pub decode_token: f64,
    /// A KV position that a decode reads.
    pub decode_position: f64,
    /// A token of a prompt.
    pub prompt_token: f64,
    /// A KV position that a token of a prompt reads.
    pub prompt_position: f64,
    /// All experts of a model that has some. A step reads the share that its tokens choose.
    pub experts: f64,
    /// A pass of what guesses drafts on the devices.
    pub guess: f64,
    /// The time from the output of a step until the devices begin the next one, if that one was not planned before.
    pub gap: f64,
}

impl StepCosts {
    /// Names of the coefficients, in the order of [`StepCosts::values`].
    pub const NAMES: [&str; N] =
        ["step", "decode_token", "decode_position", "prompt_token", "prompt_position", "experts", "guess", "gap"];

    /// The coefficients.
    pub fn values(&self) -> [f64; N] {
        let Self { step, decode_token, decode_position, prompt_token, prompt_position, experts, guess, gap } = *self;
        [step, decode_token, decode_position, prompt_token, prompt_position, experts, guess, gap]
    }

    /// Seconds that the tokens of prompts add to steps, without what steps take that have none.
    pub fn of_prompt(&self, load: &StepLoad) -> f64 {
        self.prompt_token * load.prompt_tokens as f64 + self.prompt_position * load.prompt_positions as f64
    }

    fn from_values(values: [f64; N]) -> Self {
        let [step, decode_token, decode_position, prompt_token, prompt_position, experts, guess, gap] = values;
        Self { step, decode_token, decode_position, prompt_token, prompt_position, experts, guess, gap }
    }
}

/// Learns [`StepCosts`] with a Kalman filter, so that a step that is like many before changes little, and the first
/// steps of a new kind change much. No coefficient is negative.
#[derive(Debug, Clone)]
pub(crate) struct CostModel {
    coefficients: [f64; N],
    covariance: [[f64; N]; N],
    /// Mean of the recent predictions' relative errors.
    error: f64,
    /// Noise of the recent steps.
    noise: f64,
    /// Most prompt tokens in a step that was measured.
    largest_prompt: usize,
    is_known: bool,
    /// Number of surprises since the last step that was none.
    num_surprises: u32,
    /// Share of the experts that a token does not choose; 1 for a model without experts.
    unchosen: f64,
}

impl CostModel {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let unchosen = match config.num_experts {
            0 => 1.0,
            all => 1.0 - (config.num_active_experts as f64 / all as f64).min(1.0),
        };
        Self {
            coefficients: [0.0; N],
            covariance: [[0.0; N]; N],
            error: NOISE,
            noise: NOISE,
            largest_prompt: FIRST_PROMPT_TOKENS,
            is_known: false,
            num_surprises: 0,
            unchosen,
        }
    }

    /// Replaces what was learned. The coefficients count as well known.
    pub(crate) fn set(&mut self, costs: StepCosts) {
        (self.coefficients, self.is_known, self.largest_prompt) = (costs.values(), true, usize::MAX / 2);
        self.covariance = [[0.0; N]; N];
        self.error = 0.0;
        for (index, value) in costs.values().into_iter().enumerate() {
            self.covariance[index][index] = (value * NOISE).powi(2);
        }
    }

    /// The coefficients; `None` before the first measurement.
    pub(crate) fn costs(&self) -> Option<StepCosts> {
        self.is_known.then(|| StepCosts::from_values(self.coefficients))
    }

    /// Mean of the recent predictions' relative errors.
    pub(crate) fn error(&self) -> f64 {
        self.error
    }

    /// Most prompt tokens in a step with decodes: twice what was measured, because the model is not to be trusted far
    /// beyond its measurements.
    pub(crate) fn max_prompt_tokens(&self) -> usize {
        2 * self.largest_prompt
    }

    /// Predicted seconds of a step; 0 before the first measurement.
    pub(crate) fn predict(&self, load: &StepLoad) -> f64 {
        dot(&self.coefficients, &self.features(load))
    }

    /// Corrects the coefficients with a step that took `seconds` and for which `predicted` seconds were expected.
    pub(crate) fn learn(&mut self, load: &StepLoad, predicted: Option<f64>, seconds: f64) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        if let Some(predicted) = predicted {
            let error = ((predicted - seconds).abs() / seconds).min(1.0);
            self.error += ERROR_WEIGHT * (error - self.error);
        }
        if !self.is_known || self.num_surprises == MAX_SURPRISES {
            self.forget(load, seconds);
        }
        self.correct(&self.features(load), seconds);
        self.is_known = true;
        self.largest_prompt = self.largest_prompt.max(load.prompt_tokens);
    }

    /// Makes the coefficients uncertain, relative to a step that took `seconds`.
    fn forget(&mut self, load: &StepLoad, seconds: f64) {
        let predicted = self.predict(load);
        let scale = if predicted > 0.0 { seconds / predicted } else { 0.0 };
        self.coefficients.iter_mut().for_each(|coefficient| *coefficient *= scale);
        self.covariance = [[0.0; N]; N];
        for (index, prior) in PRIORS.into_iter().enumerate() {
            self.covariance[index][index] = (prior * seconds).powi(2);
        }
        self.num_surprises = 0;
    }

    fn correct(&mut self, features: &[f64; N], seconds: f64) {
        for (index, feature) in features.iter().enumerate() {
            let (coefficient, variance) = (self.coefficients[index], &mut self.covariance[index][index]);
            if *feature > 0.0 && *variance < (MAX_DRIFT * coefficient).powi(2) {
                *variance += (DRIFT * coefficient).powi(2);
            }
        }
        let predicted = dot(&self.coefficients, features);
        let spread = self.covariance.map(|row| dot(&row, features));
        let scale = predicted.max(seconds);
        let noise = self.noise * scale;
        let variance = dot(&spread, features) + noise * noise;
        if !(variance.is_finite() && variance > 0.0) {
            return;
        }
        let limit = MAX_DEVIATIONS * variance.sqrt();
        let difference = seconds - predicted;
        let is_surprise = difference.abs() > limit;
        if !is_surprise && self.is_known {
            // The mean deviation of a normal distribution is 0.8 standard deviations.
            let deviation = difference.abs() / scale / 0.8;
            self.noise = (self.noise + NOISE_WEIGHT * (deviation - self.noise)).clamp(NOISE, MAX_NOISE);
        }
        let difference = difference.clamp(-limit, limit);
        for (index, coefficient) in self.coefficients.iter_mut().enumerate() {
            *coefficient = (*coefficient + spread[index] / variance * difference).max(0.0);
        }
        // Where a coefficient would have become negative, the others were to become larger. They keep the corrected sum.
        let corrected = predicted + dot(&spread, features) / variance * difference;
        let found = dot(&self.coefficients, features);
        if found > 0.0 && corrected > 0.0 {
            self.coefficients.iter_mut().for_each(|coefficient| *coefficient *= corrected / found);
        }
        self.num_surprises = if is_surprise { self.num_surprises + 1 } else { 0 };
        if is_surprise {
            return;
        }
        for row in 0..N {
            for column in 0..N {
                self.covariance[row][column] -= spread[row] * spread[column] / variance;
            }
            self.covariance[row][row] = self.covariance[row][row].max(0.0);
        }
    }

    fn features(&self, load: &StepLoad) -> [f64; N] {
        let experts = match self.unchosen {
            1.0 => 0.0,
            unchosen => 1.0 - unchosen.powi((load.decode_tokens + load.prompt_tokens).min(i32::MAX as usize) as i32),
        };
        [
            1.0,
            load.decode_tokens as f64,
            load.decode_positions as f64,
            load.prompt_tokens as f64,
            load.prompt_positions as f64,
            experts,
            load.guesses as f64,
            f64::from(u8::from(load.after_gap)),
        ]
    }
}

fn dot(left: &[f64; N], right: &[f64; N]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests;
