//! Control messages of `sendmsg` and `recvmsg`: a buffer, a writer and a reader.

use std::mem;

use libc::{c_int, cmsghdr, msghdr};

/// Bytes of a buffer: room for every control message that the receive sockets ask for.
const LEN: usize = 256;

/// A buffer for control messages, aligned as they need it.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Buffer([u8; LEN]);

impl Buffer {
    pub const EMPTY: Buffer = Buffer([0; LEN]);
    pub const LEN: usize = LEN;

    pub fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.0.as_mut_ptr().cast()
    }
}

/// Fills a buffer with control messages.
pub(super) struct Writer<'a> {
    buffer: &'a mut Buffer,
    used: usize,
}

impl<'a> Writer<'a> {
    pub fn new(buffer: &'a mut Buffer) -> Writer<'a> {
        Writer { buffer, used: 0 }
    }

    /// Appends one message. Panics if the buffer is full, which the few messages of one packet can't reach.
    pub fn push<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        let size = mem::size_of::<T>() as u32;
        // SAFETY: arithmetic only.
        let (len, space) = unsafe { (libc::CMSG_LEN(size), libc::CMSG_SPACE(size)) };
        let rest = &mut self.buffer.0[self.used..][..space as usize];
        let head: *mut cmsghdr = rest.as_mut_ptr().cast();
        // SAFETY: `rest` has room for the header and the value, and is aligned: the buffer is, and spaces keep it.
        unsafe {
            (*head).cmsg_len = len as _;
            (*head).cmsg_level = level;
            (*head).cmsg_type = kind;
            libc::CMSG_DATA(head).cast::<T>().write_unaligned(value);
        }
        self.used += space as usize;
    }

    /// Bytes filled.
    pub fn len(&self) -> usize {
        self.used
    }
}

/// Hands each control message that the kernel wrote for `message` to `sink`: level, type and data.
///
/// # Safety
/// `message` is as `recvmsg` left it, and its control buffer is still there.
pub(super) unsafe fn for_each(message: &msghdr, mut sink: impl FnMut(c_int, c_int, &[u8])) {
    // SAFETY: the kernel wrote well-formed control messages, within `msg_controllen`.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while let Some(at) = head.as_ref() {
            #[allow(clippy::unnecessary_cast)] // u32 with other C libraries
            let len = (at.cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            sink(
                at.cmsg_level,
                at.cmsg_type,
                std::slice::from_raw_parts(libc::CMSG_DATA(head), len),
            );
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
}
