//! Advice on the memory of regions that are paged on demand.

use std::ffi::c_int;

use ferroce_engine::verbs::{Advice, Sge, VerbsError};

use super::pd::Pd;
use super::verb;
use crate::abi::verbs::ibv_pd;

/// `IBV_ADVISE_MR_FLAG_FLUSH`: wait until it is done.
const FLUSH: u32 = 1;

/// Pages in what work requests will use. Without the flush flag a device does it later, and nobody hears of memory that
/// is not there: so it is here.
pub(super) unsafe extern "C" fn advise_mr(
    public: *mut ibv_pd,
    advice: u32,
    flags: u32,
    sges: *mut Sge,
    count: u32,
) -> c_int {
    verb(|| {
        if flags & !FLUSH != 0 || count == 0 || sges.is_null() {
            return Err(VerbsError::Invalid);
        }
        let advice = Advice::from_number(advice).ok_or(VerbsError::NotSupported)?;
        // SAFETY: the program passes a PD of this provider, and so many entries.
        let (pd, sges) = unsafe { (Pd::of(public), std::slice::from_raw_parts(sges, count as usize)) };
        match pd.context.engine.advise(pd.id, advice, sges) {
            Err(VerbsError::Fault) if flags & FLUSH == 0 => Ok(()),
            done => done,
        }
    })
}
