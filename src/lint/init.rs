//! `trireme init`: writes a repository for a checkpoint, or fills in templates.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use models::EstimateMemory;
use serving::{LoadCause, LoadFailure};

use crate::fill::Values;
use crate::{LintError, dry_load};

/// `trireme init`
#[derive(Debug, Clone, Args)]
pub struct InitArgs {
    /// Directory of a Hugging Face checkpoint
    #[arg(required_unless_present = "template")]
    checkpoint: Option<PathBuf>,
    /// Published layout of the repository
    #[arg(long, value_enum, default_value = "tensorrt-llm")]
    layout: LintLayout,
    /// Directory of the new repository
    #[arg(short, long, default_value = "model_repository", value_name = "DIR")]
    output: PathBuf,
    /// Values of the layout's template variables, in the syntax of TensorRT-LLM's fill_template.py
    #[arg(long, value_parser = Values::parse, default_value = "", hide_default_value = true, value_name = "KEY:VALUE,..")]
    fill: Values,
    /// Fill in this file, or every config.pbtxt below this directory, instead of writing a repository
    #[arg(long, alias = "in-place", value_name = "PATH", conflicts_with_all = ["checkpoint", "layout", "output"])]
    template: Option<PathBuf>,
}

/// A published layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // Their own names.
pub enum LintLayout {
    /// TensorRT-LLM's inflight_batcher_llm: preprocessing, tensorrt_llm, postprocessing, ensemble, tensorrt_llm_bls
    #[value(alias = "tensorrt_llm", alias = "inflight_batcher_llm", alias = "tensorrtllm")]
    TensorrtLlm,
    /// TensorRT-LLM's Python gpt: fixed batches, beam search
    Gpt,
    /// LMDeploy's lmdeploy_model: text in, text out
    Lmdeploy,
    /// TurboMind's triton_models: sessions
    Turbomind,
    /// SGLang's sglang_model: like LMDeploy's
    Sglang,
    /// One model `llama-python`: text in, text out
    #[value(alias = "text", alias = "llama_python")]
    LlamaPython,
}

/// A model of a layout, and its template.
type Template = (&'static str, &'static str);

macro_rules! templates {
    ($layout:literal: $($model:literal)*) => {
        &[$(($model, include_str!(concat!("layouts/", $layout, "/", $model, "/config.pbtxt")))),*]
    };
}

impl LintLayout {
    fn templates(self) -> &'static [Template] {
        match self {
            LintLayout::TensorrtLlm => {
                templates!("tensorrt_llm": "preprocessing" "tensorrt_llm" "postprocessing" "ensemble" "tensorrt_llm_bls")
            }
            LintLayout::Gpt => templates!("gpt": "preprocessing" "tensorrt_llm" "postprocessing" "ensemble"),
            LintLayout::Lmdeploy => templates!("lmdeploy": "lmdeploy_model"),
            LintLayout::Turbomind => templates!("turbomind": "preprocessing" "turbomind" "postprocessing"),
            LintLayout::Sglang => templates!("sglang": "sglang_model"),
            LintLayout::LlamaPython => templates!("llama-python": "llama-python"),
        }
    }

    /// Whether the layout's model expects the checkpoint in `1/weights`.
    fn has_weights(self) -> bool {
        matches!(self, LintLayout::Lmdeploy | LintLayout::Sglang | LintLayout::LlamaPython)
    }
}

