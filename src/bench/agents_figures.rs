//! The figures of `trireme bench agents`.

use std::time::Duration;

use client::ClientError;
use launcher::scrape::Metrics;
use serde::Serialize;

use crate::outcome::Outcome;
use crate::percentiles::Percentiles;

/// What the server counts of its prefix cache, all models together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tier {
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// Prompt tokens that the host had, since the start.
    host_tokens: f64,
    /// Host memory in use.
    pub used_bytes: f64,
    /// Host memory in all.
    pub limit_bytes: f64,
}

impl Tier {
    /// `None` where the server does not publish them.
    pub(crate) fn of(metrics: &Metrics) -> Option<Self> {
        let values = |name| metrics.all(name).map(|sample| sample.value).collect::<Vec<_>>();
        let sum = |name| values(name).iter().sum::<f64>();
        let block_tokens = values("trireme_llm_kv_block_tokens").first().map(|&tokens| tokens as usize);
        Some(Self {
            block_tokens: block_tokens.filter(|&tokens| tokens > 0)?,
            host_tokens: sum("trireme_llm_prefix_cache_host_tokens_total"),
            used_bytes: sum("trireme_llm_host_cache_used_bytes"),
            limit_bytes: sum("trireme_llm_host_cache_limit_bytes"),
        })
    }

    /// Prompt tokens that the host had between two readings.
    pub(crate) fn host_tokens_since(&self, before: &Self) -> usize {
        (self.host_tokens - before.host_tokens).max(0.0) as usize
    }
}

/// The figures of one round: a turn of all conversations, or their branches.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct RoundFigures {
    pub name: String,
    pub requests: usize,
    pub errors: usize,
    /// The first error.
    pub error: Option<String>,
    pub seconds: f64,
    /// Tokens of the prompts. Failed requests are left out here and below.
    pub prompt_tokens: usize,
    /// Tokens at the beginning of prompts that the server had computed before.
    pub repeated_tokens: usize,
    /// The same in full KV blocks; `None` if the size of a block is not known.
    pub repeated_full_block_tokens: Option<usize>,
    /// Those of the repeated tokens that the prefix cache had; `None` if the server does not say.
    pub cached_tokens: Option<usize>,
    /// Tokens that it had in host memory; `None` without `--metrics`.
    pub host_tokens: Option<usize>,
    #[serde(flatten)]
    pub hits: Hits,
    pub time_to_first_token_ms: Percentiles,
}

impl RoundFigures {
    /// Those of requests of which the server had computed `repeated` tokens before.
    pub(crate) fn of(name: String, outcomes: &[Outcome], repeated: &[usize], block_tokens: Option<usize>) -> Self {
        let successful = || outcomes.iter().zip(repeated).filter(|(outcome, _)| outcome.error.is_none());
        let cached = successful().map(|(outcome, &repeated)| Some(outcome.cached_tokens?.min(repeated)));
        let mut first: Vec<Duration> = successful().filter_map(|(outcome, _)| outcome.time_to_first).collect();
        let full = |block: usize| successful().map(|(_, &repeated)| repeated / block * block).sum();
        let round = Self {
            name,
            requests: outcomes.len(),
            errors: outcomes.len() - successful().count(),
            error: outcomes.iter().find_map(|outcome| outcome.error.clone()),
            prompt_tokens: successful().map(|(outcome, _)| outcome.prompt_tokens).sum(),
            repeated_tokens: successful().map(|(_, repeated)| repeated).sum(),
            repeated_full_block_tokens: block_tokens.map(full),
            cached_tokens: cached.sum(),
            time_to_first_token_ms: Percentiles::of(&mut first),
            ..Self::default()
        };
        Self { hits: Hits::of([&round]), ..round }
    }

