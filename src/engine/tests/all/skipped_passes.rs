//! While drafts are not worth their time, what guesses them on the devices does not run behind decodes, and drafts come back when there are
//! fewer rows or when more guesses are right.

use engine::{Engine, EngineConfig, Request, SampledToken, StepCosts, StepOutput, StepPlan, TokenEvent, TokenId};

use crate::support::{Random, World, prompt, request};

/// Steps of which a token of each row is a large part if there are many.
const COSTS: StepCosts = StepCosts {
    step: 4e-3,
    decode_token: 0.4e-3,
    decode_position: 0.0,
    prompt_token: 10e-6,
    prompt_position: 0.0,
    experts: 0.0,
    guess: 0.15e-3,
    gap: 0.3e-3,
};

fn config(max_rows: usize) -> EngineConfig {
    EngineConfig {
        max_rows,
        max_step_tokens: 1024,
        num_blocks: 65_536,
        max_drafts: 3,
        guesses_on_device: true,
        ..EngineConfig::default()
    }
}

/// The token of all positions.
const TOKEN: TokenId = TokenId(7);

/// Devices whose guesses are seldom right while keys and values of the newest tokens are missing.
struct Device {
    /// How often a guess is right, as percents, and how often if the last tokens of a row were skipped.
    right: [u64; 2],
    random: Random,
    /// For each row the steps since the last one that ran no pass.
    newest: Vec<u32>,
    /// Steps without prompts, and how many of them ran a pass.
    decodes: [u32; 2],
}

impl Device {
    fn new(right: [u64; 2], max_rows: usize) -> Self {
        Self { right, random: Random(5), newest: vec![0; max_rows], decodes: [0; 2] }
    }

    fn run(&mut self, plan: &StepPlan) -> StepOutput {
        let is_prompt = |row| plan.joined.iter().any(|joined| joined.row == row);
        if plan.joined.is_empty() {
            self.decodes[0] += 1;
            self.decodes[1] += u32::from(plan.runs_drafter);
        }
        let (mut tokens, mut guesses) = (Vec::new(), Vec::new());
        for work in &plan.work {
            let newest = &mut self.newest[work.row.0 as usize];
            *newest = match plan.runs_drafter {
                true if is_prompt(work.row) => u32::MAX / 2,
                true => *newest + 1,
                false => 0,
            };
            let right = if *newest >= 4 { self.right[0] } else { self.right[1] };
            let drafts = plan.drafts.iter().find(|(row, _)| *row == work.row).map_or(0, |(_, drafts)| drafts.len());
            let sampled = SampledToken { row: work.row, token: TOKEN, logprob: None, top: vec![] };
            tokens.extend(std::iter::repeat_n(sampled, 1 + drafts));
            if work.num_guesses > 0 {
                let mut guess = || TokenId(TOKEN.0 + u32::from(u64::from(self.random.below(100)) >= right));
                guesses.push((work.row, (0..work.num_guesses).map(|_| guess()).collect()));
            }
        }
        StepOutput { step: plan.step, tokens, guesses }
    }
}

/// Runs an engine for so many steps, with two in flight where it allows it.
fn run(engine: &mut Engine, device: &mut Device, steps: u64) {
    let (end, mut in_flight) = (engine.next_step() + steps, std::collections::VecDeque::new());
    while engine.next_step() < end && !engine.is_idle() || !in_flight.is_empty() {
        while engine.next_step() < end
            && let Some(plan) = engine.plan()
        {
            in_flight.push_back(plan);
        }
        let Some(plan) = in_flight.pop_front() else { break };
        let mut events: Vec<TokenEvent> = Vec::new();
        engine.settle(device.run(&plan), &mut events).unwrap();
    }
}

fn submit(engine: &mut Engine, max_tokens: u32) {
    engine.submit(Request { prompt: vec![TokenId(1); 4], max_tokens, max_drafts: 3, ..Request::default() }).unwrap();
}

#[test]
fn decodes_of_many_rows_run_no_pass_and_drafts_come_back_when_most_rows_have_ended() {
    let mut engine = Engine::new(config(64)).unwrap();
    engine.set_costs(COSTS);
    let mut device = Device::new([80, 20], 64);
    (0..60).for_each(|_| submit(&mut engine, 700));
    (0..4).for_each(|_| submit(&mut engine, 3000));
    run(&mut engine, &mut device, 690);
    let [decodes, passes] = device.decodes;
    // Of 512 steps two have a draft of each row, from which the price is learned.
    assert!(engine.stats().total_drafted_tokens <= 2 * 64 && decodes > 650, "{:?}", engine.stats());
    assert!(passes * 20 < decodes, "{passes} of {decodes} steps run a pass");
    run(&mut engine, &mut device, 600);
    let accepted = engine.stats().total_accepted_tokens;
    assert!(accepted > 1500, "{accepted} drafts of four rows in 600 steps, {:?}", engine.stats());
}

#[test]
fn drafts_come_back_when_guesses_become_right() {
    let mut engine = Engine::new(config(4)).unwrap();
    engine.set_costs(COSTS);
    let mut device = Device::new([0, 0], 4);
    (0..4).for_each(|_| submit(&mut engine, 3500));
    run(&mut engine, &mut device, 500);
    device.decodes = [0; 2];
    run(&mut engine, &mut device, 1024);
    let [decodes, passes] = device.decodes;
    assert!(passes * 20 < decodes, "{passes} of {decodes} steps run a pass");
    let before = engine.stats();
    device.right = [80, 20];
    run(&mut engine, &mut device, 700);
    let accepted = engine.stats().total_accepted_tokens - before.total_accepted_tokens;
    assert!(accepted > 500, "{accepted} drafts of four rows");
}

/// [`World`] compares each stream with what its request generates alone, and each plan with whether it needs a pass.
#[test]
fn tokens_are_the_same_whether_passes_run_or_not() {
    let small = EngineConfig { max_rows: 4, max_step_tokens: 64, num_blocks: 60, ..config(4) };
    for config in [small.clone(), EngineConfig { shares_output: false, max_rows: 14, ..small.clone() }, small] {
        let mut world = World::new(config, 1);
        for round in 0..12 {
            // Drafts are worth their time in every second round.
            let decode_token = if round % 2 == 0 { 1.0 } else { 0.0 };
            world.engine.set_costs(StepCosts { decode_token, ..COSTS });
            world.submit(Request { max_drafts: 3, ..request(prompt(round % 3, 40), 90) }).unwrap();
            for _ in 0..30 {
                while world.plan() {}
                world.settle();
            }
            if round == 7 {
                world.recover();
            }
        }
        world.run_to_idle();
        assert!(world.engine.stats().total_accepted_tokens > 50, "{:?}", world.engine.stats());
    }
}
