//! The handlers of SIGSEGV and SIGBUS: faults of the guarded routines end there, all others reach the program's
//! own handler as if ours were not there.
//!
//! A program may replace the handlers at any time; ours is then put in front again when memory is registered. Each
//! time a fresh entry function ([`ENTRIES`]) is used, its *level*, which knows the handler it replaced. So a program's
//! handler that calls the one it found (ours, of a lower level) goes on down the chain. Should that one's chain lead
//! back to it, a mark in the signal's context says which level we are at, and only lower ones follow: no circle.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};
use parking_lot::Mutex;

use super::guarded;

/// How many handlers of the program, each of which replaced ours, are kept apart.
const LEVELS: usize = 16;

/// A signal we handle, and whom we replaced.
struct Handled {
    signal: c_int,
    /// By level: the action to go on with; null from the number of levels in use on.
    replaced: [AtomicPtr<sigaction>; LEVELS],
    /// How many levels are in use.
    levels: Mutex<usize>,
}

impl Handled {
    const fn new(signal: c_int) -> Handled {
        Handled {
            signal,
            replaced: [const { AtomicPtr::new(ptr::null_mut()) }; LEVELS],
            levels: Mutex::new(0),
        }
    }
}

static SEGV: Handled = Handled::new(libc::SIGSEGV);
static BUS: Handled = Handled::new(libc::SIGBUS);

type Entry = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

macro_rules! entries {
    ($($level:literal)*) => { [$(entry::<$level>),*] };
}

/// The handlers, by level.
static ENTRIES: [Entry; LEVELS] = entries!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Sees to it that faults of the guarded routines reach us first. Cheap when nothing has changed.
pub(super) fn ensure_handlers() -> io::Result<()> {
    for handled in [&SEGV, &BUS] {
        ensure(handled)?;
    }
    Ok(())
}

fn ensure(handled: &Handled) -> io::Result<()> {
    let mut levels = handled.levels.lock();
    let current = exchange(handled.signal, None)?;
    if ENTRIES
        .iter()
        .any(|&entry| entry as *const () as usize == current.sa_sigaction)
    {
        return Ok(());
    }
    // A handler that was replaced before and is back is the newest now.
    let known = |level: &AtomicPtr<sigaction>| level.load(Ordering::Acquire);
    let mut kept: Vec<_> = handled.replaced[..*levels].iter().map(known).collect();
    kept.retain(|&action| {
        // SAFETY: actions are leaked, and the default action is static, so these pointers stay valid.
        let action = unsafe { &*action };
        !is_function(action) || action.sa_sigaction != current.sa_sigaction
    });
    if kept.len() == LEVELS {
        kept.remove(1);
    }
    let level = kept.len();
    kept.push(Box::into_raw(Box::new(current)));
    let mut ours = current;
    ours.sa_sigaction = ENTRIES[level] as *const () as usize;
    // The mask, the stack and restarts stay as the program chose them; RESETHAND is played by `call`.
    ours.sa_flags = (ours.sa_flags & !libc::SA_RESETHAND) | libc::SA_SIGINFO;
    if !is_function(&current) {
        ours.sa_flags |= libc::SA_ONSTACK | libc::SA_RESTART;
    }
    kept.resize(LEVELS, ptr::null_mut());
    for (replaced, action) in handled.replaced.iter().zip(kept) {
        replaced.store(action, Ordering::Release);
    }
    *levels = level + 1;
    let found = exchange(handled.signal, Some(&ours))?;
    if found.sa_sigaction != current.sa_sigaction {
        handled.replaced[level].store(Box::into_raw(Box::new(found)), Ordering::Release);
    }
    Ok(())
}

/// Sets (if `new` is given) and gives the action of a signal that was in force.
fn exchange(signal: c_int, new: Option<&sigaction>) -> io::Result<sigaction> {
    let mut old = MaybeUninit::uninit();
    // SAFETY: `new` is null or a whole action, `old` is written on success.
    unsafe {
        if sigaction(signal, new.map_or(ptr::null(), |new| new), old.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(old.assume_init())
    }
}

fn is_function(action: &sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

/// Objects whose addresses mark a context: a handler of the program that level `i` called is at work.
///
/// The mark lies in `uc_link`, which the kernel sets to null for a signal and does not read back.
static MARKS: [u8; LEVELS] = [0; LEVELS];

/// The levels that may be asked, given the mark in a context and the level that was entered: those below the count.
fn allowed(mark: *mut ucontext_t, entered: usize) -> usize {
    let caller = (mark as usize).wrapping_sub(MARKS.as_ptr() as usize);
    if caller < LEVELS {
        caller.min(entered + 1)
    } else {
        entered + 1
    }
}

/// What the kernel calls. Everything from here on is async-signal-safe.
extern "C" fn entry<const LEVEL: usize>(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel, or a handler in front of ours that passes on what the kernel gave, hands valid pointers.
    unsafe {
        let context = context.cast::<ucontext_t>();
        if is_fault(&*info) {
            let rip = &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
            if let Some(resume) = guarded::resume_at(*rip as usize) {
                *rip = resume as i64;
                return;
            }
        }
        let handled = if signal == libc::SIGBUS { &BUS } else { &SEGV };
        let mark = (*context).uc_link;
        for (level, replaced) in handled.replaced[..allowed(mark, LEVEL)].iter().enumerate().rev() {
            let action = replaced.load(Ordering::Acquire);
            if !action.is_null() {
                (*context).uc_link = (&raw const MARKS[level]).cast_mut().cast();
                call(replaced, &*action, signal, info, context.cast());
                (*context).uc_link = mark;
                return;
            }
        }
        default(signal, info);
    }
}

/// Whether an instruction caused the signal: then the instruction runs again when the handler returns.
fn is_fault(info: &siginfo_t) -> bool {
    const BUS_MCEERR_AO: c_int = 5;
    info.si_code > 0 && !(info.si_signo == libc::SIGBUS && info.si_code == BUS_MCEERR_AO)
}

/// Does what `action` would have done without us.
///
/// # Safety
/// `info` and `context` are those of the signal.
unsafe fn call(
    replaced: &AtomicPtr<sigaction>,
    action: &sigaction,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: a function that the program installed with these flags has this type.
    unsafe {
        match action.sa_sigaction {
            libc::SIG_DFL => default(signal, info),
            // The kernel lets nobody ignore a fault.
            libc::SIG_IGN if is_fault(&*info) => default(signal, info),
            libc::SIG_IGN => {}
            function => {
                if action.sa_flags & libc::SA_RESETHAND != 0 {
                    replaced.store((&raw const DEFAULT.0).cast_mut(), Ordering::Release);
                }
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    std::mem::transmute::<usize, Entry>(function)(signal, info, context);
                } else {
                    std::mem::transmute::<usize, extern "C" fn(c_int)>(function)(signal);
                }
            }
        }
    }
}

/// An action that is only read; the pointer inside (`sa_restorer`) is null.
struct DefaultAction(sigaction);
// SAFETY: nothing writes to it.
unsafe impl Sync for DefaultAction {}
// SAFETY: all zeros is a valid action: SIG_DFL without flags.
static DEFAULT: DefaultAction = DefaultAction(unsafe { MaybeUninit::zeroed().assume_init() });

/// Ends the process as the signal does by default, core dump included.
///
/// # Safety
/// `info` is that of the signal.
unsafe fn default(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: system calls with valid arguments. The signal is blocked here, unless the program chose SA_NODEFER.
    unsafe {
        sigaction(signal, &raw const DEFAULT.0, ptr::null_mut());
        if !is_fault(&*info) {
            let (pid, tid) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, info);
        }
    }
}
