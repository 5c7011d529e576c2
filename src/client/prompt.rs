//! `trireme client`: sends a prompt and prints the streamed text.

use std::io::{IsTerminal, Read, Write};
use std::time::{Duration, Instant};

use clap::Args;

use crate::ClientError;
use crate::grpc::{Connection, Replies, frame};
use crate::proto::{ModelInferRequest, ModelStreamInferResponse};
use crate::tensor::{Model, Values, texts};

/// `trireme client`
#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// The prompt; read from standard input when absent
    pub prompt: Option<String>,
    /// Address of the server's gRPC port
    #[arg(short, long, default_value = "localhost:8001", value_name = "HOST:PORT")]
    pub url: String,
    /// Name of the model
    #[arg(short, long, default_value = "ensemble")]
    pub model: String,
    /// Maximum number of tokens to generate
    #[arg(short = 'n', long, default_value_t = 128)]
    pub max_tokens: u32,
    /// Sampling temperature; 0 is greedy
    #[arg(short, long)]
    pub temperature: Option<f64>,
    /// Sample from this many most likely tokens
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Sample from the most likely tokens with this cumulative probability
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Penalty on tokens that occurred before; 1 is none
    #[arg(long)]
    pub repetition_penalty: Option<f64>,
    /// Seed of the sampling
    #[arg(long)]
    pub seed: Option<u64>,
    /// Texts that end the output
    #[arg(long, num_args = 1.., value_name = "TEXT")]
    pub stop_words: Vec<String>,
    /// Do not print timings at the end
    #[arg(short, long)]
    pub quiet: bool,
}

/// Usual names of the prompt input.
const PROMPT_NAMES: [&str; 3] = ["text_input", "prompt", "QUERY"];
/// Time for a cancellation to reach the server.
const CANCEL_GRACE: Duration = Duration::from_millis(200);

/// Sends a prompt to a model. Prints the streamed text to standard output, and timings to standard error.
///
/// # Errors
/// When the server cannot be reached, the model is not ready, or the request fails.
pub fn run_client(args: ClientArgs) -> Result<(), ClientError> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => read_prompt()?,
    };
    crate::runtime()?.block_on(generate(&args, prompt))
}

fn read_prompt() -> Result<String, ClientError> {
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        eprintln!("type a prompt, then Ctrl-D");
    }
    let mut prompt = String::new();
    stdin
        .read_to_string(&mut prompt)
        .map_err(|source| ClientError::Io { what: "reading the prompt from standard input".into(), source })?;
    Ok(prompt.trim_end_matches('\n').to_owned())
}

async fn generate(args: &ClientArgs, prompt: String) -> Result<(), ClientError> {
    let connection = Connection::open(&args.url).await?;
    let model = Model::find(&connection, &args.model).await?;
    let request = request(args, &model, prompt)?;
    let text_outputs = model.metadata.outputs.iter().filter(|output| output.datatype == "BYTES");
    let text_outputs: Vec<&str> = text_outputs.map(|output| output.name.as_str()).collect();
    let started = Instant::now();
    let replies = connection.call("ModelStreamInfer", frame(&request)).await?;
    let answered = tokio::select! {
        answered = print_answer(replies, &text_outputs, started) => answered,
        _ = tokio::signal::ctrl_c() => Err(ClientError::Cancelled),
    };
    if matches!(answered, Err(ClientError::Cancelled)) {
        tokio::time::sleep(CANCEL_GRACE).await;
    }
    let figures = answered?;
    if !args.quiet {
        eprintln!("{figures}");
    }
    Ok(())
}

fn request(args: &ClientArgs, model: &Model, prompt: String) -> Result<ModelInferRequest, ClientError> {
    let mut request = model.request();
    let prompt_name = PROMPT_NAMES.into_iter().find(|name| model.input(name).is_some()).unwrap_or(PROMPT_NAMES[0]);
    model.add(&mut request, prompt_name, Values::Texts(&[prompt]))?;
    // The models of TensorRT-LLM and LMDeploy decode greedily if only the temperature is set.
    let samples = args.temperature.is_some_and(|temperature| temperature > 0.0) && args.top_k.is_none();
    let is_needed = |name: &str| samples && model.input(name).is_some();
    let (top_k, top_p) =
        (args.top_k.or(is_needed("top_k").then_some(0)), args.top_p.or(is_needed("top_p").then_some(1.0)));
    let integers = [
        ("max_tokens", Some(i64::from(args.max_tokens))),
        ("top_k", top_k.map(i64::from)),
        ("seed", args.seed.map(|seed| i64::try_from(seed).unwrap_or(i64::MAX))),
    ];
    for (name, value) in integers {
        if let Some(value) = value {
            model.add(&mut request, name, Values::Integers(&[value]))?;
        }
    }
    let floats = [("temperature", args.temperature), ("top_p", top_p), ("repetition_penalty", args.repetition_penalty)];
    for (name, value) in floats {
        if let Some(value) = value {
            model.add(&mut request, name, Values::Float(value))?;
        }
    }
    if !args.stop_words.is_empty() {
        model.add(&mut request, "stop_words", Values::Texts(&args.stop_words))?;
    }
    // LMDeploy's model requires both.
    for (name, value) in [("stream", model.streams), ("ignore_eos", false)] {
        if model.input(name).is_some() {
            model.add(&mut request, name, Values::Bool(value))?;
        }
    }
    Ok(request)
}

/// Timings, printed at the end.
struct Figures {
    num_tokens: usize,
    time_to_first: Duration,
    duration: Duration,
}

impl std::fmt::Display for Figures {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let decoding = self.duration.saturating_sub(self.time_to_first).as_secs_f64();
        let (tokens, first) = (self.num_tokens, self.time_to_first.as_secs_f64() * 1e3);
        write!(formatter, "{tokens} tokens, first after {first:.1} ms")?;
        if tokens > 1 && decoding > 0.0 {
            write!(formatter, ", then {:.1} tokens/s", (tokens - 1) as f64 / decoding)?;
        }
        Ok(())
    }
}

async fn print_answer(mut replies: Replies, outputs: &[&str], started: Instant) -> Result<Figures, ClientError> {
    let mut stdout = std::io::stdout().lock();
    let failed = |source| ClientError::Io { what: "writing the answer".into(), source };
    let (mut num_tokens, mut time_to_first) = (0, None);
    while let Some(reply) = replies.next::<ModelStreamInferResponse>().await? {
        if !reply.error_message.is_empty() {
            let _ = writeln!(stdout);
            return Err(ClientError::Refused { code: "from the model", message: reply.error_message });
        }
        let response = reply.infer_response.unwrap_or_default();
        num_tokens += usize::from(!response.outputs.is_empty());
        for (output, data) in response.outputs.iter().zip(&response.raw_output_contents) {
            if outputs.contains(&output.name.as_str()) {
                texts(data).try_for_each(|text| stdout.write_all(text)).map_err(failed)?;
            }
        }
        stdout.flush().map_err(failed)?;
        time_to_first.get_or_insert_with(|| started.elapsed());
    }
    writeln!(stdout).map_err(failed)?;
    let duration = started.elapsed();
    Ok(Figures { num_tokens, time_to_first: time_to_first.unwrap_or(duration), duration })
}
