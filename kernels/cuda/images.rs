//! The compiled kernels embedded in this binary.

/// A kernel file compiled for one architecture.
#[derive(Debug)]
pub struct Image {
    /// Stem of the `.cu` file.
    pub module: &'static str,
    /// `80`, `90a`, `100a` … or `ptx`.
    pub arch: &'static str,
    /// Cubin, or PTX text with a final zero byte.
    pub bytes: &'static [u8],
    /// The assembler's report.
    pub log: &'static str,
}

// Defines `COMPILED_WITH` and `IMAGES`; written by build.rs.
include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));

/// Version of the compiler that built the kernels; `None` in a build without CUDA kernels.
pub const NVRTC_VERSION: Option<&str> = COMPILED_WITH;

/// The resources of one kernel, as reported by the assembler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    /// Name of the entry point.
    pub kernel: String,
    /// The same as [`Image::arch`].
    pub arch: &'static str,
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Bytes that a thread spills to local memory, stores and loads.
    pub spill_bytes: u32,
    /// Stack size of a thread, in bytes.
    pub stack_bytes: u32,
}

impl Image {
    /// How well this image fits a device of compute capability `major.minor`: higher is better, `None` if it cannot run
    /// there.
    pub fn fit(&self, major: i32, minor: i32) -> Option<i32> {
        if self.arch == "ptx" {
            return Some(0);
        }
        let specific = self.arch.ends_with('a');
        let number: i32 = self.arch.trim_end_matches('a').parse().ok()?;
        let (image_major, image_minor) = (number / 10, number % 10);
        let runs = image_major == major && if specific { image_minor == minor } else { image_minor <= minor };
        runs.then_some(1 + 2 * image_minor + i32::from(specific))
    }
}

/// The best image of each module for a device.
pub(crate) fn images_for(major: i32, minor: i32) -> Vec<&'static Image> {
    let mut best: Vec<(&'static Image, i32)> = Vec::new();
    for image in IMAGES {
        let Some(fit) = image.fit(major, minor) else { continue };
        match best.iter_mut().find(|(other, _)| other.module == image.module) {
            Some(entry) if entry.1 < fit => *entry = (image, fit),
            Some(_) => {}
            None => best.push((image, fit)),
        }
    }
    best.into_iter().map(|(image, _)| image).collect()
}

/// Every kernel of every cubin of this build.
pub fn kernel_infos() -> Vec<KernelInfo> {
    IMAGES.iter().flat_map(|image| parse_log(image.log, image.arch)).collect()
}

/// Parses the assembler's report: a line with the entry's name, then its stack and spills, then its registers and
/// memory.
fn parse_log(log: &str, arch: &'static str) -> Vec<KernelInfo> {
    let mut infos: Vec<KernelInfo> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            infos.push(KernelInfo { kernel, arch, registers: 0, shared_bytes: 0, spill_bytes: 0, stack_bytes: 0 });
        }
        let Some(info) = infos.last_mut() else { continue };
        if line.contains("bytes spill stores") && info.registers == 0 {
            info.stack_bytes = number_before(line, " bytes stack frame");
            info.spill_bytes = number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        }
        if line.contains(" registers") && line.contains("Used ") {
            info.registers = number_before(line, " registers");
            info.shared_bytes = number_before(line, " bytes smem");
        }
    }
    infos
}

/// The number that ends where `unit` begins; 0 if there is none.
fn number_before(line: &str, unit: &str) -> u32 {
    let head = line.split(unit).next().filter(|head| head.len() < line.len()).unwrap_or_default();
    let digits = head.rfind(|c: char| !c.is_ascii_digit()).map_or(head, |at| &head[at + 1..]);
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'k_bf16' for 'sm_90a'\n\
        ptxas info    : Function properties for k_bf16\n    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
        ptxas info    : Used 44 registers, used 1 barriers, 128 bytes smem, 16 bytes cumulative stack size\n";

    #[test]
    fn the_assemblers_report_is_read() {
        let expected = KernelInfo {
            kernel: "k_bf16".into(),
            arch: "90a",
            registers: 44,
            shared_bytes: 128,
            spill_bytes: 12,
            stack_bytes: 16,
        };
        assert_eq!(parse_log(LOG, "90a"), [expected]);
    }

    #[test]
    fn a_device_gets_the_most_specific_image_it_can_run() {
        let image = |arch| Image { module: "m", arch, bytes: &[], log: "" };
        assert!(image("90a").fit(9, 0) > image("80").fit(9, 0));
        assert_eq!(image("90a").fit(10, 0), None);
        assert_eq!(image("80").fit(9, 0), None);
        assert!(image("80").fit(8, 9) > image("ptx").fit(8, 9));
        assert!(image("89").fit(8, 9) > image("80").fit(8, 9));
        assert!(image("120").fit(12, 1) > image("ptx").fit(12, 1));
        assert!(image("ptx").fit(12, 0).is_some());
    }
}
