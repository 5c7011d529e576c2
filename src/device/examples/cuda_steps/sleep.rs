//! Sleep and wake: what they free, how long they take, and whether tokens stay the same.

use std::time::Instant;

use engine::{RowId, SampledToken, SamplingParams, TokenId};
use ops::{Device, DeviceError, StepInputs};

use crate::inputs::{BLOCK, prompt, step};
use crate::{AnyError, Bench};

const ROWS: usize = 6;
const NEW_TOKENS: usize = 32;

fn prompt_len(row: usize) -> usize {
    5 + 61 * row
}

impl Bench {
    fn sampled(&mut self, inputs: StepInputs, tokens: &mut Vec<SampledToken>) -> Result<(), DeviceError> {
        self.run(inputs)?;
        tokens.extend(self.device.collect(true)?.unwrap_or_default());
        Ok(())
    }

    /// Greedy tokens of some prompts, and the seconds until the first of them.
    fn tokens(&mut self) -> Result<(Vec<SampledToken>, f64), DeviceError> {
        let started = Instant::now();
        let blocks = self.blocks(ROWS, 2048 / BLOCK);
        for row in 0..ROWS {
            let prompt: Vec<TokenId> = prompt(row, prompt_len(row));
            let len = prompt.len() as u32;
            self.device.join_row(RowId(row as u32), &prompt, len, &SamplingParams::default())?;
        }
        let mut tokens = Vec::new();
        let work: Vec<_> = (0..ROWS).map(|row| (row, 0..prompt_len(row))).collect();
        self.sampled(step(0, &work, blocks), &mut tokens)?;
        let first = started.elapsed().as_secs_f64();
        for number in 1..NEW_TOKENS {
            let position = |row| prompt_len(row) + number - 1;
            let work: Vec<_> = (0..ROWS).map(|row| (row, position(row)..position(row) + 1)).collect();
            self.sampled(step(number as u64, &work, blocks), &mut tokens)?;
        }
        Ok((tokens, first))
    }

    /// Sleeps and wakes twice. Fails if tokens differ afterwards.
    pub fn check_sleep(&mut self, print: impl Fn(String)) -> Result<(), AnyError> {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let (before, first) = self.tokens()?;
        print(format!("awake: {:.2} GiB free, first token after {first:.3} s", gib(self.device.free_bytes()?)));
        for _ in 0..2 {
            let started = Instant::now();
            self.device.sleep()?;
            let (seconds, host) = (started.elapsed().as_secs_f64(), gib(self.device.sleep_bytes()));
            let free = gib(self.device.free_bytes()?);
            print(format!("asleep after {seconds:.3} s: {free:.2} GiB free, {host:.2} GiB on the host"));
            let started = Instant::now();
            self.device.wake()?;
            let woken = started.elapsed().as_secs_f64();
            let (after, first) = self.tokens()?;
            print(format!("awake after {woken:.3} s, first token {first:.3} s later"));
            if after != before {
                return Err("tokens differ after a sleep".into());
            }
        }
        print(format!("{} tokens of {ROWS} prompts are the same after each sleep", before.len()));
        Ok(())
    }
}