    fn row(&self) -> String {
        let Self { name, requests, prompt_tokens, repeated_tokens, cached_tokens, host_tokens, .. } = self;
        let count = |count: &Option<usize>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let Percentiles { p50, p99, .. } = self.time_to_first_token_ms;
        format!(
            "{name:<9} {requests:>8} {prompt_tokens:>10} {repeated_tokens:>10} {:>10} {:>10} {:>8} {:>11} {p50:>11.1} {p99:>11.1}\n",
            count(cached_tokens),
            count(host_tokens),
            percent(self.hits.hit_rate),
            percent(self.hits.full_block_hit_rate),
        )
    }
}

const HEAD: &str =
    "round     requests     prompt   repeated     cached    of host hit rate full blocks ttft p50 ms ttft p99 ms\n";

/// Shares of the repeated tokens that the prefix cache had, in rounds together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Hits {
    /// Of all of them; `None` if there are none, or the server does not say.
    pub hit_rate: Option<f64>,
    /// Of those in full blocks.
    pub full_block_hit_rate: Option<f64>,
}

impl Hits {
    pub(crate) fn of<'a>(rounds: impl IntoIterator<Item = &'a RoundFigures>) -> Self {
        let (mut cached, mut repeated, mut full) = (Some(0), 0, Some(0));
        for round in rounds {
            cached = cached.zip(round.cached_tokens).map(|(sum, more)| sum + more);
            repeated += round.repeated_tokens;
            full = full.zip(round.repeated_full_block_tokens).map(|(sum, more)| sum + more);
        }
        let rate = |of: usize| cached.filter(|_| of > 0).map(|cached| cached as f64 / of as f64);
        Self { hit_rate: rate(repeated), full_block_hit_rate: full.and_then(rate) }
    }

    fn text(&self) -> String {
        let of_full_blocks = |rate| format!(", and {} of those in full blocks", percent(Some(rate)));
        percent(self.hit_rate) + &self.full_block_hit_rate.map_or_else(String::new, of_full_blocks)
    }
}

/// All figures.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    pub model: String,
    pub conversations: u32,
    pub turns: u32,
    /// Tokens of the last prompt of a conversation.
    pub tokens: u32,
    pub concurrency: u32,
    pub seconds: f64,
    /// Tokens of a KV block; `None` without `--metrics`, as the bytes.
    pub block_tokens: Option<usize>,
    /// Host memory in use in the end.
    pub host_used_bytes: Option<f64>,
    /// Host memory in all.
    pub host_limit_bytes: Option<f64>,
    /// Of the first round, whose prompts repeat the shared beginning alone.
    pub first_turn: Hits,
    /// Of the rounds after the first.
    #[serde(flatten)]
    pub hits: Hits,
    pub rounds: Vec<RoundFigures>,
}

impl Figures {
    pub(crate) fn text(&self) -> String {
        let Self { model, conversations, turns, tokens, concurrency, seconds, .. } = self;
        let mut text = format!(
            "{model}: {conversations} conversations of {turns} turns up to {tokens} tokens, {concurrency} in flight, {seconds:.1} s\n"
        );
        text += HEAD;
        self.rounds.iter().for_each(|round| text += &round.row());
        text += &format!("of the shared beginning the cache had in the first turn {}\n", self.first_turn.text());
        text += &format!("of the repeated tokens after the first turn the cache had {}", self.hits.text());
        if let Some((used, limit)) = self.host_used_bytes.zip(self.host_limit_bytes) {
            let gib = |bytes: f64| bytes / f64::from(1 << 30);
            text += &format!("\nhost memory in use: {:.2} of {:.2} GiB", gib(used), gib(limit));
        }
        let error = self.rounds.iter().find_map(|round| round.error.as_ref());
        let errors: usize = self.rounds.iter().map(|round| round.errors).sum();
        text + &error.map_or_else(String::new, |error| format!("\n{errors} requests failed, for example: {error}"))
    }

