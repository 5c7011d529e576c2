/// Returns freed memory that the C library keeps to the system; by itself the library returns only the end of a heap. It blocks
/// allocations of other threads for some time, so call it after work that needed much memory.
pub fn give_memory_back() {
    // SAFETY: `malloc_trim` may be called by any thread at any time and accesses no memory that is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
