//! Every CUDA kernel must stay within its budget of registers, shared memory, spills and stack (`cuda/budget.txt`).
//!
//! The kernels were compiled when this test was built; no GPU is needed.

use std::collections::HashMap;

use kernels::cuda::{KernelInfo, NVRTC_VERSION, kernel_infos};

const BUDGET: &str = include_str!("../cuda/budget.txt");

/// Upper limits of a kernel: registers, shared memory, spills, stack.
type Budget = [u32; 4];

fn taken(info: &KernelInfo) -> Budget {
    [info.registers, info.shared_bytes, info.spill_bytes, info.stack_bytes]
}

fn budgets() -> HashMap<&'static str, Budget> {
    let lines = BUDGET.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let mut fields = line.split_whitespace();
            let name = fields.next().expect("a line that is not blank has a field");
            let numbers: Vec<u32> = fields.map(|field| field.parse().expect("a budget is a number")).collect();
            (name, numbers.try_into().unwrap_or_else(|_| panic!("`{line}` does not have four numbers")))
        })
        .collect()
}

#[test]
fn every_kernel_keeps_to_its_budget() {
    if NVRTC_VERSION.is_none() {
        println!("skipped: built without NVRTC, so there are no kernels (scripts/install_nvrtc)");
        return;
    }
    let budgets = budgets();
    let infos = kernel_infos();
    assert!(!infos.is_empty(), "the assembler's report names no kernel");
    let mut over = Vec::new();
    println!("{:<44} {:>5} {:>5} {:>7} {:>6} {:>6}", "kernel", "arch", "regs", "smem", "spill", "stack");
    for info in &infos {
        let budget = budgets.get(info.kernel.as_str()).unwrap_or(&budgets["*"]);
        let found = taken(info);
        let [registers, shared, spill, stack] = found;
        println!("{:<44} {:>5} {registers:>5} {shared:>7} {spill:>6} {stack:>6}", info.kernel, info.arch);
        if found.iter().zip(budget).any(|(found, budget)| found > budget) {
            over.push(format!("`{}` for {} takes {found:?} of {budget:?}", info.kernel, info.arch));
        }
    }
    assert!(over.is_empty(), "over budget (registers, shared, spill, stack):\n{}", over.join("\n"));
}

#[test]
fn every_named_budget_is_of_a_kernel_that_exists() {
    if NVRTC_VERSION.is_none() {
        println!("skipped: built without NVRTC, so there are no kernels (scripts/install_nvrtc)");
        return;
    }
    let infos = kernel_infos();
    for name in budgets().keys().filter(|name| **name != "*") {
        assert!(infos.iter().any(|info| info.kernel == *name), "budget.txt names `{name}`, which no file defines");
    }
}
