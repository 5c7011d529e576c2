//! `trireme bench agents`: conversations of agents, whose prompts repeat all that was said before, and branches of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use client::ClientError;
use futures::StreamExt;
use indicatif::ProgressBar;
use serde_json::{Map, Value};

use crate::agents_figures::{Figures, Hits, RoundFigures, Tier};
use crate::dataset::Prompt;
use crate::files::{print_text, write_json};
use crate::metrics;
use crate::outcome::{Outcome, Sampling};
use crate::progress;
use crate::random::Random;
use crate::target::{Protocol, Target};

/// Conversations of agents that grow turn by turn, and branches of them: what the prefix cache has, and times to first token
#[derive(Debug, Clone, Args)]
pub struct AgentsArgs {
    /// Address of the server's HTTP port, with OpenAI's `/v1/completions` for prompts of token ids
    #[arg(value_name = "ADDR")]
    server_addr: String,
    /// Conversations, which take their turns in rounds: each has its next turn once all have had the one before
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    conversations: u32,
    /// Turns of a conversation
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Tokens of the prompt of the last turn
    #[arg(long, default_value_t = 80_000, value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    tokens: u32,
    /// Tokens of the prompt of the first turn; the turns after it add equal numbers [default: tokens / turns]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    first_tokens: Option<u32>,
    /// Tokens at the beginning that all conversations share, as a system prompt with its tools
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(0..=1 << 22))]
    system_tokens: u32,
    /// Tokens to generate in each turn; what a turn adds beside them stands for results of tools
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    output_tokens: u32,
    /// Branches of each conversation: requests that continue one of its turns in another way, after the last round
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=1000))]
    branches: u32,
    /// Requests in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// Name of the model [default: the first one that the server lists]
    #[arg(short, long)]
    model: Option<String>,
    /// Address of the server's metrics, to tell hits on the device from hits on the host
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,
    /// Seed of the tokens; a server that has seen the same seed has the prompts in its cache
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the figures as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl AgentsArgs {
    fn first_tokens(&self) -> u32 {
        self.first_tokens.unwrap_or(self.tokens / self.turns)
    }

    /// Tokens of the prompt of a turn, counted from 0.
    fn prompt_tokens(&self, turn: u32) -> usize {
        let (first, later) = (u64::from(self.first_tokens()), u64::from(self.turns - 1).max(1));
        (first + (u64::from(self.tokens) - first) * u64::from(turn) / later) as usize
    }

    fn check(&self) -> Result<(), ClientError> {
        let Self { tokens, turns, system_tokens, output_tokens, .. } = self;
        let first = self.first_tokens();
        if first <= *system_tokens || first > *tokens {
            let words = format!(
                "the first prompt has {first} tokens: more than --system-tokens ({system_tokens}) and at most --tokens \
                 ({tokens}) are needed; see --first-tokens"
            );
            return Err(ClientError::Usage(words));
        }
        let added = (tokens - first) / (turns - 1).max(1);
        match *turns > 1 && added <= *output_tokens {
            true => Err(ClientError::Usage(format!(
                "a turn adds {added} tokens, of which {output_tokens} are its answer (--output-tokens): raise --tokens, or \
                 lower --turns"
            ))),
            false => Ok(()),
        }
    }
}

/// A conversation so far.
struct Conversation {
    /// What the next prompt begins with.
    ids: Vec<u32>,
    /// How many of `ids` the server has computed.
    num_computed: usize,
    /// `num_computed` after each turn.
    ends: Vec<usize>,
}

/// A request of a conversation.
struct Turn {
    prompt: Prompt,
    /// Tokens at the beginning of the prompt that the server has computed before.
    num_repeated: usize,
}

impl Conversation {
    fn new(system: &[u32]) -> Self {
        Self { ids: system.to_vec(), num_computed: 0, ends: Vec::new() }
    }

    /// The next turn, with a prompt of `len` tokens.
    fn next(&mut self, len: usize, args: &AgentsArgs, random: &mut Random) -> Turn {
        self.ids.extend(new_tokens(len.saturating_sub(self.ids.len()), random));
        Turn { prompt: prompt(self.ids.clone(), args), num_repeated: self.num_computed }
    }

    /// Takes the answer of a turn. Its last token is not computed before the next turn.
    fn take(&mut self, outcome: &Outcome, args: &AgentsArgs, random: &mut Random) {
        if outcome.error.is_none() {
            self.num_computed = self.ids.len() + outcome.ids.len().saturating_sub(1);
        }
        match outcome.ids.is_empty() {
            // The server does not name its tokens, or the request failed.
            true => self.ids.extend(new_tokens(args.output_tokens as usize, random)),
            false => self.ids.extend(&outcome.ids),
        }
        self.ends.push(self.num_computed);
    }

