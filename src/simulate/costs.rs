//! The cost model: time of a step, a message and a token.

use engine::{StepLoad, StepPlan};

use crate::SimulateArgs;

/// A part of `--step-ms` that is invalid.
#[derive(Debug, thiserror::Error)]
#[error("--step-ms has `{found}`, expected ROWS:MS with rows that grow, such as 1:2.3,128:4.1")]
pub struct CostsError {
    found: String,
}

/// The time of each activity in seconds. Between measured steps it is interpolated linearly.
#[derive(Debug, Clone)]
pub struct Costs {
    /// Rows of a decode step and its time, ordered by rows.
    steps: Vec<(f64, f64)>,
    prefill_token: f64,
    guess: f64,
    /// Until an idle device begins a step.
    pub(crate) launch: f64,
    /// CPU time of rank 0 for each token.
    pub(crate) token: f64,
    /// Time of rank 0's MPI thread for each message.
    pub(crate) message: f64,
    latency: f64,
    byte: f64,
}

impl Costs {
    /// The cost model of the flags.
    ///
    /// # Errors
    /// When `--step-ms` is invalid.
    pub fn new(args: &SimulateArgs) -> Result<Self, CostsError> {
        let mut steps: Vec<(f64, f64)> = Vec::new();
        for word in args.step_ms.split(',') {
            let wrong = || CostsError { found: word.to_owned() };
            let (rows, ms) = word.split_once(':').ok_or_else(wrong)?;
            let (rows, ms) = (rows.trim().parse::<f64>(), ms.trim().parse::<f64>());
            let (Ok(rows), Ok(ms)) = (rows, ms) else { return Err(wrong()) };
            if !(ms > 0.0 && rows > steps.last().map_or(0.0, |step| step.0)) {
                return Err(wrong());
            }
            steps.push((rows, ms * 1e-3));
        }
        Ok(Self {
            steps,
            prefill_token: 1.0 / args.prefill_per_s,
            guess: args.guess_ms * 1e-3,
            launch: args.launch_us * 1e-6,
            token: args.token_us * 1e-6,
            message: args.message_us * 1e-6,
            latency: args.latency_us * 1e-6,
            byte: 8.0 / (args.gbit * 1e9),
        })
    }

    /// Steps of one row without and with drafts and of 16 rows, which a model measures when it is loaded, with their seconds.
    pub(crate) fn first_steps(&self, has_drafts: bool) -> impl Iterator<Item = (StepLoad, f64)> {
        let decode = |rows: usize, guesses: usize| {
            let load = StepLoad { decode_tokens: rows, decode_positions: 5 * rows, guesses, ..StepLoad::default() };
            (load, self.decode(rows as f64) + guesses as f64 * self.guess)
        };
        let drafted = has_drafts.then(|| [decode(4, 3), decode(3, 2), decode(1, 0)]);
        [decode(1, 0)].into_iter().chain(drafted.into_iter().flatten()).chain([decode(16, 0)])
    }

    /// Seconds that a group takes to compute a plan.
    pub(crate) fn step(&self, plan: &StepPlan) -> f64 {
        let (mut drafts, mut decoded, mut prefilled) = (plan.drafts.iter().peekable(), 0, 0);
        for work in &plan.work {
            let verifies = drafts.next_if(|(row, _)| *row == work.row).is_some();
            *(if verifies || work.num_tokens == 1 { &mut decoded } else { &mut prefilled }) += work.num_tokens;
        }
        let decode = if decoded > 0 || prefilled == 0 { self.decode(f64::from(decoded)) } else { 0.0 };
        let guesses = plan.work.iter().map(|work| work.num_guesses).max().unwrap_or(0);
        let passes = if plan.runs_drafter { guesses.max(1) } else { 0 };
        decode + f64::from(prefilled) * self.prefill_token + f64::from(passes) * self.guess
    }

    fn decode(&self, rows: f64) -> f64 {
        let after = self.steps.iter().position(|&(measured, _)| measured >= rows);
        let (from, to) = match (after, self.steps.as_slice()) {
            (_, [only]) => return only.1,
            (Some(0), steps) => return steps[0].1,
            (Some(at), steps) => (steps[at - 1], steps[at]),
            // Beyond the last measurement, extrapolated from the last two.
            (None, steps) => (steps[steps.len() - 2], steps[steps.len() - 1]),
        };
        from.1 + (to.1 - from.1) * (rows - from.0) / (to.0 - from.0)
    }

    /// Seconds to transfer `bytes` to another node.
    pub(crate) fn flight(&self, bytes: usize) -> f64 {
        self.latency + bytes as f64 * self.byte
    }

    /// Seconds until the last of `others` nodes has a plan of `bytes` that rank 0 sends to them one after another.
    pub(crate) fn broadcast(&self, bytes: f64, others: u32) -> f64 {
        match others {
            0 => 0.0,
            _ => f64::from(others) * (self.message + bytes * self.byte) + self.latency,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_between_measurements_are_interpolated() {
        let costs = Costs::new(&SimulateArgs { step_ms: "1:2,9:4,19:9".into(), ..SimulateArgs::default() }).unwrap();
        for (rows, ms) in [(1.0, 2.0), (5.0, 3.0), (9.0, 4.0), (14.0, 6.5), (21.0, 10.0)] {
            assert!((costs.decode(rows) - ms * 1e-3).abs() < 1e-9, "{rows}");
        }
    }

    #[test]
    fn invalid_steps_are_errors() {
        for words in ["1", "1:x", "8:2,1:3", "1:0"] {
            assert!(Costs::new(&SimulateArgs { step_ms: words.into(), ..SimulateArgs::default() }).is_err(), "{words}");
        }
    }
}
