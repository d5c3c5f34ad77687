//! Copy and atomics for x86_64 whose faults end in an error: few instructions, known by address to [`super::fault`].

use std::arch::global_asm;

use crate::memory::AtomicOp;

// The copy keeps rdi (destination), rsi (source) and rdx (bytes left) such that at every instruction that may fault
// they describe what is still to do. A fault goes on at `bytewise`, which copies what can be copied and stops at the
// very byte; a fault there ends with rdx, the count of bytes left.
//
// The last eight bytes are stored last, by one store: programs poll on the end of what a peer writes.
global_asm!(
    ".pushsection .text.ferroce_guarded,\"ax\",@progbits",
    ".p2align 6",
    ".globl ferroce_guarded_copy",
    ".hidden ferroce_guarded_copy",
    ".type ferroce_guarded_copy,@function",
    "ferroce_guarded_copy:",
    ".cfi_startproc",
    ".globl ferroce_guarded_copy_begin",
    ".hidden ferroce_guarded_copy_begin",
    "ferroce_guarded_copy_begin:",
    "cmp rdx, 16",
    "ja 30f",
    "cmp edx, 8",
    "jae 8f",
    "cmp edx, 4",
    "jae 4f",
    "cmp edx, 1",
    "ja 2f",
    "jb 9f",
    // 1
    "mov al, [rsi]",
    "mov [rdi], al",
    "9: xor eax, eax",
    "ret",
    // 2 or 3
    "2: movzx eax, word ptr [rsi]",
    "movzx ecx, word ptr [rsi + rdx - 2]",
    "mov [rdi], ax",
    "mov [rdi + rdx - 2], cx",
    "xor eax, eax",
    "ret",
    // 4 to 7
    "4: mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    // 8 to 16; exactly 8 must be one store
    "8: mov rcx, [rsi + rdx - 8]",
    "je 88f",
    "mov rax, [rsi]",
    "mov [rdi], rax",
    "88: mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    // 17 and more
    "30: cmp rdx, {rep_from}",
    "jb 31f",
    // The string move of current CPUs is up to 25 times slower where the destination lies 1 to 31 bytes behind the
    // source, pages aside.
    "mov eax, edi",
    "sub eax, esi",
    "dec eax",
    "and eax, 4095",
    "cmp eax, 31",
    "jae 50f",
    "31: cmp rdx, 32",
    "jbe 40f",
    ".p2align 4",
    "32: movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "add rsi, 32",
    "add rdi, 32",
    "sub rdx, 32",
    "cmp rdx, 32",
    "ja 32b",
    // 1 to 32 left, at least 17 in all: the last 16 bytes may lie partly in what is done.
    "40: cmp rdx, 16",
    "jbe 41f",
    "movups xmm0, [rsi]",
    "movups [rdi], xmm0",
    "41: mov rax, [rsi + rdx - 16]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi + rdx - 16], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    // Long: string move up to the last eight.
    "50: lea rcx, [rdx - 8]",
    ".globl ferroce_guarded_copy_string",
    ".hidden ferroce_guarded_copy_string",
    "ferroce_guarded_copy_string:",
    "rep movsb",
    ".globl ferroce_guarded_copy_last",
    ".hidden ferroce_guarded_copy_last",
    "ferroce_guarded_copy_last:",
    "mov edx, 8",
    "mov rcx, [rsi]",
    "mov [rdi], rcx",
    "xor eax, eax",
    "ret",
    ".globl ferroce_guarded_resume_string",
    ".hidden ferroce_guarded_resume_string",
    "ferroce_guarded_resume_string:",
    "lea rdx, [rcx + 8]",
    ".globl ferroce_guarded_bytewise",
    ".hidden ferroce_guarded_bytewise",
    "ferroce_guarded_bytewise:",
    "60: mov al, [rsi]",
    "mov [rdi], al",
    "inc rsi",
    "inc rdi",
    "dec rdx",
    "jnz 60b",
    ".globl ferroce_guarded_stop",
    ".hidden ferroce_guarded_stop",
    "ferroce_guarded_stop:",
    "mov rax, rdx",
    "ret",
    ".cfi_endproc",
    ".size ferroce_guarded_copy, . - ferroce_guarded_copy",
    // Atomics: rdi = word, rsi = compare, addend or value, rdx = swap, rcx = where the old value goes; rdx on a fault is 1.
    ".p2align 4",
    ".globl ferroce_guarded_compare_swap",
    ".hidden ferroce_guarded_compare_swap",
    ".type ferroce_guarded_compare_swap,@function",
    "ferroce_guarded_compare_swap:",
    ".cfi_startproc",
    "mov rax, rsi",
    "lock cmpxchg [rdi], rdx",
    "mov [rcx], rax",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ferroce_guarded_compare_swap, . - ferroce_guarded_compare_swap",
    ".p2align 4",
    ".globl ferroce_guarded_store",
    ".hidden ferroce_guarded_store",
    ".type ferroce_guarded_store,@function",
    "ferroce_guarded_store:",
    ".cfi_startproc",
    "xchg [rdi], rsi",
    "mov [rcx], rsi",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ferroce_guarded_store, . - ferroce_guarded_store",
    ".p2align 4",
    ".globl ferroce_guarded_fetch_add",
    ".hidden ferroce_guarded_fetch_add",
    ".type ferroce_guarded_fetch_add,@function",
    "ferroce_guarded_fetch_add:",
    ".cfi_startproc",
    "lock xadd [rdi], rsi",
    "mov [rcx], rsi",
    "xor eax, eax",
    "ret",
    ".globl ferroce_guarded_atomic_failed",
    ".hidden ferroce_guarded_atomic_failed",
    "ferroce_guarded_atomic_failed:",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size ferroce_guarded_fetch_add, . - ferroce_guarded_fetch_add",
    ".popsection",
    rep_from = const REP_FROM,
);