/// Writes the repository, loads it as `trireme lint` does, and prints the next commands. `estimate` checks the weights.
///
/// # Errors
/// When there is no checkpoint, the repository exists, a file cannot be written, no value has a variable, or a server could not load
/// the models; then nothing of them stays.
pub fn init(args: &InitArgs, estimate: EstimateMemory) -> Result<(), LintError> {
    if let Some(template) = &args.template {
        return fill_in_place(template, &args.fill);
    }
    let checkpoint = args.checkpoint.as_deref().unwrap_or(Path::new("."));
    if !checkpoint.join("config.json").is_file() {
        let words =
            format!("{} has no config.json; name the directory of a Hugging Face checkpoint", checkpoint.display());
        return Err(LintError::Usage(words));
    }
    models::Config::from_dir(checkpoint).map_err(|error| LintError::Usage(error.to_string()))?;
    let checkpoint = std::path::absolute(checkpoint).map_err(failed("finding", checkpoint))?;
    let templates = args.layout.templates();
    let in_the_way = templates.iter().map(|(model, _)| args.output.join(model)).find(|dir| dir.exists());
    if let Some(dir) = in_the_way {
        return Err(LintError::Usage(format!(
            "{} is there already; name another place with `--output`",
            dir.display()
        )));
    }
    check_values(&args.fill, templates.iter().map(|(_, text)| (*text).to_owned()).collect())?;
    let values = args.fill.clone().or(&defaults(&checkpoint));
    for (model, template) in templates {
        let weights = args.layout.has_weights().then_some(checkpoint.as_path());
        write_model(&args.output.join(model), &without_unset(&values.fill(template)), weights)?;
    }
    let names: Vec<&str> = templates.iter().map(|(model, _)| *model).collect();
    if let Err(error) = check_loads(&checkpoint, &args.output, &names, num_ranks(&values), estimate) {
        for model in &names {
            let dir = args.output.join(model);
            std::fs::remove_dir_all(&dir).map_err(failed("removing", &dir))?;
        }
        // It stays if there is something else.
        let _ = std::fs::remove_dir(&args.output);
        return Err(error);
    }
    println!("made {} with {}", args.output.display(), names.join(", "));
    println!("look at it:  trireme lint {}", args.output.display());
    println!("serve it:    launch --world_size={} --model_repo={}", num_ranks(&values), args.output.display());
    Ok(())
}

/// Loads the new models as a server does, without workers.
fn check_loads(
    checkpoint: &Path,
    output: &Path,
    names: &[&str],
    world_size: u32,
    estimate: EstimateMemory,
) -> Result<(), LintError> {
    let failures = dry_load::failures(&[output.to_owned()], world_size, estimate)?;
    let mut of_new = failures.iter().filter(|failure| names.contains(&failure.model.as_str()));
    // An ensemble also fails because of its models.
    let own_cause = |failure: &LoadFailure| match &failure.cause {
        LoadCause::Own(error) => Some((failure.model.clone(), error.message.clone())),
        LoadCause::ComposingModel(_) => None,
    };
    match of_new.find_map(own_cause) {
        Some((model, reason)) => {
            // The link goes.
            let link = output.join(model).join("1/weights").display().to_string();
            let reason = reason.trim_end().replace(&link, &checkpoint.display().to_string());
            Err(LintError::Usage(format!("a server could not load this checkpoint: {reason}")))
        }
        None => Ok(()),
    }
}

/// Writes a repository with one model, text in and text out, in the form of layout `llama-python` under any name.
/// `parameters` are those of the model's `config.pbtxt`.
///
/// # Errors
/// When the checkpoint cannot be served, or a file cannot be written.
pub fn write_text_repository(
    output: &Path,
    model: &str,
    checkpoint: &Path,
    parameters: &[(&str, String)],
) -> Result<(), LintError> {
    models::Config::from_dir(checkpoint).map_err(|error| LintError::Usage(error.to_string()))?;
    let checkpoint = std::path::absolute(checkpoint).map_err(failed("finding", checkpoint))?;
    let [(_, template)] = LintLayout::LlamaPython.templates() else { unreachable!("the layout has one model") };
    // The directory has the name.
    let lines = template.lines().filter(|line| !line.starts_with("name:")).map(|line| format!("{line}\n"));
    let mut text = without_unset(&Values::default().or(&defaults(&checkpoint)).fill(&lines.collect::<String>()));
    for (key, value) in parameters {
        text += &format!("parameters {{ key: \"{key}\" value: {{ string_value: \"{value}\" }} }}\n");
    }
    write_model(&output.join(model), &text, Some(&checkpoint))
}

/// Writes a model with the version directory 1, and a link to its checkpoint there.
fn write_model(dir: &Path, config: &str, weights: Option<&Path>) -> Result<(), LintError> {
    let (version, path) = (dir.join("1"), dir.join("config.pbtxt"));
    std::fs::create_dir_all(&version).map_err(failed("making", &version))?;
    std::fs::write(&path, config).map_err(failed("writing", &path))?;
    let Some(weights) = weights else { return Ok(()) };
    let link = version.join("weights");
    std::os::unix::fs::symlink(weights, &link).map_err(failed("linking", &link))
}

/// The `tp` of the values; 1 if it is not set.
fn num_ranks(values: &Values) -> u32 {
    values.fill("${tp}").parse().unwrap_or(1)
}

