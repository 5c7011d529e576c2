//! Steps are sized by time: an engine learns how long the steps of a device take, and keeps the bound of the time between
//! tokens while prompts arrive.

use std::collections::VecDeque;
use std::time::Duration;

use engine::{Engine, EngineConfig, Request, SampledToken, StepOutput, StepPlan, TokenId};

/// How long the steps of a device take. Unlike the engine's cost model it knows nothing but the plan.
#[derive(Clone, Copy)]
struct Device {
    step: f64,
    decode: f64,
    prompt_token: f64,
    /// A position read by a token of a prompt.
    position: f64,
    /// A pass for a guess of each row that has one.
    guess: f64,
}

/// Roughly an H200 with a model of 8 billion parameters.
const GPU: Device = Device { step: 4.2e-3, decode: 12e-6, prompt_token: 23e-6, position: 1e-9, guess: 0.0 };
/// Roughly two CPU cores with a model of a billion parameters.
const CPU: Device = Device { step: 55e-3, decode: 3.5e-3, prompt_token: 3.6e-3, position: 0.2e-6, guess: 0.0 };

impl Device {
    fn seconds(&self, plan: &StepPlan) -> f64 {
        let of_row = |work: &engine::RowWork| match work.num_tokens {
            1 => self.decode,
            len => f64::from(len) * (self.prompt_token + self.position * f64::from(work.start + len / 2)),
        };
        let guesses = plan.work.iter().map(|work| work.num_guesses).max().unwrap_or(0);
        self.step + self.guess * f64::from(guesses) + plan.work.iter().map(of_row).sum::<f64>()
    }
}

/// A step that was measured.
struct Step {
    seconds: f64,
    predicted: Option<f64>,
    prompt_tokens: u32,
    num_tokens: u32,
    has_decodes: bool,
}

/// A world with two steps in flight, whose durations vary by a few percent.
struct Clocked {
    engine: Engine,
    device: Device,
    in_flight: VecDeque<StepPlan>,
    noise: u64,
}

impl Clocked {
    fn new(device: Device, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let mut config = EngineConfig {
            max_rows: 64,
            max_step_tokens: 8192,
            max_sequence_len: 16_384,
            num_blocks: 16_384,
            ..EngineConfig::default()
        };
        change(&mut config);
        Self { engine: Engine::new(config).unwrap(), device, in_flight: VecDeque::new(), noise: 1 }
    }

    fn submit(&mut self, first: u32, len: usize, max_tokens: u32, priority: u32) {
        let prompt = (0..len as u32).map(|token| TokenId(first.wrapping_mul(7919) + token)).collect();
        self.engine.submit(Request { prompt, max_tokens, priority, ..Request::default() }).unwrap();
    }

    fn step(&mut self) -> Step {
        while let Some(plan) = self.engine.plan() {
            self.in_flight.push_back(plan);
        }
        let plan = self.in_flight.pop_front().expect("there is work");
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let noise = (self.noise >> 33) as f64 / f64::from(1_u32 << 31) - 0.5;
        let seconds = self.device.seconds(&plan) * (1.0 + 0.04 * noise);
        let predicted = self.engine.measure(seconds);
        let sampled = plan.work.iter().filter(|work| work.samples);
        let token =
            |work: &engine::RowWork| SampledToken { row: work.row, token: TokenId(3), logprob: None, top: vec![] };
        let output = StepOutput { step: plan.step, tokens: sampled.map(token).collect(), guesses: vec![] };
        self.engine.settle(output, &mut Vec::new()).unwrap();
        let num_tokens = plan.work.iter().map(|work| work.num_tokens).sum();
        let prompt_tokens = plan.work.iter().map(|work| work.num_tokens).filter(|&len| len > 1).sum();
        Step {
            seconds,
            predicted,
            prompt_tokens,
            num_tokens,
            has_decodes: plan.work.iter().any(|work| work.num_tokens == 1),
        }
    }

    fn run(&mut self, num_steps: usize) {
        for _ in 0..num_steps {
            self.step();
        }
    }