/// From how many bytes on the string move is faster than a loop of 16-byte moves.
const REP_FROM: usize = 1024;

unsafe extern "C" {
    fn ferroce_guarded_copy(dst: *mut u8, src: *const u8, len: usize) -> usize;
    fn ferroce_guarded_compare_swap(word: *mut u64, compare: u64, swap: u64, old: *mut u64) -> u32;
    fn ferroce_guarded_store(word: *mut u64, value: u64, unused: u64, old: *mut u64) -> u32;
    fn ferroce_guarded_fetch_add(word: *mut u64, add: u64, unused: u64, old: *mut u64) -> u32;
    fn ferroce_guarded_copy_begin();
    fn ferroce_guarded_copy_string();
    fn ferroce_guarded_copy_last();
    fn ferroce_guarded_resume_string();
    fn ferroce_guarded_bytewise();
    fn ferroce_guarded_stop();
    fn ferroce_guarded_atomic_failed();
}

/// Copies `len` bytes from `src` to `dst` in order; gives how many are left when memory can't be reached.
///
/// # Safety
/// Where memory is mapped, the usual rules of raw reads and writes hold; memory that is not mapped is no violation.
/// [`super::fault::ensure_handlers`] must have been called. Overlapping ranges give unspecified bytes.
#[inline]
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise; the routine touches nothing but the two ranges and scratch registers.
    unsafe { ferroce_guarded_copy(dst, src, len) }
}

/// Runs `op` on `word`; gives the old value, or `None` if it can't be read or written.
///
/// # Safety
/// As for [`copy`]. `word` is aligned.
pub(super) unsafe fn atomic(word: *mut u64, op: AtomicOp) -> Option<u64> {
    let mut old = 0;
    // SAFETY: the caller's promise; `old` is ours.
    let failed = unsafe {
        match op {
            AtomicOp::CompareSwap { compare, swap } => {
                ferroce_guarded_compare_swap(word, compare, swap, &raw mut old)
            }
            AtomicOp::FetchAdd { add } => ferroce_guarded_fetch_add(word, add, 0, &raw mut old),
            AtomicOp::Store { value } => ferroce_guarded_store(word, value, 0, &raw mut old),
        }
    };
    (failed == 0).then_some(old)
}

/// Where execution goes on after a fault at instruction `rip`; `None` if that is not ours.
#[inline]
pub(super) fn resume_at(rip: usize) -> Option<usize> {
    let at = |label: unsafe extern "C" fn()| label as *const () as usize;
    let within = |from: usize, to: usize| (from..to).contains(&rip);
    if within(at(ferroce_guarded_copy_begin), at(ferroce_guarded_copy_string)) {
        Some(at(ferroce_guarded_bytewise))
    } else if within(at(ferroce_guarded_copy_string), at(ferroce_guarded_copy_last)) {
        Some(at(ferroce_guarded_resume_string))
    } else if within(at(ferroce_guarded_copy_last), at(ferroce_guarded_resume_string)) {
        Some(at(ferroce_guarded_bytewise))
    } else if within(at(ferroce_guarded_bytewise), at(ferroce_guarded_stop)) {
        Some(at(ferroce_guarded_stop))
    } else if within(
        ferroce_guarded_compare_swap as *const () as usize,
        at(ferroce_guarded_atomic_failed),
    ) {
        Some(at(ferroce_guarded_atomic_failed))
    } else {
        None
    }
}
