use super::*;

/// Pseudo-random numbers in -1.0..1.0.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / f64::from(1_u32 << 30) - 1.0
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * bound as f64) as usize
    }
}

fn decodes(rows: usize, context: usize) -> StepLoad {
    StepLoad { decode_tokens: rows, decode_positions: rows * context, ..StepLoad::default() }
}

fn with_prompt(load: StepLoad, start: usize, tokens: usize) -> StepLoad {
    StepLoad { prompt_tokens: tokens, prompt_positions: tokens * (start + tokens / 2), ..load }
}

/// A GPU with an 8-billion-parameter model, roughly.
const GPU: StepCosts = StepCosts {
    step: 3.6e-3,
    decode_token: 12e-6,
    decode_position: 30e-9,
    prompt_token: 22e-6,
    prompt_position: 1.1e-9,
    experts: 0.0,
    guess: 0.0,
    gap: 0.0,
};

/// The same work on two CPU cores with a model of one billion parameters.
const CPU: StepCosts = StepCosts {
    step: 55e-3,
    decode_token: 3.5e-3,
    decode_position: 2e-6,
    prompt_token: 3.6e-3,
    prompt_position: 0.2e-6,
    experts: 0.0,
    guess: 0.0,
    gap: 0.0,
};

fn truth(costs: StepCosts) -> CostModel {
    let mut model = CostModel::new(&EngineConfig::default());
    model.set(costs);
    model
}

/// Teaches `model` the steps of a server: prompts in chunks, streams that come and go.
fn serve(model: &mut CostModel, costs: StepCosts, num_steps: usize, seed: u64) {
    let (truth, mut noise) = (truth(costs), Noise(seed));
    for step in 0..num_steps {
        let base = decodes(noise.below(200), 100 + noise.below(2000));
        let load = match step % 3 {
            0 => with_prompt(base, noise.below(8000), 64 + noise.below(448)),
            1 => with_prompt(StepLoad::default(), 0, 64 + noise.below(4000)),
            _ => base,
        };
        let seconds = truth.predict(&load) * (1.0 + 0.03 * noise.next());
        model.learn(&load, Some(model.predict(&load)), seconds);
    }
}

fn relative_error(model: &CostModel, costs: StepCosts, load: &StepLoad) -> f64 {
    let expected = truth(costs).predict(load);
    (model.predict(load) - expected).abs() / expected
}

#[test]
fn the_model_learns_a_gpu_and_a_cpu_within_a_hundred_steps() {
    for costs in [GPU, CPU] {
        let mut model = CostModel::new(&EngineConfig::default());
        serve(&mut model, costs, 100, 3);
        for load in [decodes(1, 500), decodes(128, 1000), with_prompt(decodes(32, 500), 4000, 512)] {
            let error = relative_error(&model, costs, &load);
            assert!(error < 0.15, "{error:.3} for {load:?}, learned {:?}", model.costs());
        }
        assert!(model.error() < 0.1, "{}", model.error());
    }
}

#[test]
fn a_step_that_stalls_hardly_changes_the_model() {
    let mut model = CostModel::new(&EngineConfig::default());
    serve(&mut model, GPU, 300, 5);
    let load = decodes(32, 500);
    let before = model.predict(&load);
    model.learn(&load, Some(before), 10.0);
    let after = model.predict(&load);
    assert!((after - before).abs() < 0.1 * before, "{before} to {after}");
}

#[test]
fn a_device_that_becomes_slower_is_followed() {
    let mut model = CostModel::new(&EngineConfig::default());
    serve(&mut model, GPU, 300, 7);
    let slower = StepCosts::from_values(GPU.values().map(|value| value * 1.5));
    serve(&mut model, slower, 200, 8);
    for load in [decodes(64, 800), with_prompt(decodes(32, 500), 2000, 512)] {
        let error = relative_error(&model, slower, &load);
        assert!(error < 0.15, "{error:.3} for {load:?}, learned {:?}", model.costs());
    }
}

#[test]
fn a_slow_first_step_is_forgotten() {
    let mut model = CostModel::new(&EngineConfig::default());
    model.learn(&with_prompt(StepLoad::default(), 0, 10), None, 20.0);
    serve(&mut model, GPU, 200, 9);
    let error = relative_error(&model, GPU, &decodes(32, 500));
    assert!(error < 0.15, "{error:.3}, learned {:?}", model.costs());
}

#[test]
fn experts_make_small_batches_cheaper_than_their_rows_say() {
    let config = EngineConfig { num_experts: 128, num_active_experts: 8, ..EngineConfig::default() };
    let costs = StepCosts { experts: 11e-3, ..GPU };
    let (mut model, mut truth) = (CostModel::new(&config), CostModel::new(&config));
    truth.set(costs);
    let mut noise = Noise(11);
    for _ in 0..300 {
        let load = decodes(1 + noise.below(200), 500);
        model.learn(&load, None, truth.predict(&load));
    }
    for rows in [1, 8, 32, 128] {
        let (found, expected) = (model.predict(&decodes(rows, 500)), truth.predict(&decodes(rows, 500)));
        assert!((found - expected).abs() < 0.1 * expected, "{rows} rows: {found}, expected {expected}");
    }
}

#[test]
fn the_cost_of_a_guess_is_learned() {
    let costs = StepCosts { guess: 0.4e-3, ..GPU };
    let (mut model, truth) = (CostModel::new(&EngineConfig::default()), truth(costs));
    let mut noise = Noise(13);
    for _ in 0..300 {
        let load = StepLoad { guesses: noise.below(5), ..decodes(1 + noise.below(64), 500) };
        model.learn(&load, None, truth.predict(&load));
    }
    let learned = model.costs().unwrap().guess;
    assert!((learned - costs.guess).abs() < 0.1 * costs.guess, "{learned}");
}

#[test]
fn impossible_durations_are_ignored_and_extreme_ones_survived() {
    let mut model = CostModel::new(&EngineConfig::default());
    for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-12, 1e9, 1e-3, 1e-3] {
        model.learn(&decodes(2048, 100_000), None, seconds);
        model.learn(&with_prompt(StepLoad::default(), 1_000_000, 8192), None, seconds);
        assert!(
            model.predict(&decodes(1, 1)).is_finite()
                && model
                    .costs()
                    .is_none_or(|costs| { costs.values().iter().all(|value| value.is_finite() && *value >= 0.0) })
        );
    }
}