/// Default values of the variables.
fn defaults(checkpoint: &Path) -> Vec<(&'static str, String)> {
    let dir = checkpoint.display().to_string();
    let name = checkpoint.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    vec![
        ("tokenizer_dir", dir.clone()),
        ("tokenizer_path", checkpoint.join("tokenizer.json").display().to_string()),
        ("engine_dir", dir),
        ("model_name", name),
        ("triton_backend", "tensorrtllm".to_owned()),
        ("triton_max_batch_size", "64".to_owned()),
        ("decoupled_mode", "true".to_owned()),
        ("batching_strategy", "inflight_fused_batching".to_owned()),
        ("max_queue_delay_microseconds", "0".to_owned()),
        ("max_queue_size", "1024".to_owned()),
        ("exclude_input_in_output", "true".to_owned()),
        ("preprocessing_instance_count", "1".to_owned()),
        ("postprocessing_instance_count", "1".to_owned()),
        ("instance_count", "48".to_owned()),
        ("tensorrt_llm_model_name", "tensorrt_llm".to_owned()),
        ("accumulate_tokens", "false".to_owned()),
        ("tokenizer_type", "auto".to_owned()),
    ]
}

/// Removes the lines of parameters without a value.
fn without_unset(text: &str) -> String {
    let lines = text.lines().filter(|line| !(line.starts_with("parameters") && line.contains("${")));
    lines.map(|line| format!("{line}\n")).collect()
}

fn fill_in_place(path: &Path, values: &Values) -> Result<(), LintError> {
    let mut files = Vec::new();
    match path.is_dir() {
        true => find_configs(path, &mut files)?,
        false => files.push(path.to_owned()),
    }
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(failed("reading", path));
    let texts: Vec<String> = files.iter().map(read).collect::<Result<_, _>>()?;
    check_values(values, texts.clone())?;
    for (path, text) in files.iter().zip(&texts) {
        let filled = values.fill(text);
        if filled != *text {
            std::fs::write(path, &filled).map_err(failed("writing", path))?;
            println!("filled {}", path.display());
        }
    }
    Ok(())
}

/// Warns about names that are in no file; it is an error if that holds for all names. TensorRT-LLM's documentation lists more names
/// than the files of each release have, and its script ignores the others.
fn check_values(values: &Values, texts: Vec<String>) -> Result<(), LintError> {
    let unknown = values.unknown(&texts);
    if unknown.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = unknown.iter().map(|name| format!("`${{{name}}}`")).collect();
    let words = format!("no config.pbtxt has {}; check the names given to `--fill`", names.join(", "));
    if unknown.len() == values.len() {
        return Err(LintError::Usage(words));
    }
    eprintln!("warning: {words}");
    Ok(())
}

