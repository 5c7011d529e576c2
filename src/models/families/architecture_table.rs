//! The table of docs/checkpoints.md of what each architecture runs on. It follows from the golden checkpoints and what loading them refuses.
//!
//! `TRIREME_WRITE_TABLE=1 cargo test -p models --lib architecture_table` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use device::Estimator;
use ops::{DeviceError, PipelineStage, StepLimits, Target, TensorParallel};
use serde_json::Value;
use settings::{KvCacheType, WeightPrecision};

use super::tests::SAME_ROWS;
use crate::{Config, ModelError};

const HEADER: &str = "| `architectures` | error on CPUs | CUDA | shapes tried on GPUs | TP | EP | PP | quantized forms tried | KV in 8 bits |";
/// The shapes of scripts/make_checkpoint.py that are no models of its families.
const OTHER_SHAPES: [(&str, &str); 10] = [
    ("small", "LlamaForCausalLM"),
    ("mha", "LlamaForCausalLM"),
    ("gqa", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
    ("baichuan", "BaichuanForCausalLM"),
    ("internlm", "InternLMForCausalLM"),
    ("internlm2", "InternLM2ForCausalLM"),
];

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

/// A checkpoint that is compared with transformers.
struct Golden {
    name: String,
    dir: PathBuf,
    architecture: String,
    /// `quant_method`.
    form: Option<String>,
    config: Config,
}

impl Golden {
    fn all() -> Vec<Self> {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        let dirs = std::fs::read_dir(goldens).unwrap().map(|entry| entry.unwrap().path());
        let compared = dirs.filter(|dir| dir.join("golden.json").is_file() && dir.join("config.json").is_file());
        let mut found: Vec<Self> = compared.map(Self::new).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    fn new(dir: PathBuf) -> Self {
        let fields: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        Self {
            name: dir.file_name().unwrap().to_string_lossy().into_owned(),
            architecture: fields["architectures"][0].as_str().unwrap().to_owned(),
            form: fields["quantization_config"]["quant_method"].as_str().map(str::to_owned),
            config: Config::from_dir(&dir).unwrap(),
            dir,
        }
    }

    /// What refuses one worker of the model; reads no weights.
    fn refusal(&self, config: &Config, target: Target, tp: TensorParallel, stage: PipelineStage) -> Option<ModelError> {
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(target, tp, limits).in_stage(stage);
        crate::load(&self.dir, config, &mut estimator).err()
    }

    fn refusal_alone(&self, config: &Config, target: Target) -> Option<ModelError> {
        self.refusal(config, target, TensorParallel { rank: 0, size: 1 }, PipelineStage::WHOLE)
    }

    fn refusal_in_group(&self, config: &Config, size: u32) -> Option<ModelError> {
        let mut ranks = (0..size).map(|rank| TensorParallel { rank, size });
        ranks.find_map(|tp| self.refusal(config, Target::Cpu, tp, PipelineStage::WHOLE))
    }

    /// What CUDA devices lack, or whose sizes they refuse; nothing of a model that they load.
    fn cuda(&self) -> Vec<String> {
        match self.refusal_alone(&self.config, Target::Cuda) {
            None => vec![],
            Some(ModelError::DeviceLacks { lacking, .. }) => {
                lacking.split(", ").map(|what| format!("no: {what}")).collect()
            }
            Some(ModelError::Device { source: DeviceError::Unsupported { what, .. }, .. }) => {
                vec![format!("some sizes: {}", what.trim_end_matches(" on GPUs"))]
            }
            Some(other) => panic!("{}: {other}", self.name),
        }
    }

    fn tp(&self) -> Vec<String> {
        match [2, 4].into_iter().find_map(|size| self.refusal_in_group(&self.config, size)) {
            None => vec![],
            Some(ModelError::WorldSize { what, .. }) if what.contains("normed together") => {
                vec!["not with one norm over all recurrent heads".to_owned()]
            }
            Some(other) => panic!("{}: {other}", self.name),
        }
    }

    /// Half of the experts for each of two workers.
    fn ep(&self) -> &'static str {
        match self.refusal_in_group(&self.config.clone().in_expert_groups(2), 2) {
            None => "yes",
            Some(ModelError::ExpertGroups { num_experts: 0, .. }) => "–",
            Some(ModelError::ExpertGroups { .. }) => "not tried",
            Some(ModelError::WorldSize { .. }) => "as TP",
            Some(other) => panic!("{}: {other}", self.name),
        }
    }

    /// Every number of stages is tried, so that every refusal is found.
    fn pp(&self) -> Vec<String> {
        let counts = 2..=u32::try_from(self.config.num_layers()).unwrap();
        let stages = counts.flat_map(|count| (0..count).map(move |index| PipelineStage { index, count }));
        let whole = TensorParallel { rank: 0, size: 1 };
        let refused = stages.filter_map(|stage| match self.refusal(&self.config, Target::Cpu, whole, stage)? {
            ModelError::Pipeline { what, .. } => Some(format!("not with {what}")),
            other => panic!("{}: {other}", self.name),
        });
        refused.collect()
    }

    fn kv_in_8_bits(&self) -> Vec<String> {
        match self.refusal_alone(&self.config.clone().in_kv_cache(KvCacheType::Fp8), Target::Cpu) {
            None => vec![],
            Some(ModelError::LatentCodes { .. }) => vec!["no: latent vectors".to_owned()],
            Some(other) => panic!("{}: {other}", self.name),
        }
    }

    /// The forms that all architectures have, which are no columns of the table.
    fn assert_rounded_at_load(&self) {
        let forms = [WeightPrecision::Fp8, WeightPrecision::Int8, WeightPrecision::Int4];
        for (target, precision) in
            [Target::Cpu, Target::Cuda].into_iter().flat_map(|target| forms.map(|form| (target, form)))
        {
            let config = self.config.clone().in_precision(precision, target).unwrap();
            let refused = self.refusal_alone(&config, target).map(|error| error.to_string());
            let plain = self.refusal_alone(&self.config, target).map(|error| error.to_string());
            assert_eq!(refused, plain, "{} in {precision}", self.name);
        }
    }
}

/// The largest error of some checkpoints, of those in the widest type. `errors` has type and error of each.
fn largest_error(errors: &[(String, f64)]) -> Option<String> {
    let types = [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")];
    let of = |form: &str| errors.iter().filter(|(found, _)| found == form).map(|(_, error)| *error).reduce(f64::max);
    types.into_iter().find_map(|(form, short)| Some(format!("{:.1e} ({short})", of(form)?)))
}

/// Type and error of each checkpoint in docs/lab/families.md.
fn errors() -> BTreeMap<String, (String, f64)> {
    let text = read("docs/lab/families.md");
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        (cells[1].trim_matches('`').to_owned(), (cells[3].to_owned(), cells[6].parse().unwrap()))
    })
    .collect()
}