    /// A request that continues the turn `turn` in another way, with as many new tokens as a turn adds.
    fn branch(&self, turn: usize, args: &AgentsArgs, random: &mut Random) -> Turn {
        let num_repeated = self.ends[turn];
        let mut ids = self.ids[..num_repeated].to_vec();
        let added = args.prompt_tokens(args.turns.min(2) - 1).saturating_sub(args.prompt_tokens(0)).max(1);
        ids.extend(new_tokens(added, random));
        Turn { prompt: prompt(ids, args), num_repeated }
    }
}

fn prompt(ids: Vec<u32>, args: &AgentsArgs) -> Prompt {
    Prompt { ids, max_tokens: args.output_tokens as usize, ..Prompt::default() }
}

/// Random ids that are ordinary tokens in all common vocabularies.
fn new_tokens(count: usize, random: &mut Random) -> Vec<u32> {
    (0..count).map(|_| 10 + random.below(200) as u32).collect()
}

/// Runs the conversations and prints their figures.
pub(crate) async fn run(args: AgentsArgs) -> Result<(), ClientError> {
    args.check()?;
    let target = Target::open(Protocol::Openai, &args.server_addr, args.model.as_deref(), 1).await?;
    let mut random = Random::new(args.seed);
    let system = new_tokens(args.system_tokens as usize, &mut random);
    let mut conversations: Vec<_> = (0..args.conversations).map(|_| Conversation::new(&system)).collect();
    let num_requests = args.conversations as usize * (args.turns + args.branches) as usize;
    let mut session = Session {
        tier: tier(&args)?,
        target,
        sampling: Sampling {
            top_k: 1,
            top_p: 1.0,
            temperature: 1.0,
            stream_output: true,
            ignore_eos: true,
            extra_body: Arc::new(Map::from_iter([("return_token_ids".to_owned(), Value::from(true))])),
        },
        bar: progress::bar("agents", num_requests),
        args: &args,
    };
    let started = Instant::now();
    let mut rounds = Vec::new();
    for turn in 0..args.turns {
        let len = args.prompt_tokens(turn);
        let turns = conversations.iter_mut().enumerate().map(|(index, conversation)| {
            let turn = conversation.next(len, &args, &mut random);
            // The first request computes what all share.
            let num_shared = if index > 0 { system.len() } else { 0 };
            Turn { num_repeated: turn.num_repeated.max(num_shared), ..turn }
        });
        let (outcomes, round) = session.round(format!("turn {}", turn + 1), turns.collect()).await?;
        rounds.push(round);
        for (conversation, outcome) in conversations.iter_mut().zip(&outcomes) {
            conversation.take(outcome, &args, &mut random);
        }
    }
    if args.branches > 0 {
        let from = |branch: u32| (branch + 1) as usize * args.turns as usize / (args.branches + 1) as usize;
        let places = (0..args.branches).flat_map(|branch| conversations.iter().map(move |it| (it, from(branch))));
        let turns = places.map(|(it, turn)| it.branch(turn.saturating_sub(1), &args, &mut random));
        rounds.push(session.round("branches".to_owned(), turns.collect()).await?.1);
    }
    session.bar.finish_and_clear();
    let figures = Figures {
        model: session.target.model().to_owned(),
        conversations: args.conversations,
        turns: args.turns,
        tokens: args.tokens,
        concurrency: args.concurrency,
        seconds: started.elapsed().as_secs_f64(),
        block_tokens: session.tier.as_ref().map(|tier| tier.block_tokens),
        host_used_bytes: session.tier.as_ref().map(|tier| tier.used_bytes),
        host_limit_bytes: session.tier.as_ref().map(|tier| tier.limit_bytes),
        first_turn: Hits::of(rounds.iter().take(1)),
        hits: Hits::of(rounds.iter().skip(1)),
        rounds,
    };
    print_text(args.json.as_ref(), &figures.text());
    if let Some(path) = &args.json {
        write_json(path, &figures)?;
    }
    figures.check()
}

/// What all rounds share.
struct Session<'a> {
    args: &'a AgentsArgs,
    target: Target,
    sampling: Sampling,
    bar: ProgressBar,
    /// The counters after the last round.
    tier: Option<Tier>,
}

impl Session<'_> {
    /// Sends the requests of a round. Returns their outcomes, in this order, and their figures.
    async fn round(&mut self, name: String, turns: Vec<Turn>) -> Result<(Vec<Outcome>, RoundFigures), ClientError> {
        let started = Instant::now();
        self.bar.set_message(format!("{name},"));
        let repeated: Vec<usize> = turns.iter().map(|turn| turn.num_repeated).collect();
        let send = async |turn: Turn| {
            let mut outcome = Outcome::begin(&turn.prompt, Duration::ZERO);
            self.target.send(&turn.prompt, &self.sampling, &mut outcome).await;
            self.bar.inc(1);
            outcome
        };
        let outcomes: Vec<Outcome> =
            futures::stream::iter(turns).map(send).buffered(self.args.concurrency as usize).collect().await;
        let seconds = started.elapsed().as_secs_f64();
        let after = tier(self.args)?;
        let host_tokens = self.tier.as_ref().zip(after.as_ref()).map(|(before, after)| after.host_tokens_since(before));
        let block_tokens = after.as_ref().map(|tier| tier.block_tokens);
        self.tier = after;
        let round = RoundFigures { host_tokens, seconds, ..RoundFigures::of(name, &outcomes, &repeated, block_tokens) };
        Ok((outcomes, round))
    }
}