    /// # Errors
    /// When every request failed.
    pub(crate) fn check(&self) -> Result<(), ClientError> {
        match self.rounds.iter().all(|round| round.errors == round.requests) {
            true => Err(ClientError::Usage("every request failed".into())),
            false => Ok(()),
        }
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Prompt;

    fn outcome(prompt_tokens: usize, cached_tokens: Option<usize>) -> Outcome {
        let prompt = Prompt { ids: vec![1; prompt_tokens], ..Prompt::default() };
        Outcome { cached_tokens, ..Outcome::begin(&prompt, Duration::ZERO) }
    }

    #[test]
    fn hits_are_shares_of_repeated_tokens_and_of_full_blocks() {
        let outcomes = [outcome(100, Some(80)), outcome(60, Some(32))];
        let round = RoundFigures::of("turn 2".to_owned(), &outcomes, &[90, 40], Some(16));
        assert_eq!((round.prompt_tokens, round.repeated_tokens, round.cached_tokens), (160, 130, Some(112)));
        assert_eq!(round.repeated_full_block_tokens, Some(80 + 32));
        assert_eq!(round.hits, Hits { hit_rate: Some(112.0 / 130.0), full_block_hit_rate: Some(1.0) });
        // A row is as wide as its head.
        assert_eq!(round.row().len(), HEAD.len());
        assert!(round.row().contains("  86.15 %    100.00 %"), "{}", round.row());
    }

    #[test]
    fn failed_requests_and_servers_that_do_not_say_are_left_out() {
        let failed = Outcome { error: Some("lost".to_owned()), ..outcome(100, None) };
        let round = RoundFigures::of("turn 2".to_owned(), &[failed, outcome(60, Some(32))], &[90, 40], None);
        assert_eq!((round.requests, round.errors, round.prompt_tokens, round.cached_tokens), (2, 1, 60, Some(32)));
        let unknown = RoundFigures::of("turn 2".to_owned(), &[outcome(60, None)], &[40], None);
        assert_eq!(Hits::of([&unknown, &round]), Hits::default());
        assert_eq!(round.hits.hit_rate, Some(0.8));
    }

    #[test]
    fn the_first_turn_has_a_line_of_its_own() {
        let of = |name: &str, cached, repeated| {
            RoundFigures::of(name.to_owned(), &[outcome(100, Some(cached))], &[repeated], Some(16))
        };
        let rounds = vec![of("turn 1", 32, 40), of("turn 2", 80, 90)];
        let figures = Figures {
            model: "m".to_owned(),
            conversations: 1,
            turns: 2,
            tokens: 100,
            concurrency: 1,
            seconds: 1.0,
            block_tokens: Some(16),
            host_used_bytes: None,
            host_limit_bytes: None,
            first_turn: Hits::of(rounds.iter().take(1)),
            hits: Hits::of(rounds.iter().skip(1)),
            rounds,
        };
        let text = figures.text();
        let lines: Vec<&str> = text.lines().rev().take(2).collect();
        assert_eq!(
            lines,
            [
                "of the repeated tokens after the first turn the cache had 88.89 %, and 100.00 % of those in full blocks",
                "of the shared beginning the cache had in the first turn 80.00 %, and 100.00 % of those in full blocks",
            ]
        );
    }

    #[test]
    fn counters_of_all_models_are_summed_between_two_readings() {
        let tier = |tokens: u32| {
            Tier::of(&Metrics::parse(&format!(
                "trireme_llm_kv_block_tokens{{model=\"m\"}} 16\n\
                 trireme_llm_prefix_cache_host_tokens_total{{model=\"m\"}} {tokens}\n\
                 trireme_llm_prefix_cache_host_tokens_total{{model=\"n\"}} 10\n"
            )))
        };
        let (before, after) = (tier(32).unwrap(), tier(64).unwrap());
        assert_eq!((after.block_tokens, after.host_tokens_since(&before)), (16, 32));
        assert_eq!(Tier::of(&Metrics::default()), None);
    }
}