/// The shapes that scripts/test_gpu compares with transformers, by architecture.
fn shapes() -> BTreeMap<String, Vec<String>> {
    let (checkpoints, script) = (read("scripts/make_checkpoint.py"), read("scripts/test_gpu"));
    let lists = script.split("TRIREME_TEST_SHAPES:-").skip(1).filter_map(|rest| rest.split('}').next());
    let tried: BTreeSet<&str> = lists.flat_map(str::split_whitespace).collect();
    let of_families = checkpoints.lines().filter_map(|line| {
        let (shape, rest) = line.strip_prefix("    \"")?.split_once("\": (\"")?;
        Some((shape.to_owned(), format!("{}ForCausalLM", rest.split('"').next()?)))
    });
    let others = OTHER_SHAPES.map(|(shape, name)| (shape.to_owned(), name.to_owned()));
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (shape, name) in others.into_iter().chain(of_families) {
        assert!(super::find(&name).is_some(), "{name} of the shape {shape}");
        if tried.contains(&shape[..]) {
            found.entry(name).or_default().push(shape);
        }
    }
    found
}

fn rows() -> Vec<String> {
    let (goldens, errors, shapes) = (Golden::all(), errors(), shapes());
    let row = |name: &&str| {
        let same = SAME_ROWS.iter().find(|(other, _)| other == name).map(|(_, golden)| *golden);
        let own: Vec<&Golden> =
            goldens.iter().filter(|golden| golden.architecture == *name || Some(&golden.name[..]) == same).collect();
        // What limits some of its checkpoints.
        let limits = |of: fn(&Golden) -> Vec<String>| match joined(own.iter().flat_map(|golden| of(golden))) {
            none if none.is_empty() => "yes".to_owned(),
            limits => limits,
        };
        let ep: BTreeSet<&str> = own.iter().map(|golden| golden.ep()).collect();
        let ep = ["yes", "not tried", "as TP", "–"].into_iter().find(|kind| ep.contains(kind)).unwrap();
        let in_code = |word: &String| format!("`{word}`");
        let errors: Vec<_> = own.iter().filter_map(|golden| errors.get(&golden.name).cloned()).collect();
        let error = largest_error(&errors);
        let cells = [
            in_code(&(*name).to_owned()),
            error.unwrap_or_else(|| panic!("docs/lab/families.md lacks {name}: see scripts/goldens/error_table.py")),
            limits(Golden::cuda),
            joined(shapes.get(*name).into_iter().flatten().map(in_code)),
            limits(Golden::tp),
            ep.to_owned(),
            limits(Golden::pp),
            joined(own.iter().filter_map(|golden| golden.form.as_ref()).map(in_code)),
            limits(Golden::kv_in_8_bits),
        ];
        format!("| {} |", cells.join(" | "))
    };
    super::architectures().iter().map(row).collect()
}

/// Each once.
fn joined(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ")
}

#[test]
fn the_documentation_says_what_each_architecture_runs_on() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checkpoints.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let start = text.find(HEADER).expect("docs/checkpoints.md has the table");
    let size: usize = text[start..].split_inclusive('\n').take_while(|line| line.starts_with('|')).map(str::len).sum();
    let rule = "|---".repeat(HEADER.matches('|').count() - 1) + "|";
    let table = format!("{HEADER}\n{rule}\n{}\n", rows().join("\n"));
    if std::env::var_os("TRIREME_WRITE_TABLE").is_some() {
        std::fs::write(&path, [&text[..start], &table, &text[start + size..]].concat()).unwrap();
        return;
    }
    for (expected, found) in table.lines().zip(text[start..start + size].lines().chain(std::iter::repeat(""))) {
        assert_eq!(
            found, expected,
            "`TRIREME_WRITE_TABLE=1 cargo test -p models --lib architecture_table` writes the table"
        );
    }
    assert_eq!(text[start..start + size].lines().count(), table.lines().count(), "rows of architectures that are gone");
}

#[test]
fn every_architecture_is_rounded_at_load_on_every_device_that_has_it() {
    Golden::all().iter().filter(|golden| golden.form.is_none()).for_each(Golden::assert_rounded_at_load);
}
