//! Whether a plan has drafts: when they give more tokens in the time that they take than steps without them.
//!
//! A step without drafts is planned while the one before it runs. Behind a step with drafts, nothing is planned until its output is
//! there, so the devices wait for rank 0: its price is the time of its drafts and this gap. All sequences pay the gap, whether they
//! have drafts or not, because a step takes mostly the same time with fewer rows. So all of them decide together.
//!
//! While there are no drafts, guesses are still compared with the tokens that come, which costs no gap: how often guesses are right is
//! known when the load becomes lower or the text another one. A [`Drafter`](crate::Drafter) guesses before each plan, devices in
//! [`NUM_TRIALS`] steps before each multiple of [`STEPS_BETWEEN_MEASUREMENTS`]. At these multiples, and in the first
//! [`NUM_FIRST_STEPS`] steps, there are drafts anyway, because the cost model learns what they cost from steps that have them.
//!
//! In all other steps without drafts, what guesses on the devices does not run, unless the step has tokens of prompts. So it lacks keys
//! and values of generated tokens, and reads what its KV blocks held before at their positions: its guesses are worse, and no token
//! depends on them. Trials come one after another, so that the last of them have keys and values of the newest tokens, as guesses have
//! once there are drafts again.

use crate::TokenId;
use crate::costs::{StepCosts, StepLoad};
use crate::draft::Acceptance;
use crate::engine::Engine;
use crate::sequence::Sequence;
use crate::slot::Slot;

/// Number of steps after which sequences have drafts that seem not to be worth their time.
const STEPS_BETWEEN_MEASUREMENTS: u64 = 512;

/// Number of steps before these in which devices guess a token for sequences without drafts.
const NUM_TRIALS: u64 = 16;

/// Number of steps with drafts after the start of a model, whatever they cost: little is known of them before.
const NUM_FIRST_STEPS: u32 = 32;

/// Drafts are measured while they may be worth their time if their price is this number of times too high.
const MAX_ERROR_OF_PRICE: f64 = 2.0;

/// Which guesses a plan has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Drafting {
    /// None.
    #[default]
    Off,
    /// The devices guess one token, which is compared with the token that comes.
    Trial,
    /// Guesses that have arrived are verified, and the devices guess for the next plan, which waits for them: so many tokens at most.
    On(usize),
}

/// What is known of the drafts of all sequences.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DraftHistory {
    /// How often those of recent sequences were right.
    pub(crate) acceptance: Acceptance,
    /// Number of steps that could have some.
    pub(crate) num_steps: u32,
}

/// What drafts cost, as shares of the time of a step without them.
#[derive(Debug, Clone, Copy)]
struct Price {
    /// A further token, if each row has one.
    token: f64,
    /// A pass in which devices guess. A step without guesses has none.
    guess: f64,
    /// The gap behind a step with drafts.
    gap: f64,
}

/// What drafts of all rows give beyond their price, in tokens of a step without drafts.
#[derive(Debug, Default)]
struct Gains {
    /// Of the first draft of each row, of the second one and so on.
    of_drafts: Vec<f64>,
    /// What the gap behind the step takes.
    gap: f64,
    /// The gain if all drafts were right, at a price that may be too high.
    largest: f64,
}

impl Gains {
    /// Adds a row that has at most `most` drafts.
    fn add(&mut self, acceptance: &Acceptance, most: usize, price: Price) {
        self.gap += price.gap;
        self.largest += most as f64 * (1.0 - (price.token + price.guess) / MAX_ERROR_OF_PRICE) - price.gap;
        for (total, gain) in self.of_drafts.iter_mut().zip(acceptance.gains(price.token).take(most)) {
            *total += gain.max(0.0);
        }
        self.of_drafts.iter_mut().for_each(|total| *total -= price.guess);
    }

    /// The number of drafts with the largest gain of all rows together, and this gain without the gap.
    fn best(&self) -> (usize, f64) {
        let (mut total, mut best) = (0.0, (0, 0.0));
        for (index, gain) in self.of_drafts.iter().enumerate() {
            total += gain;
            if total > best.1 {
                best = (index + 1, total);
            }
        }
        best
    }
}

impl Engine {
    /// Decides whether the next plan has drafts. A drafter on rank 0 guesses meanwhile, from the tokens that are settled.
    pub(crate) fn weigh_drafts(&mut self) -> Drafting {
        let mut budget = if self.config.max_drafts > 0 { self.draft_budget() } else { 0 };
        if budget == 0 {
            return Drafting::Off;
        }
        let most = self.config.max_drafts;
        let mut gains = Gains { of_drafts: vec![0.0; most], ..Gains::default() };
        let (mut may_draft, mut can_draft) = (self.running.is_empty(), false);
        if self.running.is_empty() {
            gains.add(&self.draft_history.acceptance, most, self.price_of_drafts(0));
        }
        for index in 0..self.running.len() {
            let (_, slot) = self.running[index];
            let price = self.price_of_drafts(self.sequences[slot].num_computed);
            let most = match self.config.guesses_on_device {
                true => self.sequences[slot].max_drafts,
                false => self.look_up(slot, price),
            };
            let most = if self.has_state_for_drafts(slot) { most.min(budget) } else { 0 };
            gains.add(&self.sequences[slot].acceptance, most, price);
            budget -= self.num_worth(slot, price).min(most);
            may_draft |= self.sequences[slot].max_drafts > 0;
            can_draft |= most > 0;
        }
        let (best, gain) = gains.best();
        let is_new = self.draft_history.num_steps < NUM_FIRST_STEPS;
        if self.config.forced_acceptance.is_some() && may_draft {
            Drafting::On(most)
        } else if gain > gains.gap {
            Drafting::On(best)
        } else if can_draft && (is_new || gains.largest > 0.0 && self.is_measurement_due()) {
            Drafting::On(1)
        } else if gains.largest > 0.0 && self.is_trial_due() && self.config.guesses_on_device {
            Drafting::Trial
        } else {
            Drafting::Off
        }
    }