fn find_configs(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), LintError> {
    for entry in std::fs::read_dir(dir).map_err(failed("reading", dir))? {
        let path = entry.map_err(failed("reading", dir))?.path();
        if path.is_dir() && !path.is_symlink() {
            find_configs(&path, found)?;
        } else if path.file_name().is_some_and(|name| name == "config.pbtxt") {
            found.push(path);
        }
    }
    Ok(())
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> LintError {
    let what = format!("{what} {}", path.display());
    move |source| LintError::Io { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(layout: LintLayout, output: PathBuf, fill: &str) -> InitArgs {
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
        InitArgs { checkpoint: Some(checkpoint), layout, output, fill: Values::parse(fill).unwrap(), template: None }
    }

    fn init(args: &InitArgs) -> Result<(), LintError> {
        super::init(args, worker::estimate_memory)
    }

    #[test]
    fn a_checkpoint_that_cannot_be_served_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"model_type": "none"}"#).unwrap();
        let output = dir.path().join("r");
        let args = InitArgs { checkpoint: Some(dir.path().to_owned()), ..args(LintLayout::Gpt, output.clone(), "") };
        let error = init(&args).unwrap_err().to_string();
        assert!(error.contains("config.json") && !output.exists(), "{error}");
    }

    #[test]
    fn a_checkpoint_that_a_server_could_not_load_is_refused_and_leaves_nothing() {
        let source = args(LintLayout::Gpt, PathBuf::new(), "").checkpoint.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let message = |change: fn(&Path), layout| {
            let (checkpoint, output) = (dir.path().join("checkpoint"), dir.path().join("r"));
            std::fs::create_dir(&checkpoint).unwrap();
            for file in std::fs::read_dir(&source).unwrap() {
                let file = file.unwrap();
                std::fs::copy(file.path(), checkpoint.join(file.file_name())).unwrap();
            }
            change(&checkpoint);
            let args = InitArgs { checkpoint: Some(checkpoint.clone()), ..args(layout, output.clone(), "") };
            let error = init(&args).unwrap_err().to_string();
            assert!(!output.exists(), "{error}");
            std::fs::remove_dir_all(&checkpoint).unwrap();
            error
        };
        let truncated: fn(&Path) = |dir| {
            let file = std::fs::OpenOptions::new().write(true).open(dir.join("model.safetensors")).unwrap();
            file.set_len(1_000_000).unwrap();
        };
        let missing_shard: fn(&Path) = |dir| {
            std::fs::remove_file(dir.join("model.safetensors")).unwrap();
            let index = r#"{"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}"#;
            std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
        };
        let no_tokenizer: fn(&Path) = |dir| std::fs::write(dir.join("tokenizer.json"), "{").unwrap();
        let quantized: fn(&Path) = |dir| {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            let awq = r#"{"quantization_config": {"quant_method": "awq", "bits": 8},"#;
            std::fs::write(dir.join("config.json"), text.replacen('{', awq, 1)).unwrap();
        };
        for layout in [LintLayout::TensorrtLlm, LintLayout::LlamaPython] {
            let error = message(truncated, layout);
            let path = dir.path().join("checkpoint/model.safetensors");
            assert!(error.contains(&format!("{} is truncated", path.display())), "{error}");
            let error = message(missing_shard, layout);
            assert!(error.contains("model-00001-of-00002.safetensors: No such file or directory"), "{error}");
            let error = message(no_tokenizer, layout);
            assert!(error.contains("tokenizer.json` is no tokenizer that can be read"), "{error}");
            let error = message(quantized, layout);
            assert!(error.contains("`quantization_config.bits` must be 4"), "{error}");
        }
    }

    #[test]
    fn every_layout_leaves_nothing_unfilled() {
        let dir = tempfile::tempdir().unwrap();
        for layout in LintLayout::value_variants() {
            let output = dir.path().join(format!("{layout:?}"));
            init(&args(*layout, output.clone(), "")).unwrap();
            let repository = repository::Repository::open(&[output]).unwrap();
            for name in repository.model_names().unwrap() {
                assert_eq!(repository.model(&name).unwrap().unfilled, Vec::<String>::new(), "{layout:?} {name}");
            }
        }
    }

    #[test]
    fn a_repository_of_one_text_model_has_any_name_and_the_given_parameters() {
        let dir = tempfile::tempdir().unwrap();
        let parameters = [("tp", "2".to_owned()), ("max_sequence_len", "64".to_owned())];
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/llama3_gqa");
        write_text_repository(dir.path(), "Qwen3-0.6B", &checkpoint, &parameters).unwrap();
        let repository = repository::Repository::open(&[dir.path().to_owned()]).unwrap();
        assert_eq!(repository.model_names().unwrap(), ["Qwen3-0.6B"]);
        let source = repository.model("Qwen3-0.6B").unwrap();
        assert_eq!(
            (source.config.parameter("tp"), source.config.parameter("max_sequence_len")),
            (Some("2"), Some("64"))
        );
        assert_eq!(source.unfilled, Vec::<String>::new());
        assert!(dir.path().join("Qwen3-0.6B/1/weights/config.json").is_file());
        let error = write_text_repository(dir.path(), "m", dir.path(), &[]).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
    }

    #[test]
    fn values_are_filled_in_and_unknown_ones_refused() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("r");
        let filled = args(LintLayout::TensorrtLlm, output.clone(), "triton_max_batch_size:7,tp:2");
        assert_eq!((num_ranks(&filled.fill), num_ranks(&Values::default())), (2, 1));
        init(&filled).unwrap();
        let source =
            repository::Repository::open(std::slice::from_ref(&output)).unwrap().model("tensorrt_llm").unwrap();
        assert_eq!((source.config.max_batch_size, source.config.parameter("tp")), (7, Some("2")));
        let error = init(&args(LintLayout::Gpt, dir.path().join("g"), "nothing:7")).unwrap_err();
        assert!(error.to_string().contains("no config.pbtxt has `${nothing}`"), "{error}");
        init(&args(LintLayout::Gpt, dir.path().join("g"), "nothing:7,triton_max_batch_size:3")).unwrap();
        let error = init(&args(LintLayout::TensorrtLlm, output, "")).unwrap_err();
        assert!(error.to_string().contains("is there already"), "{error}");
    }
}