/// The counters of the server, if `--metrics` says where they are.
fn tier(args: &AgentsArgs) -> Result<Option<Tier>, ClientError> {
    let Some(address) = &args.metrics else { return Ok(None) };
    Tier::of(&metrics::read(address)?).map(Some).ok_or_else(|| {
        ClientError::Usage(format!("`{address}` has no metric `trireme_llm_kv_block_tokens`; leave --metrics out"))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: AgentsArgs,
    }

    fn args(flags: &str) -> AgentsArgs {
        Line::try_parse_from(["agents", "localhost:8000"].into_iter().chain(flags.split_whitespace())).unwrap().args
    }

    fn answer(turn: &Turn, ids: &[u32]) -> Outcome {
        let mut outcome = Outcome::begin(&turn.prompt, Duration::ZERO);
        outcome.ids = ids.to_vec();
        outcome.end(Ok(()));
        outcome
    }

    #[test]
    fn prompts_grow_in_equal_steps_to_the_last() {
        let default = args("");
        default.check().unwrap();
        assert_eq!([0, 1, 9].map(|turn| default.prompt_tokens(turn)), [8000, 16_000, 80_000]);
        let two = args("--turns 2 --first-tokens 79000");
        two.check().unwrap();
        assert_eq!([0, 1].map(|turn| two.prompt_tokens(turn)), [79_000, 80_000]);
        assert_eq!(args("--turns 1").prompt_tokens(0), 80_000);
    }

    #[test]
    fn sizes_that_do_not_fit_together_are_refused_by_name() {
        let refused = |flags: &str| args(flags).check().unwrap_err().to_string();
        assert!(refused("--tokens 1000").contains("--system-tokens (2000)"));
        assert!(refused("--first-tokens 90000").contains("at most --tokens (80000)"));
        assert!(refused("--output-tokens 8000").contains("a turn adds 8000 tokens, of which 8000 are its answer"));
        assert!(Line::try_parse_from(["agents", "a", "--conversations", "0"]).is_err());
    }

    #[test]
    fn a_turn_repeats_what_was_computed_and_a_branch_what_its_turn_had() {
        let args = args("--turns 3 --tokens 30 --system-tokens 4 --output-tokens 3");
        args.check().unwrap();
        let (mut random, mut conversation) = (Random::new(1), Conversation::new(&[1, 2, 3, 4]));
        let first = conversation.next(10, &args, &mut random);
        assert_eq!((first.prompt.ids.len(), &first.prompt.ids[..4], first.num_repeated), (10, &[1, 2, 3, 4][..], 0));
        conversation.take(&answer(&first, &[7, 8, 9]), &args, &mut random);
        let second = conversation.next(20, &args, &mut random);
        // The last token of an answer has not been computed.
        assert_eq!((second.prompt.ids.len(), second.num_repeated), (20, 12));
        assert_eq!(second.prompt.ids[..13], [&first.prompt.ids[..], &[7, 8, 9]].concat());
        let mut failed = answer(&second, &[]);
        failed.error = Some("lost".to_owned());
        conversation.take(&failed, &args, &mut random);
        let third = conversation.next(30, &args, &mut random);
        assert_eq!((third.prompt.ids.len(), third.num_repeated), (30, 12));
        let branch = conversation.branch(0, &args, &mut random);
        assert_eq!((branch.prompt.ids.len(), branch.num_repeated), (22, 12));
        assert_eq!(branch.prompt.ids[..12], second.prompt.ids[..12]);
        assert_ne!(branch.prompt.ids[12..20], second.prompt.ids[12..20]);
    }

    #[test]
    fn without_the_tokens_of_an_answer_a_turn_repeats_the_prompt() {
        let args = args("--turns 2 --tokens 30 --system-tokens 4 --output-tokens 3");
        let (mut random, mut conversation) = (Random::new(1), Conversation::new(&[]));
        let first = conversation.next(15, &args, &mut random);
        conversation.take(&answer(&first, &[]), &args, &mut random);
        let second = conversation.next(30, &args, &mut random);
        assert_eq!((second.num_repeated, second.prompt.ids.len()), (15, 30));
        assert_eq!(second.prompt.ids[..15], first.prompt.ids);
    }
}
