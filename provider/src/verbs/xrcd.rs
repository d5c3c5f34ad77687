//! XRC domains.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ferroce_engine::device::XrcdId;
use ferroce_engine::verbs::VerbsError;

use super::context::Context;
use super::{make, verb};
use crate::abi::verbs::{ibv_context, ibv_xrcd, ibv_xrcd_init_attr};

/// `IBV_XRCD_INIT_ATTR_FD` and `IBV_XRCD_INIT_ATTR_OFLAGS`.
const BOTH: u32 = 1 << 0 | 1 << 1;

/// An XRC domain; begins as `struct ibv_xrcd`.
#[repr(C)]
pub struct Xrcd {
    public: ibv_xrcd,
    context: Arc<Context>,
    /// Its name in the engine.
    id: XrcdId,
    /// Keeps the number of the file's inode from being given to another file.
    _file: Option<File>,
}

impl Xrcd {
    /// The domain behind a public one; EINVAL if there is none.
    ///
    /// # Safety
    /// `xrcd` must be null, or of this provider and live as long as the result is used.
    pub unsafe fn of<'a>(xrcd: *mut ibv_xrcd) -> Result<&'a Xrcd, VerbsError> {
        // SAFETY: as the caller says; the public part comes first.
        unsafe { xrcd.cast::<Xrcd>().as_ref() }.ok_or(VerbsError::Invalid)
    }

    /// Its name in the engine. EINVAL if there is none, or it is of another context.
    ///
    /// # Safety
    /// `xrcd` must be null or of this provider.
    pub unsafe fn id(xrcd: *mut ibv_xrcd, context: &Arc<Context>) -> Result<XrcdId, VerbsError> {
        // SAFETY: as the caller says.
        let xrcd = unsafe { Xrcd::of(xrcd)? };
        let own = Arc::ptr_eq(&xrcd.context, context);
        own.then_some(xrcd.id).ok_or(VerbsError::Invalid)
    }
}

/// Another descriptor of an open file.
fn duplicate(fd: c_int) -> Result<File, VerbsError> {
    // SAFETY: plain call.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy >= 0 {
        // SAFETY: new, and ours.
        return Ok(unsafe { File::from_raw_fd(copy) });
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EBADF) => Err(VerbsError::BadDescriptor),
        _ => Err(VerbsError::NoMemory),
    }
}

pub(super) unsafe extern "C" fn open_xrcd(
    public: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    make(|| {
        // SAFETY: the program passes attributes.
        let attr = unsafe { &*attr };
        if attr.comp_mask & !BOTH != 0 {
            return Err(VerbsError::NotSupported);
        }
        if attr.comp_mask != BOTH {
            return Err(VerbsError::Invalid);
        }
        // SAFETY: libibverbs passes an open context of this provider.
        let context = unsafe { Context::of(public) };
        let file = match attr.fd {
            -1 => None,
            fd => Some(duplicate(fd)?),
        };
        let metadata = file.as_ref().map(File::metadata).transpose();
        let metadata = metadata.map_err(|_| VerbsError::BadDescriptor)?;
        let inode = metadata.map(|found| (found.dev(), found.ino()));
        let has = |flag| attr.oflags & flag != 0;
        let (create, exclusive) = (has(libc::O_CREAT), has(libc::O_EXCL));
        let id = context.engine.lock()?.open_xrcd(inode, create, exclusive)?;
        let xrcd = Xrcd {
            public: ibv_xrcd { context: public },
            context,
            id,
            _file: file,
        };
        Ok(Box::into_raw(Box::new(xrcd)).cast())
    })
}

pub(super) unsafe extern "C" fn close_xrcd(public: *mut ibv_xrcd) -> c_int {
    verb(|| {
        // SAFETY: the program passes a domain of this provider.
        let xrcd = unsafe { Xrcd::of(public)? };
        xrcd.context.engine.lock()?.close_xrcd(xrcd.id)?;
        // SAFETY: `open_xrcd` made it, and no object uses it any more.
        drop(unsafe { Box::from_raw(public.cast::<Xrcd>()) });
        Ok(())
    })
}