    /// Number of tokens that the devices guess behind what this plan samples of a sequence: as many as the next plan may verify, and as
    /// are worth their time.
    pub(crate) fn num_guesses(&self, slot: Slot, drafting: Drafting) -> u32 {
        if !self.config.guesses_on_device || drafting == Drafting::Off {
            return 0;
        }
        let sequence = &self.sequences[slot];
        // At least one token comes before them, and one after.
        let most = sequence.max_drafts.min(sequence.max_len.saturating_sub(sequence.num_planned() + 2));
        let worth = match drafting {
            Drafting::On(most) => self.num_drafts(slot).min(most),
            Drafting::Off | Drafting::Trial => 0,
        };
        worth.max(usize::from(self.is_trial_due())).min(most) as u32
    }

    /// Number of drafts of a sequence that are worth their time.
    pub(crate) fn num_drafts(&self, slot: Slot) -> usize {
        self.num_worth(slot, self.price_of_drafts(self.sequences[slot].num_computed))
    }

    fn num_worth(&self, slot: Slot, price: Price) -> usize {
        let Sequence { max_drafts: most, ref acceptance, .. } = self.sequences[slot];
        let least = if self.is_measurement_due() { 1 } else { 0 };
        match self.config.forced_acceptance {
            Some(_) => most,
            None => acceptance.num_worth(most, price.token).max(least).min(most),
        }
    }

    /// Guesses of devices are drafts in the step after the one that asks for them.
    fn is_measurement_due(&self) -> bool {
        self.next_step % STEPS_BETWEEN_MEASUREMENTS <= 1 || self.draft_history.num_steps < NUM_FIRST_STEPS
    }

    fn is_trial_due(&self) -> bool {
        self.next_step % STEPS_BETWEEN_MEASUREMENTS >= STEPS_BETWEEN_MEASUREMENTS - NUM_TRIALS
    }

    /// Guesses what follows the settled tokens of a sequence. Returns how many of the guesses are worth their time as drafts.
    fn look_up(&mut self, slot: Slot, price: Price) -> usize {
        let worth = self.num_worth(slot, price);
        let sequence = &mut self.sequences[slot];
        if sequence.num_in_flight > 0 && !sequence.guesses.is_empty() {
            return worth.min(sequence.guesses.len());
        }
        sequence.guesses.clear();
        let most = sequence.max_drafts.min(sequence.max_len.saturating_sub(sequence.num_planned() + 1));
        if most == 0 || price.token >= MAX_ERROR_OF_PRICE || sequence.is_prefilling() {
            return 0;
        }
        // One of them is compared with the next token, if there are no drafts.
        self.drafter.draft(&sequence.tokens, most.min(worth.max(1)), &mut sequence.guesses);
        worth.min(sequence.guesses.len())
    }

    /// The price of drafts where each running row, of which one is at `position`, has them; 0 before the first measurement.
    fn price_of_drafts(&self, position: usize) -> Price {
        let rows = self.running.len().max(1);
        let positions = rows * self.config.positions_read(position);
        let [one, two] = [1, 2].map(|each| {
            let (decode_tokens, decode_positions) = (each * rows, each * positions);
            self.costs.predict(&StepLoad { decode_tokens, decode_positions, ..StepLoad::default() })
        });
        let share = |seconds: f64| if one > 0.0 { seconds / one } else { 0.0 };
        let StepCosts { guess, gap, .. } = self.costs.costs().unwrap_or_default();
        Price {
            token: share(two - one),
            guess: if self.config.guesses_on_device { share(guess) } else { 0.0 },
            gap: if self.plans_ahead() { share(gap) } else { 0.0 },
        }
    }

    /// Whether a sequence may have two steps in flight.
    pub(crate) fn plans_ahead(&self) -> bool {
        self.config.num_stages == 1 && self.config.max_in_flight > 1
    }
}

impl Sequence {
    /// Number of its tokens once the steps in flight are settled. None of them has drafts.
    pub(crate) fn num_planned(&self) -> usize {
        self.tokens.len() + self.num_in_flight
    }

    /// Number of its tokens that rank 0 has not sent to the workers.
    pub(crate) fn num_unsent(&self) -> usize {
        self.tokens.len() - self.num_sent
    }

    /// Learns whether a guess at the next token was right, which is no draft.
    pub(crate) fn compare_guess(&mut self, token: TokenId) {
        if let Some(guess) = self.guesses.first() {
            self.acceptance.learn(usize::from(*guess == token), 1);
            self.guesses.clear();
        }
    }
}
