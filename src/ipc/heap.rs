/// Gives memory back to the system that the C library keeps of what was freed, which it else does at the end of a heap only.
/// Takes some time of whoever else allocates meanwhile, so it is for the end of work that took much memory.
pub fn give_memory_back() {
    // SAFETY: `malloc_trim` may be called by any thread at any time, and touches no memory that is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