    /// Steps while eight streams run and long prompts arrive, after the first sixty.
    fn steps_beside_prompts(&mut self, num_steps: usize) -> Vec<Step> {
        (0..8).for_each(|number| self.submit(number, 20, 4000, 0));
        self.run(8);
        (0..40).for_each(|number| self.submit(100 + number, 8000, 40, 0));
        self.run(60);
        let steps: Vec<Step> = (0..num_steps).map(|_| self.step()).collect();
        assert!(steps.iter().all(|step| step.has_decodes && step.prompt_tokens > 0));
        steps
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn nearly_all_steps_keep_the_bound_and_use_most_of_it() {
    for (device, bound_ms) in [(GPU, 15), (GPU, 30), (CPU, 300)] {
        let bound = Duration::from_millis(bound_ms);
        let mut world = Clocked::new(device, |config| config.max_inter_token = Some(bound));
        let steps = world.steps_beside_prompts(100);
        let late = steps.iter().filter(|step| step.seconds > bound.as_secs_f64()).count();
        let share = mean(steps.iter().map(|step| step.seconds)) / bound.as_secs_f64();
        assert!(
            late <= 1 && share > 0.85,
            "{late} of 100 steps are longer than {bound_ms} ms, the mean is {share:.2} of it"
        );
    }
}

#[test]
fn steps_are_predicted_within_a_few_percent() {
    for device in [GPU, CPU] {
        let mut world = Clocked::new(device, |_| ());
        let steps = world.steps_beside_prompts(100);
        let error = mean(steps.iter().map(|step| (step.predicted.unwrap() - step.seconds).abs() / step.seconds));
        assert!(error < 0.05, "mean relative error {error:.3}");
    }
}

#[test]
fn guesses_behind_a_prompt_are_predicted_as_those_behind_a_token() {
    let device = Device { guess: 2e-3, ..GPU };
    let mut world = Clocked::new(device, |config| {
        (config.max_step_tokens, config.max_drafts, config.guesses_on_device) = (256, 4, true);
        config.prefix_cache = false;
    });
    let mut steps = Vec::new();
    for number in 0..120_u32 {
        // Two chunks of which the second one ends with guesses, then decodes with them.
        let len = 260 + (number * 97) % 240;
        let prompt = (0..len).map(|token| TokenId(number.wrapping_mul(7919) + token)).collect();
        world.engine.submit(Request { prompt, max_tokens: 8, max_drafts: 4, ..Request::default() }).unwrap();
        while !world.engine.is_idle() {
            steps.push(world.step());
        }
    }
    let of_prompts = steps[steps.len() / 2..].iter().filter(|step| step.prompt_tokens > 0);
    let error = mean(of_prompts.map(|step| (step.predicted.unwrap() - step.seconds).abs() / step.seconds));
    assert!(error < 0.03, "mean relative error {error:.3}");
}

#[test]
fn without_a_bound_prompts_run_at_most_of_their_speed_alone() {
    for (device, longest) in [(GPU, 0.050), (CPU, 8.0 * (CPU.step + 10.0 * CPU.decode))] {
        let mut world = Clocked::new(device, |_| ());
        let steps = world.steps_beside_prompts(60);
        let tokens: f64 = steps.iter().map(|step| f64::from(step.prompt_tokens)).sum();
        let rate = tokens / steps.iter().map(|step| step.seconds).sum::<f64>();
        let alone = 1.0 / (device.prompt_token + 4000.0 * device.position);
        assert!(rate > 0.7 * alone, "{rate:.0} tokens a second, {alone:.0} alone");
        let late = steps.iter().filter(|step| step.seconds > longest * 1.1).count();
        assert!(late <= 3, "{late} of 60 steps are longer than {longest} s");
    }
}

#[test]
fn a_prompt_without_streams_takes_whole_steps_whatever_the_bound() {
    let mut world = Clocked::new(GPU, |config| config.max_inter_token = Some(Duration::from_millis(5)));
    (0..3).for_each(|number| world.submit(number, 16_000, 1, 0));
    let steps: Vec<u32> = (0..4).map(|_| world.step().prompt_tokens).collect();
    assert_eq!(steps, [8192; 4]);
}

#[test]
fn the_first_steps_beside_streams_grow_from_a_small_chunk() {
    let mut world = Clocked::new(GPU, |config| config.max_inter_token = Some(Duration::from_millis(30)));
    (0..8).for_each(|number| world.submit(number, 4, 400, 0));
    world.run(4);
    world.submit(99, 8000, 4, 0);
    let sizes: Vec<u32> = (0..12).map(|_| world.step().prompt_tokens).filter(|&tokens| tokens > 0).collect();
    assert!(sizes[0] <= 128, "{sizes:?}");
    assert!(sizes.windows(3).all(|sizes| sizes[2] <= 2 * sizes[0].max(64)), "{sizes:?}");
    assert!(sizes.iter().any(|&size| size > 800), "{sizes:?}");
}

#[test]
fn the_shortest_bound_of_the_classes_that_decode_applies() {
    let mut world = Clocked::new(GPU, |config| {
        config.max_inter_token = Some(Duration::from_millis(60));
        config.max_inter_token_of = [(5, Duration::from_millis(12))].into();
    });
    world.submit(1, 20, 2000, 0);
    world.submit(2, 20, 90, 5);
    world.run(4);
    (0..40).for_each(|number| world.submit(100 + number, 8000, 4, 0));
    world.run(30);
    let strict: Vec<f64> = (0..30).map(|_| world.step().seconds).collect();
    world.run(60);
    let loose: Vec<f64> = (0..30).map(|_| world.step().seconds).collect();
    let (strict, loose) = (mean(strict.into_iter()), mean(loose.into_iter()));
    assert!(strict < 0.0125 && loose > 0.04 && loose < 0.0605, "{strict} s, then {loose} s");
}

#[test]
fn a_prompt_advances_even_if_decodes_alone_exceed_the_bound() {
    let mut world = Clocked::new(CPU, |config| config.max_inter_token = Some(Duration::from_millis(1)));
    let steps = world.steps_beside_prompts(10);
    assert!(steps.iter().all(|step| step.prompt_tokens == 16), "{:?}", steps[0].prompt_tokens);
}

#[test]
fn a_chunk_that_does_not_complete_its_prompt_ends_with_a_full_tile() {
    let mut world = Clocked::new(GPU, |config| {
        config.max_inter_token = Some(Duration::from_millis(20));
        config.token_tile = 128;
    });
    let steps = world.steps_beside_prompts(40);
    let whole = steps.iter().filter(|step| step.num_tokens.is_multiple_of(128)).count();
    assert!(whole >= 38, "{whole} of 40 steps have whole tiles");
}
